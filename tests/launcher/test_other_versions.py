"""Files of a run that another version of keepstep has written: refused in one sentence, and left as they are."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support.nodes import SECRET, free_endpoint

from keepstep.cli.cluster import controller as command
from keepstep.cli.main import main
from keepstep.config import SECRET_VARIABLE
from keepstep.controller.lease import RunLease
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.service import ControllerOptions
from keepstep.protocol import messages as msg
from keepstep.protocol.controller import ControllerMachine, JournalEntry
from keepstep.trace.record import journal, runfolder
from keepstep.trace.record.journal import Journal
from keepstep.trace.timeline.run import opened
from keepstep.transports.framing import frame, framed

FLAGS = ["--nnodes", "1", "--nproc-per-node", "1", "--spares", "0", "--relays", "0"]
OLDER = "0.0.9"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.text())


def controller(folder: Path, how: str = "--continue") -> int:
    return main(["controller", "--listen", free_endpoint(), *FLAGS, "--run-dir", str(folder), how])


def begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[JournalEntry]:
    """The folder of a run that one node has joined, and whose controller is gone. Returns what is in its journal."""
    seen: list[ControllerOptions] = []

    def remember(options: ControllerOptions) -> dict[str, object]:
        seen.append(options)
        return {"exit_code": 0, "reason": "only asked"}

    with monkeypatch.context() as patch:
        patch.setattr(command, "run_controller", remember)
        assert controller(folder) == 0
    settings = seen[0].recovery
    machine = ControllerMachine(settings)
    joins = msg.NodeJoined("node-a", 1, "rack", 0, 0, (), 0)
    machine.receive(msg.Packet("node-a", 1, 0, 0, (joins,), misses=False), time.monotonic())
    entries = machine.take_entries()
    assert any(entry.orders for entry in entries)
    info = runfolder.new_run(("train.py",), "here", settings)
    runfolder.begin(folder, msgspec.structs.replace(info, version=OLDER))
    written(folder, entries)
    return entries


def written(folder: Path, entries: list[JournalEntry]) -> None:
    (folder / runfolder.JOURNAL).unlink(missing_ok=True)
    with Journal(folder / runfolder.JOURNAL) as file:
        file.write(entries)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "run.lock"}


def refusal(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command has ended."""
    assert code == 2
    *_before, last = capsys.readouterr().err.splitlines()
    assert last.startswith("keepstep ")
    return last


