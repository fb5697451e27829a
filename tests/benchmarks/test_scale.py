"""The benchmark of the controller's cost runs, and refuses what it cannot run."""

import sys

import pytest
from benchmarks import scale


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["scale", *flags])
    scale.main()


@pytest.mark.parametrize("relays", [(), ("--nodes-per-relay", "1")], ids=["without relays", "with two relays"])
def test_each_world_has_a_row(
    relays: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--devices", "16", *relays)
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [str(size) for size in scale.SIZES if size < 16] + ["16"]


def test_a_world_without_peers_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--devices", "1")
    assert ended.value.code == 2
    assert "--devices 1: allowed are 2 and more" in capsys.readouterr().err
