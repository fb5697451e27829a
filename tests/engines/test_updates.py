"""Changes of servers' weights: their order, failures on either side, and what a dead driver leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.engines.stand_ins import VLLM, SGLang, wait_until
from tests.worker.ranks import DEADLINE_S

from keepstep.engines.server import NewVersion, Running, Server
from keepstep.engines.sglang import SGLangServer
from keepstep.engines.updates import ServerUpdates
from keepstep.engines.vllm import VLLMServer
from keepstep.errors import ConfigurationError, LoadError, SubscriberLost


def version(number: int) -> NewVersion:
    return NewVersion(number, "w", (("weight", "float32", (2, 2)),))


@pytest.fixture
def server() -> Iterator[VLLM]:
    made = VLLM()
    made.has = {1, 2, 3}
    yield made
    made.close()


@pytest.mark.parametrize(("running", "mode"), [(Running.DRAIN, "wait"), (Running.IN_FLIGHT, "keep")])
def test_nothing_computed_before_a_change_is_used_after_it(server: VLLM, running: Running, mode: str) -> None:
    """Whatever becomes of running requests. And no request begins between the load and the reset of the caches."""
    with ServerUpdates([VLLMServer(server.url, running=running)]) as updates:
        for number in (1, 2):
            server.answer()
            server.calls.clear()
            updates.bring(version(number))
            assert server.answer() == (number, number)
        changing = server.calls[server.calls.index(f"pause?mode={mode}") + 1 :]
        assert changing[:2] == ["update_weights", "finish_weight_update"], "the workers agree while no request runs"
        resets = {each.partition("?")[0] for each in changing[2:5]}
        assert resets == {"reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache"}
        assert changing[5] == "resume"
        assert updates.versions[server.url][0] == 2
        assert server.label == "2"


def test_workers_attach_once(server: VLLM) -> None:
    """A publisher without copies has nothing for one that attaches after a version."""
    with ServerUpdates([VLLMServer(server.url)]) as updates:
        updates.prepare(version(0))
        for number in (1, 2):
            updates.bring(version(number))
    assert server.calls.count("init_weight_transfer_engine") == 1


def test_a_cache_that_cannot_be_reset_yet_holds_requests_back(server: VLLM) -> None:
    with ServerUpdates([VLLMServer(server.url)]) as updates:
        updates.bring(version(1))
        server.answer()
        server.unflushed = 3
        updates.bring(version(2))
        assert server.answer() == (2, 2)


def test_the_engines_own_text_is_in_the_error(server: VLLM) -> None:
    server.refuses["/init_weight_transfer_engine"] = "the model cannot load 'head.weight'"
    with ServerUpdates([VLLMServer(server.url)]) as updates:
        with pytest.raises(LoadError, match=r"/init_weight_transfer_engine with 500: .*cannot load 'head\.weight'"):
            updates.prepare(version(0))
        with pytest.raises(LoadError, match=r"cannot load 'head\.weight'"):
            updates.bring(version(1))
    assert not server.is_paused
    assert server.session is None


PHASES = [
    ("start_weight_update", "after", 1),
    ("update_weights", "after", 1),
    ("pause", "before", 1),
    ("pause", "after", 1),
    ("finish_weight_update", "before", 1),
    ("finish_weight_update", "after", 2),
    ("discard_caches", "before", 2),
    ("discard_caches", "after", 2),
    ("resume", "before", 2),
]


@pytest.mark.parametrize(("method", "when", "expected"), PHASES)
def test_a_driver_that_is_killed_leaves_a_server_that_answers(
    server: VLLM, method: str, when: str, expected: int
) -> None:
    """With one whole version, which it names, and no session that would refuse the next driver."""
    server.answer()
    command = [sys.executable, Path(__file__).with_name("dying.py"), "vllm", server.url, method, when]
    driver = subprocess.run(command, check=False, timeout=DEADLINE_S)
    assert driver.returncode == -signal.SIGKILL
    wait_until(lambda: "resume" in server.calls[-3:] and server.session is None, f"the watcher: {server.calls}")
    assert server.answer() == (expected, expected)
    assert server.label == str(expected)
    with ServerUpdates([VLLMServer(server.url)]) as updates:
        updates.bring(version(3))
    assert server.answer() == (3, 3)


@pytest.mark.parametrize(
    ("method", "when", "expected"), [("pause", "after", 1), ("_load", "before", 1), ("_load", "after", 2)]
)
def test_a_driver_of_sglang_that_is_killed_leaves_a_server_that_answers(
    tmp_path: Path, method: str, when: str, expected: int
) -> None:
    """From a cache of no other weights than it has: the load may have ended without a flush. Its files are deleted."""
    versions = tmp_path / "versions"
    versions.mkdir()
    for folder in (tmp_path, versions):
        save_file({"a.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    server = SGLang(str(tmp_path))
    command = [sys.executable, Path(__file__).with_name("dying.py"), "sglang", server.url, method, when, versions]
    driver = subprocess.run(command, check=False, timeout=DEADLINE_S)
    assert driver.returncode == -signal.SIGKILL
    server.cached = 0
    wait_until(lambda: server.calls[-1] == "continue_generation" and server.cached is None, f"{server.calls}")
    assert server.answer() == (expected, expected)
    wait_until(lambda: not list(tmp_path.glob("keepstep-versions-*")), "the watcher deletes them last")
    server.close()


def test_a_version_that_only_some_workers_have_is_loaded_by_none(server: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is ended; on the workers that have selected the version as well."""
    monkeypatch.setattr("keepstep.engines.vllm.AGREE_S", 0.2)
    with ServerUpdates([VLLMServer(server.url)]) as updates:
        updates.bring(version(1))
        server.is_half_ready = True
        with pytest.raises(LoadError, match="another version is there"):
            updates.bring(version(2))
        assert (server.weights, server.label, server.session, server.is_paused) == (1, "1", None, False)
        server.is_half_ready = False
        updates.bring(version(3))
        assert server.answer() == (3, 3)


