"""Workers' streams: inherited, in files, or both with a prefix."""

import asyncio
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.agent.crew import DEADLINE_S

from keepstep.agent.outputs import PIPE_BYTES, WorkerOutput
from keepstep.agent.settings import OutputSettings

ALL = frozenset(range(4))


class Console:
    """The two streams of the launcher, as text."""

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self._captured = captured
        self._texts = ["", ""]

    @property
    def lines(self) -> tuple[list[str], list[str]]:
        self._texts = [old + new for old, new in zip(self._texts, self._captured.readouterr(), strict=True)]
        return self._texts[0].splitlines(), self._texts[1].splitlines()


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(capsys)


async def through(
    settings: OutputSettings, text: str, *, local_rank: int = 0, worker: int = 7, label: Callable[[], str] = lambda: ">"
) -> list[str]:
    """Runs a process whose two streams are a worker's; returns what the request to the spawner would say of them."""
    output = WorkerOutput(settings, worker, local_rank, label)
    streams: dict[str, Any] = {}
    given = iter(output.descriptors)
    for name, mode in zip(("stdout", "stderr"), output.redirects, strict=True):
        streams[name] = next(given) if mode else subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", text, **streams)
    output.handed_over()
    assert output.descriptors == []
    await asyncio.wait_for(process.wait(), DEADLINE_S)
    output.close()
    return output.redirects


def run(work: Awaitable[Any]) -> Any:
    async def whole() -> Any:
        return await work

    return asyncio.run(whole())


BOTH = "import sys; print('out 1'); print('out 2'); print('err 1', file=sys.stderr)"


def test_without_settings_nothing_is_opened(tmp_path: Path, console: Console) -> None:
    assert run(through(OutputSettings(), BOTH)) == ["", ""]
    assert console.lines == ([], [])


def test_redirected_streams_go_to_files_of_the_worker(tmp_path: Path, console: Console) -> None:
    settings = OutputSettings(log_dir=tmp_path, redirect_stdout=ALL, redirect_stderr=ALL)
    assert run(through(settings, BOTH)) == ["file", "file"]
    assert (tmp_path / "worker_7" / "stdout.log").read_text() == "out 1\nout 2\n"
    assert (tmp_path / "worker_7" / "stderr.log").read_text() == "err 1\n"
    assert console.lines == ([], [])


def test_one_stream_can_be_redirected_alone(tmp_path: Path, console: Console) -> None:
    settings = OutputSettings(log_dir=tmp_path, redirect_stderr=ALL)
    assert run(through(settings, BOTH)) == ["", "file"]
    assert [path.name for path in (tmp_path / "worker_7").iterdir()] == ["stderr.log"]


def test_teed_streams_go_to_both_with_a_prefix(tmp_path: Path, console: Console) -> None:
    settings = OutputSettings(log_dir=tmp_path, tee_stdout=ALL, tee_stderr=ALL)
    assert run(through(settings, BOTH, label=lambda: "[trainer1]:")) == ["tee", "tee"]
    assert (tmp_path / "worker_7" / "stdout.log").read_text() == "out 1\nout 2\n"
    assert (tmp_path / "worker_7" / "stderr.log").read_text() == "err 1\n"
    assert console.lines == (["[trainer1]:out 1", "[trainer1]:out 2"], ["[trainer1]:err 1"])


