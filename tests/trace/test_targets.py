"""Files are written whole or not at all, and what cannot be written is said before the work."""

from pathlib import Path

import pytest

from keepstep.errors import ConfigurationError
from keepstep.trace.targets import check_target, replacing, write_whole


def test_a_good_target(tmp_path: Path) -> None:
    assert check_target("--output", tmp_path / "new.svg") == tmp_path / "new.svg"


@pytest.mark.parametrize(("name", "reason"), [("no/such.svg", "does not exist"), (".", "is a folder")])
def test_what_cannot_be_written(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^--output .*{reason}"):
        check_target("--output", tmp_path / name)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigurationError, match="is not writable"):
        check_target("--trace", tmp_path / "new.json")


def test_an_error_on_the_way_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_whole(target, b"old")
    with pytest.raises(TypeError), replacing(target) as file:
        file.write(b"half" + "of it")  # type: ignore[operator]  # an error halfway
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
    write_whole(target, b"new")
    assert target.read_bytes() == b"new"
