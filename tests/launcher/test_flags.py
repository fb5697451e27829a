"""torchrun's flags and keepstep's own: what comes of them, and what is refused by name."""

import argparse
import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import ALLOCATOR_VARIABLES
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.flags import place_of, shape_of
from keepstep.launcher.flags import job_options, make_parser
from keepstep.launcher.job import JobOptions
from keepstep.protocol.deadlines import DEADLINES


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh run folder is made below the system's temporary one: the tests' own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))


def options(*flags: object) -> JobOptions:
    return job_options(make_parser("keepstep run").parse_args([str(flag) for flag in flags]))


def test_what_is_not_said(script: str, tmp_path: Path) -> None:
    found = options(script)
    agent, recovery = found.agent, found.recovery
    assert (agent.place.world_size, agent.place.slots, agent.fork, agent.module, agent.raw) == (
        1,
        2,
        True,
        False,
        False,
    )
    assert (recovery.world_size, recovery.num_spares) == (1, 1)
    assert agent.command == (script,)
    assert agent.run_dir.parent == tmp_path / "temporary"
    assert (found.outputs.report, found.keep_run_dir) == (None, False)
    output = agent.output
    assert not output.redirect_stdout | output.redirect_stderr | output.tee_stdout | output.tee_stderr
    assert output.shown is None


def test_what_is_said(script: str, tmp_path: Path) -> None:
    found = options(
        "--nproc-per-node", 3, "--spares", 2, "--run-dir", tmp_path / "run", "--report", tmp_path / "r.json",
        "--hang-after", "2.5:4", "--explain-after", 8,
        "--max-restarts", 9, "--role", "trainer",
        "--start-method", "spawn", "--rdzv-id", "name", script, "--lr", "0.1", "--nproc-per-node", "8",
    )  # fmt: skip
    agent = found.agent
    assert (agent.place.world_size, agent.place.slots, agent.fork) == (3, 5, False)
    assert agent.command == (script, "--lr", "0.1", "--nproc-per-node", "8"), "what follows the script is the script's"
    expected = dataclasses.replace(DEADLINES, hang_after_s=2.5, hang_factor=4.0)
    assert found.recovery.deadlines == expected
    assert agent.deadlines == dataclasses.replace(expected, explain_s=8.0)
    assert agent.run_dir == tmp_path / "run"
    assert agent.run_dir.stat().st_mode & 0o777 == 0o700
    assert (found.outputs.report, found.keep_run_dir) == (tmp_path / "r.json", True)
    assert found.recovery.max_restarts == 9
    assert agent.output.role == "trainer"
    assert agent.job_environment["TORCHELASTIC_RUN_ID"] == "name"


def test_modules_to_preload_are_named_one_by_one_or_together(script: str) -> None:
    assert options("--preload", "a.b,c", "--preload", "d", script).agent.preload == ("a.b", "c", "d")


def test_torchruns_spelling_with_underscores_works_too(script: str) -> None:
    assert options("--nproc_per_node=2", "--max_restarts=3", script).agent.place.world_size == 2


def test_options_of_the_script_that_abbreviate_several_flags_are_its_own(script: str) -> None:
    assert options(script, "--logs", "out", "--run", 3).agent.command == (script, "--logs", "out", "--run", "3")