@pytest.mark.parametrize("how", ["--continue", "--standby", "--standby while the first one serves"])
def test_a_controller_whose_machine_gives_other_orders_does_not_take_over(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agents have acted on those of the first one. The version that wrote the journal can still go on."""
    entries = begun(tmp_path, monkeypatch)
    number = next(number for number, entry in enumerate(entries) if entry.orders)
    entries[number] = msgspec.structs.replace(entries[number], orders=())
    written(tmp_path, entries)
    before = files(tmp_path)
    with contextlib.ExitStack() as stack:
        if how.endswith("serves"):
            stack.enter_context(RunLease(tmp_path, 60.0)).take()
        said = refusal(controller(tmp_path, how.split()[0]), capsys)
    assert f"entry {number + 1} of the journal (ReportsReceived at " in said
    assert "the order was none, now ('node-a', StartWorker(" in said
    assert f"keepstep {OLDER} has written it, and this is keepstep {runfolder.own_version()}" in said
    assert files(tmp_path) == before


def test_a_controller_that_gives_the_same_orders_goes_on_as_the_version_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path, monkeypatch)
    info = runfolder.read_info(tmp_path)
    assert runfolder.goes_on(info, "here", None).version == runfolder.own_version() != info.version


def test_a_view_does_not_show_decisions_that_were_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = begun(tmp_path, monkeypatch)
    entries[0] = msgspec.structs.replace(entries[0], generation=7)
    written(tmp_path, entries)
    what = rf"entry 1 of the journal .* generation were .* and 7, now .* {OLDER}"
    with pytest.raises(ConfigurationError, match=what), opened(tmp_path):
        pass


def entry_with_a_field_that_is_gone(folder: Path) -> None:
    path = folder / runfolder.JOURNAL
    first, *rest = path.read_bytes().splitlines(keepends=True)
    old = json.loads(journal._opened(first.rstrip(b"\n")))
    old["event"]["former"] = 1
    path.write_bytes(b"".join([journal._sealed(json.dumps(old, separators=(",", ":")).encode()) + b"\n", *rest]))


def info_without_a_number(folder: Path) -> None:
    old = json.loads((folder / runfolder.INFO).read_bytes())
    del old["format"], old["clock_offset_ns"]
    (folder / runfolder.INFO).write_text(json.dumps(old))


def info_of_a_later_form(folder: Path) -> None:
    later = json.loads((folder / runfolder.INFO).read_bytes())
    (folder / runfolder.INFO).write_text(json.dumps(later | {"format": runfolder.FORMAT + 1, "more": []}))


def store_with_a_message_of_another_form(folder: Path) -> None:
    (folder / runfolder.STORE).write_bytes(framed(msgspec.msgpack.encode(["StoreRequested", 1, 0, 1, "job_set"])))


def store_with_another_operation(folder: Path) -> None:
    (folder / runfolder.STORE).write_bytes(frame(msg.StoreRequested(1, 0, 1, "set", ("a",), b"1")))


def store_with_another_message(folder: Path) -> None:
    (folder / runfolder.STORE).write_bytes(frame(msg.WorkerFenced(1)))


def start_up_with_a_message_of_another_form(folder: Path) -> None:
    (folder / runfolder.START_UP).write_bytes(framed(msgspec.msgpack.encode(["StoreRequested", 1])))


def start_up_with_another_message(folder: Path) -> None:
    (folder / runfolder.START_UP).write_bytes(frame(msg.WorkerFenced(1)))


def start_up_with_another_operation(folder: Path) -> None:
    (folder / runfolder.START_UP).write_bytes(frame(msg.StoreRequested(1, 0, 1, "set", ("a",), b"1")))


OTHERS: dict[Callable[[Path], None], tuple[str, str]] = {
    entry_with_a_field_that_is_gone: (runfolder.JOURNAL, "line 1: not an entry of a journal: .*unknown field `former`"),
    info_without_a_number: (
        runfolder.INFO,
        f"keepstep {OLDER} has recorded this run in format 0, and keepstep .* reads",
    ),
    info_of_a_later_form: (runfolder.INFO, f"has recorded this run in format {runfolder.FORMAT + 1}, and keepstep"),
    store_with_a_message_of_another_form: (runfolder.STORE, "not a message of this protocol"),
    store_with_another_operation: (runfolder.STORE, "it holds StoreRequested, which changes no key"),
    store_with_another_message: (runfolder.STORE, "it holds WorkerFenced, which changes no key"),
    start_up_with_a_message_of_another_form: (runfolder.START_UP, "not a message of this protocol"),
    start_up_with_another_message: (runfolder.START_UP, "it holds WorkerFenced, which keeps no value"),
    start_up_with_another_operation: (runfolder.START_UP, "it holds StoreRequested, which keeps no value"),
}


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: change.__name__)
def test_a_file_of_another_form_ends_a_controller_with_a_sentence(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path, monkeypatch)
    change(tmp_path)
    name, text = OTHERS[change]
    before = (tmp_path / name).read_bytes()
    said = refusal(controller(tmp_path), capsys)
    assert str(tmp_path / name) in said
    assert re.search(text, said), said
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_phase_log_of_another_form_ends_a_view_with_a_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path, monkeypatch)
    segment = tmp_path / runfolder.PHASES / "00000001.frames"
    segment.parent.mkdir()
    segment.write_bytes(framed(msgspec.msgpack.encode(["PhasesObserved", "node-a"])))
    more = ["export"] if command == "trace" else []
    capsys.readouterr()  # how the job has ended
    assert main([command, *more, str(tmp_path), "-o", str(tmp_path / "out")]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"keepstep {command}: {segment}: not a message of this protocol")
