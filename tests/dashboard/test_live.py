"""Pages that stay open while a run goes on, and what they do to the server: nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.dashboard.served import DEADLINE_S, Client, served
from tests.support.published import news

from keepstep.dashboard import live
from keepstep.dashboard.live import Live
from keepstep.protocol.controller import JournalEntry
from keepstep.protocol.messages import PhasesObserved, PublicationStage
from keepstep.trace.record import runfolder
from keepstep.trace.record.journal import read
from keepstep.trace.record.phaselog import PhaseTail
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.timeline.run import Run

NUM_PAGES = 200


class Growing:
    """A recorded run, written once more piece by piece."""

    def __init__(self, recorded: Path, folder: Path) -> None:
        self.folder = folder
        self.info = msgspec.structs.replace(runfolder.read_info(recorded), ended=None)
        self.entries: list[JournalEntry] = read(recorded / runfolder.JOURNAL)
        tail = PhaseTail(recorded / runfolder.PHASES)
        self.frames: list[PhasesObserved] = [message for _, message in tail.read()]
        tail.close()

    @contextlib.contextmanager
    def begun(self) -> Iterator[Recorder]:
        self.folder.mkdir(exist_ok=True)
        with runfolder.occupied(self.folder):
            runfolder.begin(self.folder, self.info)
            with Recorder(self.folder) as recorder:
                yield recorder


@pytest.fixture
def growing(recorded: Path, tmp_path: Path) -> Growing:
    return Growing(recorded, tmp_path / "run")


def until(events: Iterator[tuple[str, dict[str, Any]]], key: str) -> dict[str, Any]:
    """The next event in which something is told."""
    return next(data for _, data in events if data.get(key))


def test_what_happens_is_told_as_it_happens(growing: Growing) -> None:
    with growing.begun() as recorder, served(growing.folder) as client, client.stream() as events:
        name, first = next(events)
        assert (name, first["recoveries"], first["phases"]["t"]) == ("snapshot", [], [])
        assert first["run"]["is_alive"] is True
        recorder.decided(growing.entries[:1])
        assert until(events, "events")["events"][0]["kind"] == "node joined"
        recorder.observed(growing.frames[0])
        assert len(until(events, "phases")["phases"]["t"]) > 0
        recorder.decided(growing.entries[1:])
        recoveries = until(events, "recoveries")["recoveries"]
        assert [each["number"] for each in recoveries][-1] == len(recoveries)


def test_what_a_page_is_told_adds_up_to_what_one_gets_that_opens_late(growing: Growing, shown: Run) -> None:
    """Deltas and snapshot are two ways to the same state."""
    with growing.begun() as recorder, served(growing.folder) as client, client.stream() as events:
        _, state = next(events)
        items = [*growing.entries, *growing.frames]
        for number, item in enumerate(items):
            recorder.observed(item) if isinstance(item, PhasesObserved) else recorder.decided([item])
            if number % 7 == 0:
                merge(state, next(events)[1])
        num_phases = len(shown.history.newest(1 << 30))
        while len(state["phases"]["t"]) < num_phases or state["job"]["stage"] != "ended":
            merge(state, next(events)[1])
        with client.stream() as others:
            _, late = next(others)
    for key in ("job", "recoveries", "workers", "events"):
        assert state[key][-200:] if key == "events" else state[key] == late[key], key
    columns = [sorted(zip(*each["phases"].values(), strict=True)) for each in (state, late)]
    assert columns[0] == columns[1]


def merge(state: dict[str, Any], update: dict[str, Any]) -> None:
    """What the page does with an update."""
    for key, value in update.items():
        if key == "phases":
            for column, more in value.items():
                state["phases"][column] += more
        elif key == "events":
            state["events"] += value
        elif key == "recoveries":
            known = {each["number"]: each for each in state["recoveries"]} | {each["number"]: each for each in value}
            state["recoveries"] = [known[number] for number in sorted(known)]
        else:
            state[key] = value


def test_published_weights_are_told_of_as_they_come(growing: Growing) -> None:
    with growing.begun() as recorder, served(growing.folder) as client, client.stream() as events:
        for version in (1, 2):
            recorder.published("a", news(0, PublicationStage.COMMITTED, version, float(version)))
            recorder.show_weights()
            (told,) = until(events, "weights")["weights"]
            while told["version"] != version:
                (told,) = until(events, "weights")["weights"]
            assert told["committed"] == version


def test_a_dashboard_may_be_there_before_the_run(growing: Growing) -> None:
    growing.folder.mkdir()
    with served(growing.folder) as client:
        assert client.get("/api/overview").status_code == 404
        with client.stream() as events, growing.begun() as recorder:
            recorder.decided(growing.entries[:1])
            assert next(events)[1]["run"]["id"] == growing.info.run


def test_another_run_in_the_folder_takes_the_page_over(growing: Growing) -> None:
    with growing.begun() as recorder:
        recorder.decided(growing.entries)
    with served(growing.folder) as client, client.stream() as events:
        name, first = next(events)
        assert name == "snapshot"
        assert first["recoveries"]
        growing.info = msgspec.structs.replace(growing.info, run="another", started_ns=growing.info.started_ns + 1)
        with growing.begun():
            name, second = next(event for event in events if event[0] == "snapshot")
        assert second["run"]["id"] == "another"
        assert second["recoveries"] == []


def test_a_damaged_journal_is_said_once_and_the_page_stays(growing: Growing, capfd: pytest.CaptureFixture[str]) -> None:
    with growing.begun(), served(growing.folder) as client, client.stream() as events:
        next(events)
        with (growing.folder / runfolder.JOURNAL).open("ab") as file:
            file.write(b"nonsense\n")
        for _ in range(3):
            assert client.get("/metrics").status_code == 200
        assert client.get("/").status_code == 200
    assert capfd.readouterr().err.count("line 1: not an entry of a journal") == 1


def test_many_pages_are_all_told(growing: Growing) -> None:
    with growing.begun() as recorder, served(growing.folder) as client:
        assert client.get("/healthz").status_code == 200
        before = num_descriptors()
        with contextlib.ExitStack() as stack:
            pages = [stack.enter_context(open_page(client)) for _ in range(NUM_PAGES)]
            for page in pages:
                assert b"event: snapshot" in read_until(page, b"\n\n")
            recorder.decided(growing.entries[:1])
            for page in pages:
                assert b"node joined" in read_until(page, b"node joined")
            assert client.get("/healthz").status_code == 200
        assert num_descriptors() <= before
        assert client.get("/healthz").status_code == 200


def num_descriptors() -> int:
    return psutil.Process().num_fds()


@contextlib.contextmanager
def open_page(client: Client) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", client.port), timeout=DEADLINE_S) as line:
        line.sendall(f"GET /api/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\n\r\n".encode())
        yield line


def read_until(line: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        more = line.recv(1 << 16)
        assert more, "the page was cut off"
        data += more
    return data


def test_a_page_that_does_not_read_is_cut_off(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BACKLOG", 5)
    found = Live(recorded, lambda _run, _news: None)
    found.poll()
    slow, quick = found.open_page(), found.open_page()
    for number in range(8):
        quick.get_nowait()
        found._send(b"%d" % number)
    assert found.num_pages == 1
    told = [slow.get_nowait() for _ in range(slow.qsize())]
    assert told[-1] is None
    assert told[1:-1] == [b"0", b"1", b"2", b"3"]
    assert quick.get_nowait() == b"7"


def test_a_server_whose_page_does_not_read_serves_the_others(growing: Growing) -> None:
    """The slow page's socket takes a few megabytes and no more; what is meant for it is dropped, not kept."""
    with growing.begun() as recorder, served(growing.folder) as client, contextlib.ExitStack() as stack:
        slow = stack.enter_context(open_page(client))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with client.stream() as events:
            next(events)
            recorder.decided(growing.entries)
            for frame in growing.frames * 20:
                recorder.observed(frame)
            seen = 0
            while seen < 20 * sum(len(frame.phases) // 40 for frame in growing.frames):
                seen += len(until(events, "phases")["phases"]["t"])
        assert client.get("/healthz").status_code == 200


def test_the_same_bytes_go_to_all(recorded: Path) -> None:
    found = Live(recorded, lambda _run, _news: None)
    found.poll()
    pages = [found.open_page() for _ in range(10)]
    assert len({id(page.get_nowait()) for page in pages}) == 1
