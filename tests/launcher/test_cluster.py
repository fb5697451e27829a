"""Jobs on several nodes of one machine: what the flags mean, who hosts the controller, and how it all ends."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest
from tests.network.cluster import SCRIPT
from tests.support.jobs import IGNORED, IGNORING, ignored_by
from tests.support.nodes import DEADLINE_S, SECRET, Nodes, agent, await_controller, await_output, await_training
from tests.support.watching import await_journal

from keepstep.config import SECRET_VARIABLE
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster import flags
from keepstep.launcher.cluster.flags import Shape
from keepstep.trace.record import runfolder


@pytest.mark.parametrize(
    ("text", "spares", "shape", "slots"),
    [
        ("2", 0, Shape(2, 2, 8, 0), 8),
        ("2", 1, Shape(2, 2, 8, 1), 9),
        ("2", 3, Shape(2, 2, 8, 3), 10),
        ("2:3", 8, Shape(2, 3, 8, 8), 8),
        ("2:3", 9, Shape(2, 3, 8, 9), 9),
        ("2:4", 1, Shape(2, 4, 8, 1), 8),
    ],
)
def test_ranks_and_slots(text: str, spares: int, shape: Shape, slots: int) -> None:
    found = flags.shape_of(text, 8, spares)
    assert found == shape
    assert found.world_size == 16
    assert found.slots(None) == slots
    assert found.slots(11) == 11
    assert found.max_nodes * slots >= found.world_size + spares, "there is room for all"


@pytest.mark.parametrize("text", ["0", "2:1", "a", "1:", "2:3:4", "-1", ""])
def test_numbers_of_nodes_that_cannot_be(text: str) -> None:
    if text == "1:":
        assert flags.shape_of(text, 1, 0) == Shape(1, 1, 1, 0)
        return
    with pytest.raises(ConfigurationError, match="--nnodes"):
        flags.shape_of(text, 1, 0)


@pytest.mark.parametrize(
    ("text", "endpoint", "parts"),
    [
        ("node-0", "node-0:29400", ("node-0", 29400)),
        ("10.0.0.1:80", "10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:80", "[::1]:80", ("::1", 80)),
        ("[::1]", "[::1]:29400", ("::1", 29400)),
    ],
)
def test_endpoints(text: str, endpoint: str, parts: tuple[str, int]) -> None:
    assert flags.endpoint_of("--rdzv-endpoint", text) == endpoint
    assert flags.split(endpoint) == parts


@pytest.mark.parametrize("text", ["", ":80", "host:", "host:0", "host:70000", "host:http"])
def test_endpoints_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--rdzv-endpoint"):
        flags.endpoint_of("--rdzv-endpoint", text)


def test_an_endpoint_is_owned_by_who_can_listen_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not flags.owns(f"127.0.0.1:{port}")
    assert flags.owns(f"127.0.0.1:{port}")
    assert not flags.owns("192.0.2.1:80")  # of TEST-NET-1 (RFC 5737), which no host has


# ---- real ones ------------------------------------------------------------------------------------------------------


def test_two_nodes_train_together(nodes: Nodes) -> None:
    nodes.run(0)
    nodes.run(1)
    (code_0, out_0), (code_1, out_1) = nodes.wait("out-0"), nodes.wait("out-1")
    assert (code_0, code_1) == (0, 0), out_0 + out_1
    digests = {line for line in (out_0 + out_1).splitlines() if line.startswith("digest")}
    assert len(digests) == 2
    assert len({line.split()[2] for line in digests}) == 1
    for line in (" steps, no rank lost", "keepstep: to look at this run: keepstep dashboard "):  # of the hosting node
        assert (out_0.count(line), out_1.count(line)) == (1, 0)


def test_a_script_that_fails_ends_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("import keepstep\nkeepstep.init()\nraise ValueError('bad')\n")
    nodes.run(0, script=script)
    nodes.run(1, script=script)
    (code_0, out_0), (code_1, out_1) = nodes.wait("out-0"), nodes.wait("out-1")
    assert (code_0, code_1) == (1, 1)
    assert "ValueError: bad" in out_0
    assert "ValueError: bad" in out_1


@pytest.mark.parametrize("is_told_both", [False, True], ids=["the host alone", "both nodes at once, as by scancel"])
def test_a_signal_to_the_hosting_node_drains_the_job(is_told_both: bool, nodes: Nodes) -> None:
    host, other = nodes.run(0, steps=100_000), nodes.run(1, steps=100_000)
    controller = await_controller(nodes.folder, host.pid)
    await_training(nodes.folder / "run-0")
    if is_told_both:
        other.send_signal(signal.SIGTERM)
    host.send_signal(signal.SIGTERM)
    codes, said = zip(*(nodes.wait(f"out-{number}") for number in range(2)), strict=True)
    assert codes == (1, 1), said
    assert all(re.search(r"ended by SIGTERM: drained at step \d+", out) for out in said), said
    assert not psutil.pid_exists(controller.pid)


def test_a_signal_to_all_nodes_drains_the_job_whoever_hears_it_first(nodes: Nodes) -> None:
    """Neither does the node of a warm spare leave with a rank that has moved there, nor does one move."""
    flags = ("--nnodes", "2:3", "--spares", 1)
    started = [nodes.run(rank, *flags, steps=100_000) for rank in range(3)]
    await_training(nodes.folder / "run-0")
    await_journal(nodes.folder / "run-0" / runfolder.JOURNAL, "WorkerReady", 3)
    for node in reversed(started):
        node.send_signal(signal.SIGTERM)
    codes, said = zip(*(nodes.wait(f"out-{number}") for number in range(3)), strict=True)
    assert codes == (1, 1, 1), said
    assert all(re.search(r"ended by SIGTERM: drained at step \d+", out) for out in said[:2]), said


def test_a_hosted_controller_that_dies_in_a_drain_goes_on_with_it(nodes: Nodes) -> None:
    host = nodes.run(0, steps=100_000)
    nodes.run(1, steps=100_000)
    controller = await_controller(nodes.folder, host.pid)
    await_training(nodes.folder / "run-0")
    controller.kill()
    host.send_signal(signal.SIGTERM)
    codes, said = zip(*(nodes.wait(f"out-{number}") for number in range(2)), strict=True)
    assert codes == (1, 1), said
    assert all("ended by SIGTERM" in out for out in said), said


def test_ignored_signals_stay_ignored_on_every_node_and_its_processes_still_end_with_it(nodes: Nodes) -> None:
    """SIGHUP and SIGTERM cannot tell them: they were ignored when the job was started."""
    nodes.prefix = ("/bin/sh", "-c", "trap '' TERM; exec \"$@\"", "sh", *IGNORING)
    flags = ("--weights", nodes.folder / "published", "--max-restarts", 0)
    host, other = nodes.run(0, *flags, steps=100_000), nodes.run(1, *flags, steps=100_000)
    await_controller(nodes.folder, host.pid)
    await_training(nodes.folder / "run-0")
    await_output(nodes, "out-0", "listening at")
    await_output(nodes, "out-1", "listening at")
    families = [psutil.Process(each.pid).children(recursive=True) for each in (host, other)]
    assert [len(family) for family in families] == [5, 4]  # server of weights, spawner, sweeper, rank; the controller
    processes = [host.pid, other.pid, *(each.pid for family in families for each in family)]
    assert [ignored_by(pid) for pid in processes] == [IGNORED] * len(processes)
    for number in (*IGNORED, signal.SIGTERM):
        for pid in processes:
            os.kill(pid, number)
    assert [each.poll() for each in (host, other)] == [None, None]
    host.kill()
    code, _out = nodes.wait("out-1")  # its controller has ended the job
    assert code == 1
    assert psutil.wait_procs(families[0] + families[1], DEADLINE_S)[1] == []


def test_agents_and_controller_apart(nodes: Nodes, tmp_path: Path) -> None:
    """Each agent has credentials of its own only; one that uses another node's is refused."""
    job = ["--nnodes", 2, "--nproc-per-node", 1, "--spares", 0]
    nodes.start(
        "controller", "controller", "--listen", nodes.endpoint, *job, "--run-dir", tmp_path / "run",
        **{SECRET_VARIABLE: SECRET.text()},
    )  # fmt: skip
    await_output(nodes, "controller", "controller listens")
    agent(nodes, "mistaken", "node-a", job, as_node="node-b")
    code, out = nodes.wait("mistaken")
    assert code == 2
    assert "the credentials are those of node 'node-a', and this is 'node-b'" in out
    for name in ("node-a", "node-b"):
        agent(nodes, name, name, job, as_node=name)
    ended = {name: nodes.wait(name) for name in ("node-a", "node-b", "controller")}
    assert [code for code, _ in ended.values()] == [0, 0, 0], "\n".join(out for _, out in ended.values())


def test_two_nodes_of_one_name_are_one_too_many(nodes: Nodes) -> None:
    """Both on one machine and without ``--node-rank``: so both are the first node. They start at the same moment."""
    for name in ("one", "other"):
        where = ["--nnodes", 2, "--nproc-per-node", 1, "--spares", 0, "--rdzv-endpoint", nodes.endpoint]
        nodes.start(
            name, "run", *where, "--run-dir", nodes.folder / f"run-{name}", SCRIPT, 8, 0.01,
            **{SECRET_VARIABLE: SECRET.text()},
        )  # fmt: skip
    refused = nodes.first_to_end()
    code, out = nodes.wait(refused)
    assert code == 2
    assert "is served by another process of this machine: give each its own --node-rank" in out
    left = "other" if refused == "one" else "one"
    nodes.run(1)
    assert (nodes.wait(left)[0], nodes.wait("out-1")[0]) == (0, 0), nodes.output(left)


def test_several_nodes_need_a_secret(nodes: Nodes) -> None:
    nodes.start("out", "run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-endpoint", nodes.endpoint, SCRIPT, 8, 0.01)
    code, out = nodes.wait("out")
    assert code == 2
    assert "several nodes need a secret that they share" in out
