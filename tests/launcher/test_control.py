"""The socket at which a running job says how it is."""

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ConfigurationError, PeerLost
from keepstep.launcher import control


def while_served(run_dir: Path, answer: Callable[[], Any], work: Callable[[], Any]) -> Any:
    """What ``work`` returns, in a thread of its own, while the folder is served."""

    async def whole() -> Any:
        async with control.serve(run_dir, answer):
            return await asyncio.to_thread(work)

    return asyncio.run(whole())


def test_who_ends_leaves_the_socket_of_the_one_that_took_its_place(tmp_path: Path) -> None:
    async def whole() -> Any:
        async with control.serve(tmp_path, lambda: "first"):
            second = control.serve(tmp_path, lambda: "second")
            await second.__aenter__()
        answer = await asyncio.to_thread(control.ask, tmp_path)
        await second.__aexit__(None, None, None)
        return answer

    assert asyncio.run(whole()) == "second"
    assert not (tmp_path / control.SOCKET).exists()


def test_a_job_answers_with_what_it_is_asked_for(tmp_path: Path) -> None:
    answers = iter([{"stage": "training", "steps": 3}, {"stage": "stopping", "steps": None, "text": "ü"}])
    assert while_served(tmp_path, lambda: next(answers), lambda: [control.ask(tmp_path), control.ask(tmp_path)]) == [
        {"stage": "training", "steps": 3},
        {"stage": "stopping", "steps": None, "text": "ü"},
    ]


def test_a_long_answer_arrives_whole(tmp_path: Path) -> None:
    text = "x" * (3 << 20)
    assert while_served(tmp_path, lambda: text, lambda: control.ask(tmp_path)) == text


@pytest.mark.parametrize("length", [90, 200, 900])
def test_a_path_may_be_longer_than_a_sockets_own(length: int, tmp_path: Path) -> None:
    folder = tmp_path
    while len(str(folder)) < length:
        folder /= "d" * 60
    folder.mkdir(parents=True, exist_ok=True)
    assert while_served(folder, lambda: 1, lambda: control.ask(folder)) == 1


def test_a_relative_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert while_served(Path(), lambda: 1, lambda: control.ask(Path("."))) == 1


def test_only_the_owner_may_speak_to_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:

        def mode() -> int:
            return stat.S_IMODE((tmp_path / control.SOCKET).stat().st_mode)

        assert while_served(tmp_path, lambda: 1, mode) == 0o600
        mask = os.umask(0o022)
        assert mask == 0o022, "the mask of the process was changed for good"
    finally:
        os.umask(before)


def test_the_socket_is_gone_when_the_job_is(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    while_served(tmp_path, lambda: 1, lambda: control.ask(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_socket_that_a_killed_job_left_is_no_obstacle(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / control.SOCKET))
    left.close()
    assert while_served(tmp_path, lambda: 1, lambda: control.ask(tmp_path)) == 1


def stale(folder: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / control.SOCKET))
    left.close()


def speaks_no_json(folder: Path) -> None:
    (folder / control.SOCKET).write_text("a file, no socket")


@pytest.mark.parametrize("prepare", [lambda folder: None, stale, speaks_no_json], ids=["empty", "stale", "a file"])
def test_a_folder_without_a_job_says_so(prepare: Callable[[Path], None], tmp_path: Path) -> None:
    prepare(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        control.ask(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no job is running there"


def test_a_folder_that_is_none_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r".*/missing: No such file or directory"):
        control.ask(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match=r".*/file: Not a directory"):
        control.ask(tmp_path / "file")


@pytest.mark.parametrize(("says", "error"), [(b"", ConfigurationError), (b"{", ConfigurationError)], ids=repr)
def test_a_job_that_ends_in_mid_answer_is_no_job(says: bytes, error: type[Exception], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / control.SOCKET))
        server.listen()

        async def whole() -> None:
            asking = asyncio.create_task(asyncio.to_thread(control.ask, tmp_path))
            connection, _address = await asyncio.to_thread(server.accept)
            with connection:
                connection.sendall(says)
            with pytest.raises(error, match="no job is running there"):
                await asking

        asyncio.run(whole())


def test_a_job_that_does_not_answer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_DEADLINE_S", 0.01)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / control.SOCKET))
        server.listen()
        with pytest.raises(PeerLost, match=r"did not answer within 0\.01 s"):
            control.ask(tmp_path)


def test_a_client_that_does_not_read_does_not_stop_the_others(tmp_path: Path) -> None:
    def work() -> Any:
        with control.connect(tmp_path):
            return control.ask(tmp_path)

    text = "x" * (1 << 20)
    assert while_served(tmp_path, lambda: text, work) == text