def test_settings_are_by_local_rank(tmp_path: Path, console: Console) -> None:
    settings = OutputSettings(log_dir=tmp_path, tee_stdout=frozenset({1}), redirect_stdout=frozenset({2}))
    assert [run(through(settings, BOTH, local_rank=rank, worker=rank))[0] for rank in range(3)] == ["", "tee", "file"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker_1", "worker_2"]


def test_a_rank_that_is_not_shown_is_still_in_its_file(tmp_path: Path, console: Console) -> None:
    """If it has one: a stream that was not asked for is dropped."""
    settings = OutputSettings(log_dir=tmp_path, tee_stdout=ALL, shown=frozenset({1}))
    assert run(through(settings, BOTH, local_rank=0, worker=0)) == ["file", "nowhere"]
    assert run(through(settings, BOTH, local_rank=1, worker=1)) == ["tee", ""]
    assert console.lines[0] == [">out 1", ">out 2"]
    assert [path.name for path in (tmp_path / "worker_0").iterdir()] == ["stdout.log"]
    assert (tmp_path / "worker_0" / "stdout.log").read_text() == "out 1\nout 2\n"


def test_a_console_that_nobody_reads_and_a_full_disk_are_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``keepstep run --tee 3 ... | head``. What can be written is."""
    (tmp_path / "worker_7").mkdir()
    (tmp_path / "worker_7" / "stderr.log").symlink_to("/dev/full")
    read, write = os.pipe()
    os.close(read)
    errors = io.StringIO()
    with open(write, "w") as nobody_reads:
        monkeypatch.setattr(sys, "stdout", nobody_reads)
        monkeypatch.setattr(sys, "stderr", errors)
        run(through(OutputSettings(log_dir=tmp_path, tee_stdout=ALL, tee_stderr=ALL), BOTH))
        with contextlib.suppress(BrokenPipeError):
            nobody_reads.close()
    assert (tmp_path / "worker_7" / "stdout.log").read_text() == "out 1\nout 2\n"
    log = tmp_path / "worker_7" / "stderr.log"
    lost = f"keepstep: {log} cannot be written, training continues: [Errno 28] No space left on device"
    assert errors.getvalue().splitlines() == [lost, ">err 1"]


def test_a_file_that_cannot_be_opened_keeps_no_worker_from_starting(tmp_path: Path, console: Console) -> None:
    (tmp_path / "worker_7").touch()  # as if the disk were full: its folder cannot be created
    settings = OutputSettings(log_dir=tmp_path, tee_stdout=ALL, redirect_stderr=ALL)
    assert run(through(settings, BOTH)) == ["tee", "file"]
    out, err = console.lines
    assert out == [">out 1", ">out 2"]
    assert [line.partition(" cannot be written, training continues: ")[0] for line in err] == [
        f"keepstep: {tmp_path / 'worker_7' / name}.log" for name in ("stdout", "stderr")
    ]


def test_without_a_folder_nothing_is_kept(console: Console) -> None:
    assert run(through(OutputSettings(tee_stdout=ALL, redirect_stderr=ALL), BOTH)) == ["tee", "file"]
    assert console.lines == ([">out 1", ">out 2"], [])


def test_every_attempt_has_its_own_folder(tmp_path: Path, console: Console) -> None:
    settings = OutputSettings(log_dir=tmp_path, redirect_stdout=ALL)
    for worker in (0, 5):
        run(through(settings, f"print({worker})", worker=worker))
    assert [(tmp_path / f"worker_{worker}" / "stdout.log").read_text() for worker in (0, 5)] == ["0\n", "5\n"]


def test_a_label_is_asked_again_for_each_line(tmp_path: Path, console: Console) -> None:
    labels = iter(["[spare]:", "[0]:"])
    run(through(OutputSettings(tee_stdout=ALL), "print('a'); print('b')", label=lambda: next(labels)))
    assert console.lines[0] == ["[spare]:a", "[0]:b"]


def test_bytes_that_are_no_text_are_shown_as_they_can_be(tmp_path: Path, console: Console) -> None:
    settings = OutputSettings(log_dir=tmp_path, tee_stdout=ALL)
    run(through(settings, r"import os; os.write(1, b'a\xff\n')"))
    assert (tmp_path / "worker_7" / "stdout.log").read_bytes() == b"a\xff\n"
    assert console.lines[0] == [">a\ufffd"]


def test_much_output_loses_nothing(tmp_path: Path, console: Console) -> None:
    """More than a pipe holds, so that the worker has to wait for the copy."""
    settings = OutputSettings(log_dir=tmp_path, tee_stdout=ALL)
    run(through(settings, "for i in range(40000): print(i)"))
    expected = [str(number) for number in range(40000)]
    assert (tmp_path / "worker_7" / "stdout.log").read_text().splitlines() == expected
    assert console.lines[0] == [f">{number}" for number in expected]


class Teed:
    """A teed stdout whose worker is the test itself."""

    def __init__(self, folder: Path) -> None:
        self.output = WorkerOutput(OutputSettings(log_dir=folder, tee_stdout=ALL), 0, 0, lambda: ">")
        self.end = os.dup(self.output.descriptors[0])
        self.output.handed_over()
        self._log = folder / "worker_0" / "stdout.log"

    async def write(self, data: bytes) -> None:
        """Writes, and returns when the loop has copied it."""
        before = self._log.read_bytes()
        os.write(self.end, data)
        async with asyncio.timeout(DEADLINE_S):
            while self._log.read_bytes() != before + data:
                await turn()


async def turn() -> None:
    """One turn of the loop; it is the loop that copies, so there is no event to wait for."""
    await asyncio.sleep(0)


async def in_pieces(folder: Path, pieces: list[bytes], last: bytes, end_seen: bool) -> bytes:
    teed = Teed(folder)
    for piece in pieces:
        await teed.write(piece)
    if last:
        os.write(teed.end, last)
    os.close(teed.end)
    for _ in range(3 if end_seen else 0):
        await asyncio.sleep(0.001)  # turns of the loop, in which it may see the end of the stream
    teed.output.close()
    return (folder / "worker_0" / "stdout.log").read_bytes()


def test_a_line_that_comes_in_pieces_is_shown_once(tmp_path: Path, console: Console) -> None:
    run(in_pieces(tmp_path, [b"one", b" line\nand", b" another\n"], b"", end_seen=True))
    assert console.lines[0] == [">one line", ">and another"]


def test_a_last_line_without_an_end_is_shown(tmp_path: Path, console: Console) -> None:
    assert run(in_pieces(tmp_path, [b"first\n", b"no end"], b"", end_seen=True)) == b"first\nno end"
    assert console.lines[0] == [">first", ">no end"]


def test_a_line_that_never_ends_is_shown_in_parts(tmp_path: Path, console: Console) -> None:
    """A progress bar; it is neither held back nor gathered for ever."""
    piece = b"x" * (PIPE_BYTES // 2)
    run(in_pieces(tmp_path, [piece, piece, b"rest"], b"", end_seen=False))
    assert console.lines[0] == [">" + "x" * PIPE_BYTES, ">rest"]


@pytest.mark.parametrize(
    ("pieces", "last", "shown"),
    [
        ([b"Trace"], b"back\n", [">Traceback"]),
        ([b"no end"], b"", [">no end"]),
        ([], b"killed in mid-l", [">killed in mid-l"]),
    ],
    ids=["line in two parts", "rest already read", "rest read at the end"],
)
def test_the_last_messages_of_a_dead_worker_are_shown_whole(
    pieces: list[bytes], last: bytes, shown: list[str], tmp_path: Path, console: Console
) -> None:
    """Its exit may be known before the loop has read its pipe to the end."""
    run(in_pieces(tmp_path, pieces, last, end_seen=False))
    assert (tmp_path / "worker_0" / "stdout.log").read_bytes() == b"".join(pieces) + last
    assert console.lines[0] == shown


@pytest.mark.parametrize("how", ["full", "read", "left", "redirected", "tee"])
def test_output_that_nobody_reads_is_noticed(how: str, tmp_path: Path) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from keepstep.agent.outputs import WorkerOutput\n"
        "from keepstep.agent.settings import OutputSettings\n"
        "how, folder, answer = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])\n"
        "every = frozenset({0})\n"
        "os.set_blocking(1, False)\n"
        "try:\n"
        "    while how != 'read': os.write(1, b'x' * 4096)\n"
        "except OSError: pass\n"
        "async def main():\n"
        "    settings = {'redirected': OutputSettings(log_dir=folder, redirect_stdout=every),\n"
        "                'tee': OutputSettings(log_dir=folder, tee_stdout=every)}.get(how, OutputSettings())\n"
        "    return WorkerOutput(settings, 7, 0, lambda: '').is_unread()\n"
        "os.write(answer, str(asyncio.run(main())).encode())\n"
    )
    read, write = os.pipe()
    answer, answers = os.pipe()
    if how == "left":
        os.close(read)
    command = [sys.executable, "-c", script, how, str(tmp_path), str(answers)]
    subprocess.run(command, stdout=write, pass_fds=[answers], check=True, timeout=DEADLINE_S)
    os.close(answers)
    assert os.read(answer, 100).decode() == str(how == "full")
    for descriptor in (answer, write, *([] if how == "left" else [read])):
        os.close(descriptor)


def test_all_descriptors_are_given_back(tmp_path: Path, console: Console) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def several() -> tuple[int, int]:
        before = count()
        for worker in range(3):
            settings = OutputSettings(log_dir=tmp_path, tee_stdout=ALL, redirect_stderr=ALL)
            output = WorkerOutput(settings, worker, 0, lambda: "")
            output.handed_over()
            output.close()
        return before, count()

    before, after = run(several())
    assert after == before