def test_a_module_or_any_program_may_stand_for_the_script() -> None:
    assert (options("-m", "package.train", "x").agent.module, options("--no-python", "prog").agent.raw) == (True, True)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node 0: allowed are 1 and more"),
        (["--nproc-per-node", "-2"], "--nproc-per-node -2: allowed are 1 and more"),
        (["--nproc-per-node", "many"], "--nproc-per-node many: allowed are a positive number, auto, cpu or gpu"),
        (["--nproc-per-node", "1.5"], "--nproc-per-node 1.5: allowed are a positive number"),
        (["--spares", "-1"], "--spares -1: allowed are 0 and more"),
        (["--max-restarts", "-1"], "--max-restarts -1: allowed are 0 and more"),
        *(
            (["--hang-after", text], f"--hang-after {text}: must be SECONDS, or SECONDS:FACTOR, both positive")
            for text in ("0", "nan", "-3", "inf", "x", "", "5:0", "5:nan", "5:x", ":3", "1:2:3")
        ),
        (["--explain-after", "0"], "--explain-after 0.0: must be positive"),
        (["--nnodes", "2"], "--nnodes 2: a drill runs on one node"),
        (["--nnodes", "1:4"], "--nnodes 1:4: a drill runs on one node"),
        (["--engine", "ray"], "--engine ray: a drill runs on one node"),
        (["--node-rank", "1"], "--node-rank 1: there is one node, so 0"),
        (["--master-port", "70000"], "--master-port 70000: allowed are 1 to 65535"),
        (["--master-port", "-1"], "--master-port -1: allowed are 1 to 65535"),
        (["--master-port", "0"], "--master-port 0: allowed are 1 to 65535"),
        (["--local-ranks-filter", "0,x"], "--local-ranks-filter 0,x: must be numbers"),
        (["--local-ranks-filter", "0,,1"], "--local-ranks-filter 0,,1: must be numbers"),
        (["--local-ranks-filter", "7"], "--local-ranks-filter 7: local rank 7 is not there; allowed are 0 to 1"),
        (["--local-ranks-filter", "0,-1"], "--local-ranks-filter 0,-1: local rank -1 is not there; allowed are 0 to 1"),
        (["--local-ranks-filter", "-1"], "--local-ranks-filter -1: local rank -1 is not there"),
        (["--redirects", "9"], "--redirects 9: allowed are 0 (none), 1 (stdout), 2 (stderr), 3 (both), or one of"),
        (["--redirects", "x"], "--redirects x: allowed are 0 (none)"),
        (["--redirects", ""], "--redirects : allowed are 0 (none)"),
        (["--redirects", "2:3"], "--redirects 2:3: local rank 2 is not there; allowed are 0 to 1"),
        (["--tee", "0:3,1"], "--tee 0:3,1: allowed are 0 (none), 1 (stdout), 2 (stderr), 3 (both), or one of"),
        (["--tee", "0:4"], "--tee 0:4: allowed are 0 (none)"),
        (["--tee", "1", "--log-dir", "/dev/null"], "--log-dir /dev/null/none: Not a directory"),
        (["--report", "/"], "--report /: is a folder; name a file"),
        (
            ["--report", "/no/such/folder/r.json"],
            "--report /no/such/folder/r.json: the folder /no/such/folder d",
        ),
        (["--run-dir", "/dev/null/run"], "--run-dir /dev/null/run: Not a directory"),
        (["--run-dir", "/dev/null"], "--run-dir /dev/null: File exists"),
        (["--virtual-local-rank"], "--virtual-local-rank True: not supported yet"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_named_with_what_is_allowed(flags: list[str], text: str, script: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        options(*flags, script)
    assert str(caught.value).startswith(text)


def test_a_script_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        options("nowhere.py")
    assert str(caught.value) == f"the script 'nowhere.py' does not exist (looked in {tmp_path})"
    with pytest.raises(ConfigurationError, match=r"does not exist \(the folder has no __main__\.py\)"):
        options(tmp_path)
    (tmp_path / "__main__.py").touch()
    assert options(tmp_path).agent.command == (str(tmp_path),)


@pytest.mark.parametrize("flag", ["--unknown", "--spares=x", "--start-method=thread"])
def test_what_the_parser_itself_refuses(flag: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options(flag, script)
    assert caught.value.code == 2
    assert flag.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--local-ranks-filter", "x"],
        ["--tee", "9"],
        ["--master-port", "0"],
        ["--log-dir", "logs", "--redirects", "3", "--local-ranks-filter", "9"],
        ["--log-dir", "logs", "--redirects", "3", "--master-port", "0"],
    ],
    ids=" ".join,
)
def test_a_refused_job_leaves_no_folder(
    flags: list[str], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError):
        options(*flags, script)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "logs").exists()


def test_a_module_is_run_by_python() -> None:
    with pytest.raises(ConfigurationError, match="--park-spares: a spare cannot wait inside of another command"):
        options("--no-python", "--park-spares", "prog")
    with pytest.raises(ConfigurationError, match="--no-python and --module cannot go together"):
        options("--no-python", "-m", "package.train")


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--redirects", "0"], (set(), set(), set(), set())),
        (["--redirects", "1"], ({0, 1, 2}, set(), set(), set())),
        (["--redirects", "2"], (set(), {0, 1, 2}, set(), set())),
        (["-r", "3"], ({0, 1, 2}, {0, 1, 2}, set(), set())),
        (["--redirects", "0:3,1:1"], ({0, 1}, {0}, set(), set())),
        (["--tee", "3"], (set(), set(), {0, 1, 2}, {0, 1, 2})),
        (["--redirects", "0:1,1:0"], ({0}, set(), set(), set())),
        (["-t", "2:2"], (set(), set(), set(), {2})),
        (["-r", "1", "-t", "1:2"], ({0, 1, 2}, set(), set(), {1})),
    ],
    ids=str,
)
def test_streams_by_local_rank_spares_included(flags: list[str], expected: tuple[set[int], ...], script: str) -> None:
    output = options("--nproc-per-node", 2, "--spares", 1, *flags, script).agent.output
    assert (output.redirect_stdout, output.redirect_stderr, output.tee_stdout, output.tee_stderr) == expected


