"""The working directories of two runs whose files are compared."""

from pathlib import Path

import pytest

from keepstep.drill.workdir import check_patterns, make_working_dir
from keepstep.errors import ConfigurationError


def make(tmp_path: Path, *patterns: str) -> Path:
    """A working directory beside a folder with data, a module, and what an earlier job has written."""
    for file in ("data/train.bin", "model.py", "out/best.pt", "out/log.txt", "runs/inputs/a.txt", "runs/one/best.pt"):
        path = tmp_path / "here" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file)
    make_working_dir(tmp_path / "work", patterns, tmp_path / "here")
    return tmp_path / "work"


def test_what_is_not_compared_is_linked(tmp_path: Path) -> None:
    work = make(tmp_path, "out/*.pt")
    assert (work / "data" / "train.bin").read_text() == "data/train.bin"
    assert (work / "model.py").is_symlink()
    assert (work / "runs").is_symlink()


def test_a_folder_whose_files_are_compared_begins_empty(tmp_path: Path) -> None:
    work = make(tmp_path, "out/*.pt")
    assert (work / "out").is_dir()
    assert not (work / "out").is_symlink()
    assert list((work / "out").iterdir()) == []
    (work / "out" / "best.pt").write_text("of this run")
    assert (tmp_path / "here" / "out" / "best.pt").read_text() == "out/best.pt"


@pytest.mark.parametrize("pattern", ["out", "out/**/*.pt", "o*/best.pt"])
def test_ways_to_name_a_folder(tmp_path: Path, pattern: str) -> None:
    assert list((make(tmp_path, pattern) / "out").iterdir()) == []


def test_beside_a_compared_folder_further_down_everything_is_linked(tmp_path: Path) -> None:
    work = make(tmp_path, "runs/one/*.pt", "runs/two/*.pt")
    assert (work / "runs" / "inputs" / "a.txt").exists()
    assert list((work / "runs" / "one").iterdir()) == []


def test_a_compared_file_is_left_out(tmp_path: Path) -> None:
    work = make(tmp_path, "*.py")
    assert not (work / "model.py").exists()
    assert (work / "out" / "best.pt").exists()


@pytest.mark.parametrize("pattern", ["", "/tmp/*.pt", "../out/*.pt", "out/../../x", "."])
def test_a_pattern_that_leads_out_of_the_working_directory_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match="must name files below the working directory"):
        check_patterns(["out/*.pt", pattern])


def test_a_pattern_that_takes_in_everything_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="begin it with the folder"):
        check_patterns(["**/*.pt"])
    assert check_patterns(["out/**/*.pt"]) == ("out/**/*.pt",)
