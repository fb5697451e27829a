"""The study of the controller's cost runs, draws, and refuses what it cannot run."""

import sys
from pathlib import Path

import pytest
from benchmarks.studies import scale


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["scale", *flags])
    scale.main()


def test_each_world_has_a_row_and_the_curves_are_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(monkeypatch, "--devices", "16", "--plot", str(tmp_path / "scale.svg"))
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [str(size) for size in scale.SIZES if size < 16] + ["16"]
    assert "the decision alone" in (tmp_path / "scale.svg").read_text()


def test_a_world_without_peers_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--devices", "1")
    assert ended.value.code == 2
    assert "--devices 1: allowed are 2 and more" in capsys.readouterr().err
