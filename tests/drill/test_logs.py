"""What is shown of the logs of a run that did not reach its end."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.drill.logs import LAST_LINES, end_of_logs


@pytest.fixture
def write(tmp_path: Path) -> Callable[[int, str, str], Path]:
    """Writes a worker's log. Each is a second newer than the one before."""
    written: list[Path] = []

    def write(worker: int, stream: str, text: str) -> Path:
        path = tmp_path / f"worker_{worker}" / f"{stream}.log"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, newline="")
        written.append(path)
        os.utime(path, (len(written), len(written)))
        return path

    return write


def test_a_lost_worker_is_shown_and_no_survivor_that_wrote_later(
    tmp_path: Path, write: Callable[[int, str, str], Path]
) -> None:
    write(1, "stderr", "KeyError: 1\n")
    last = write(2, "stderr", "KeyError: 2\n")
    write(0, "stderr", "the job ends\n")
    write(2, "stdout", "a loss\n")
    write(10, "stderr", "")
    assert end_of_logs(tmp_path, [1, 2, 10], names_file=True) == [f"the last lines of {last}:", "  KeyError: 2"]
    assert end_of_logs(tmp_path, [], names_file=False) == ["the last lines of its stderr:", "  the job ends"]


def test_where_nobody_wrote_an_error_the_output_is_shown(
    tmp_path: Path, write: Callable[[int, str, str], Path]
) -> None:
    assert end_of_logs(tmp_path / "none", [0], names_file=True) == []
    write(0, "stderr", "")
    assert end_of_logs(tmp_path, [0], names_file=True) == []
    write(0, "stdout", "a loss\n")
    assert end_of_logs(tmp_path, [0], names_file=False) == ["the last lines of its stdout:", "  a loss"]


def test_long_logs_are_cut_and_of_a_progress_bar_the_last_state_is_left(
    tmp_path: Path, write: Callable[[int, str, str], Path]
) -> None:
    bar = "".join(f"\r{n} of 30000" for n in range(30000))
    write(0, "stderr", "".join(f"{n}\n" for n in range(100)) + f"{bar}\r\n\x1b[2Jthe end\n\n")
    _heading, *lines = end_of_logs(tmp_path, [0], names_file=False)
    assert lines == ["  29999 of 30000", "  \\x1b[2Jthe end"]
    write(0, "stderr", "".join(f"{n}\n" for n in range(100)))
    _heading, *lines = end_of_logs(tmp_path, [0], names_file=False)
    assert lines == [f"  {n}" for n in range(100 - LAST_LINES, 100)]