def test_logs_lie_in_the_run_folder_or_where_it_is_said(script: str, tmp_path: Path) -> None:
    found = options("--run-dir", tmp_path / "run", script)
    assert found.log_dir == tmp_path / "run" / "logs"
    said = options("--log-dir", tmp_path / "logs", "--rdzv-id", "7", script)
    assert said.log_dir == tmp_path / "logs" / "7"


def test_a_folder_for_logs_is_made_only_for_logs(script: str, tmp_path: Path) -> None:
    options("--log-dir", tmp_path / "a", script)
    options("--log-dir", tmp_path / "b", "--tee", "0:1", script)
    assert [(tmp_path / name / "none").is_dir() for name in "ab"] == [False, True]


def test_only_some_ranks_are_shown(script: str) -> None:
    found = options("--nproc-per-node", 3, "--local-ranks-filter", "0,2", script)
    assert found.agent.output.shown == {0, 2}


# ---- the environment ------------------------------------------------------------------------------------------------


def test_threads_are_limited_as_torchrun_does(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in options(script).agent.environment
    assert options("--nproc-per-node", 2, script).agent.environment["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert options("--nproc-per-node", 2, script).agent.environment["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_workers_keep_the_memory_they_free_unless_the_user_sets_the_allocator(
    name: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [each for each in os.environ if each.startswith("MALLOC_") or each == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(variable)
    assert options(script).agent.environment.items() >= ALLOCATOR_VARIABLES.items()
    monkeypatch.setenv(name, "1")
    found = options(script).agent.environment
    assert {each: found[each] for each in found if each.startswith(("MALLOC_", "GLIBC_"))} == {name: "1"}


def test_workers_inherit_the_launchers_environment(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "here")
    agent = options(script).agent
    found = agent.environment | agent.job_environment
    assert (found["OF_THE_USER"], found["MASTER_ADDR"]) == ("here", "127.0.0.1")


def test_a_port_that_is_promised_is_free(script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: Any = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--master-port {port}: Address already in use; choose another"):
            options("--master-port", port, script)
    assert options("--master-port", port, script).agent.job_environment["MASTER_PORT"] == str(port)


def test_a_port_whose_connections_have_just_ended_is_free(script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # who closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    assert options("--master-port", port, script).agent.job_environment["MASTER_PORT"] == str(port)


def test_a_job_on_one_node_does_without_what_several_take() -> None:
    """They are in an extra, and to import them would be most of what its start does."""
    program = """import importlib, sys, keepstep, keepstep.cli.run
from keepstep.cli.main import COMMANDS
from keepstep.launcher.flags import make_parser

for name in keepstep.__all__:
    getattr(keepstep, name)
for place, _text in COMMANDS.values():
    if not place.startswith("cluster."):
        importlib.import_module("keepstep.cli." + place.partition(":")[0])
make_parser("keepstep run").parse_args(["script.py"])
print(sorted({"grpc", "cryptography"} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize(("node", "domain", "flag"), [("n" * 257, "", "--node-name"), ("n", "d" * 257, "--domain")])
def test_a_name_that_the_controller_would_refuse_is_refused_here(node: str, domain: str, flag: str) -> None:
    def place(node: str, domain: str) -> str:
        given = argparse.Namespace(
            slots_per_node=None, node_rank="0", node_name=node, domain=domain, local_addr="127.0.0.1"
        )
        return place_of(given, shape_of("2", 1, 0), "127.0.0.1:1").node

    with pytest.raises(ConfigurationError, match=rf"{flag} [nd]+\.\.\.: has 257 characters; allowed are 256"):
        place(node, domain)
    assert place("n" * 256, "d" * 256) == "n" * 256
