"""``keepstep adopt`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.test_docs import USAGE, blocks, section

from keepstep.cli.main import main

SCRIPTS = Path(__file__).resolve().parents[1] / "adopt" / "scripts"


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = blocks(section(USAGE, "keepstep adopt"))
    script, output = (next(each for each in shown if each.language == name) for name in ("python", "text"))
    monkeypatch.chdir(tmp_path)
    assert script.file_name is not None
    Path(script.file_name).write_text(script.text)
    assert main(["adopt", script.file_name]) == 0
    assert capsys.readouterr().out.splitlines() == output.text.splitlines()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = SCRIPTS / "mingpt.py"
    assert main(["adopt", "--json", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["script"], printed["loops"]) == (str(path), [22])
    assert printed["findings"][0] == {
        "line": 4,
        "source": "from torch.utils.data import DataLoader, RandomSampler",
        "edit": "insert after",
        "instead": "import keepstep",
        "why": "The script does not import it.",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"x = 1\nx = = 2\n", "a.py, line 2: no Python: invalid syntax"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_what_cannot_be_read(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.py"
    if content is not None:
        path.write_bytes(content)
    assert main(["adopt", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("keepstep adopt: ")
    assert error.count("\n") == 1


def test_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text("raise SystemExit(3)\n")
    assert main(["adopt", str(path)]) == 0
    assert "no training loop was found" in capsys.readouterr().out
    assert path.read_text() == "raise SystemExit(3)\n"
