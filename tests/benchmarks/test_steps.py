"""The benchmarks of a job on one machine run, and say what they measured. Nothing is timed."""

from pathlib import Path

from tests.benchmarks.quick import measured


def test_steps_without_failures(tmp_path: Path) -> None:
    result, page = measured("overhead", tmp_path)
    assert [(size["step_ms"], size["ranks"]) for size in result["sizes"]] == [(1, 2)]
    assert len(result["sizes"][0]["more"]["median_ms"]) == 2
    assert result["profile"]["rows"]
    assert "The cost of a step without failures" in page


def test_recoveries(tmp_path: Path) -> None:
    result, page = measured("recovery", tmp_path)
    assert {series: len(result[series]["kills"]) for series in ("keepstep", "keepstep_hurried")} == {
        "keepstep": 2,
        "keepstep_hurried": 1,
    }
    assert "Where keepstep's time goes" in page


def test_layouts(tmp_path: Path) -> None:
    result, page = measured("layouts", tmp_path)
    assert [(each["layout"], each["spares"]) for each in result["in_every_phase"]] == [
        ("HSDP 2 × 2", 1),
        ("HSDP 2 × 2", 0),
    ]
    assert [each["num_faults"] for each in result["at_random"]] == [2]
    assert "A kill in every phase" in page


def test_snapshots(tmp_path: Path) -> None:
    result, page = measured("snapshots", tmp_path)
    (start,) = result["cost"]["sizes"][0]["starts"]
    assert set(start["mean_ms"]) == {"none", "each step", "each tenth step"}
    assert start["auto_every"] >= 1
    assert [len(series["kills"]) for series in result["kills"].values()] == [1, 1]
    assert all(kill["again"] >= 1 for series in result["kills"].values() for kill in series["kills"])
    assert "What snapshots cost" in page


def test_frameworks(tmp_path: Path) -> None:
    result, page = measured("frameworks", tmp_path)
    assert {name: len(starts) for name, starts in result["frameworks"].items()} == {"accelerate": 1, "lightning": 1}
    assert "in the loops of frameworks" in page


def test_loops(tmp_path: Path) -> None:
    result, page = measured("loops", tmp_path)
    (example,) = result["examples"]
    assert example["spare"]["num_faults"] == example["no_spare"]["num_faults"] > 1
    assert example["two_at_once"]["num_faults"] == 2
    assert "Loops of frameworks" in page


def test_compiled(tmp_path: Path) -> None:
    result, page = measured("compiled", tmp_path)
    assert {kind: len(gaps) for kind, gaps in result["gap_ms"].items()} == {"eager": 2, "warm": 2, "compiled": 2}
    assert "Recovery of a compiled model" in page