def test_a_new_driver_ends_what_an_earlier_one_has_left_open(server: VLLM) -> None:
    """One that died together with its watcher, as when a node loses its power."""
    server.is_paused, server.session = True, 0
    with ServerUpdates([VLLMServer(server.url)]) as updates:
        updates.prepare(version(0))
        assert (server.is_paused, server.session) == (False, None)
        updates.bring(version(1))
    assert server.answer() == (1, 1)


def test_a_server_that_holds_parts_of_a_version_stays_out_of_service_until_a_whole_one_comes(server: VLLM) -> None:
    with ServerUpdates([VLLMServer(server.url)]) as updates:
        updates.bring(version(1))
        server.refuses_once["/finish_weight_update"] = "out of memory"
        server.is_torn = True
        with pytest.raises(LoadError, match=r"out of memory.*; then: .*holds parts of a version"):
            updates.bring(version(2))
        assert server.is_paused
        updates.bring(version(3))
        assert server.answer() == (3, 3)


def test_a_server_that_is_gone_fails_alone_and_comes_back_with_the_newest_version(server: VLLM) -> None:
    other = VLLM()
    other.has = {1, 2, 3}
    with ServerUpdates([VLLMServer(server.url), VLLMServer(other.url)]) as updates:
        updates.bring(version(1))
        other.close()
        updates.bring(version(2))
        assert server.answer() == (2, 2)
        wait_until(lambda: set(updates.failures) == {other.url}, "the gone one is named")
        assert isinstance(updates.failures[other.url], SubscriberLost)
        assert set(updates.versions) == {server.url}
        again = VLLM(other.server_port)
        again.has = {2}
        wait_until(lambda: not updates.failures, "it has come back")
        assert again.answer() == (2, 2)
    again.close()


def test_a_server_that_is_restarted_between_versions_gets_the_newest_one(server: VLLM) -> None:
    with ServerUpdates([VLLMServer(server.url)]) as updates:
        updates.bring(version(2))
        server.label, server.is_initialized, server.weights = "default", False, 0
        wait_until(lambda: server.weights == 2, "it has the version again")


def test_a_slow_server_holds_up_no_other_one(server: VLLM) -> None:
    slow = VLLM()
    slow.has = {1, 2}
    with ServerUpdates([VLLMServer(server.url), VLLMServer(slow.url)]) as updates:
        slow.waits["/pause"] = threading.Event()
        updates.offer(version(1))
        wait_until(lambda: server.weights == 1, "the other one has it")
        updates.offer(version(2))
        wait_until(lambda: server.weights == 2, "the other one has the next")
        assert {each.number for each in updates.in_use()} == {1, 2}
        slow.waits.pop("/pause").set()
        wait_until(lambda: slow.weights == 2, "it goes to the newest one")
    slow.close()


def test_only_one_process_drives_a_server(server: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.engines.watcher.LOCK_S", 0.1)
    first = ServerUpdates([VLLMServer(server.url)])
    with pytest.raises(ConfigurationError, match=r"another process on this machine drives vllm at http"):
        ServerUpdates([VLLMServer(server.url)])
    first.close()
    ServerUpdates([VLLMServer(server.url)]).close()


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1/"]])
def test_servers_that_cannot_be(urls: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="name one or more, each once"):
        ServerUpdates([VLLMServer(url) for url in urls])


@pytest.mark.parametrize("server", [VLLMServer, SGLangServer])
def test_what_becomes_of_running_requests_may_be_a_string(server: type[Server]) -> None:
    """As in a configuration file; any other string is an error, and nothing is drained instead."""
    assert server("http://a:1", running="in-flight").running is Running.IN_FLIGHT
    with pytest.raises(ConfigurationError, match="running='in_flight': choose one of drain, in-flight"):
        server("http://a:1", running="in_flight")


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is no URL of a server"):
        VLLMServer(url)
