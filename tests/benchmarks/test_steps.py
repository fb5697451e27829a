"""The benchmarks of a job on one machine run, and say what they measured. Nothing is timed."""

import re
from pathlib import Path

from tests.benchmarks.quick import measured, table


def test_steps_without_failures(tmp_path: Path) -> None:
    page = measured("overhead", tmp_path)
    _, row = table(page, "What a step takes")
    assert row[0] == "1 ms, 2 ranks"
    assert "both jobs started 2 times for each line" in page
    assert len(table(page, "Where it goes")) > 2


def test_recoveries(tmp_path: Path) -> None:
    page = measured("recovery", tmp_path)
    _, *rows = table(page, "From a kill to the next completed step")
    assert {name: kills for name, kills, *_ in rows} == {"keepstep, spare warm": "2", "keepstep, kills in a row": "1"}
    for title, kills in (("Where keepstep's time goes", 2), ("... in the kills in a row", 1)):
        assert len(table(page, title)) == 11
        assert re.search(rf"^\* \d of {kills} kills met a warm spare", page, re.MULTILINE)


def test_layouts(tmp_path: Path) -> None:
    page = measured("layouts", tmp_path)
    _, row = table(page, "A kill in every phase, and a hang")
    assert row[:2] == ["HSDP 2 × 2", "replica"]
    assert [again.startswith("≤ ") for again in row[2::2]] == [True, True]
    _, row = table(page, "Kills at random instants, with a spare")
    assert row[:2] == ["HSDP 2 × 2", "2"]


def test_snapshots(tmp_path: Path) -> None:
    page = measured("snapshots", tmp_path)
    heads, row = table(page, "What snapshots cost")
    assert heads[2:4] == ["one in each step", "in each tenth"]
    assert int(row[-1]) >= 1
    _, *rows = table(page, "A rank of four is lost")
    assert [kills for _, kills, *_ in rows] == ["1", "1"]
    assert all(int(again.partition(" ")[0]) >= 1 for *_, again in rows)


def test_frameworks(tmp_path: Path) -> None:
    page = measured("frameworks", tmp_path)
    _, *rows = table(page, "What a step takes")
    assert [row[0] for row in rows] == ["accelerate", "lightning", "all together"]
    assert "each job started 1 times for each framework" in page


def test_loops(tmp_path: Path) -> None:
    page = measured("loops", tmp_path)
    _, row = table(page, "A kill in every phase, and a hang; two at once")
    assert row[0] == "`fabric.py`"
    assert [again.startswith("≤ ") for again in row[2::2]] == [True, True, True]
    faults = re.search(r"^\* (\d+) faults in each of the first two runs", page, re.MULTILINE)
    assert faults
    assert int(faults[1]) > 1


def test_compiled(tmp_path: Path) -> None:
    _, *rows = table(measured("compiled", tmp_path), "Two kills in each drill")
    assert {kind: kills for kind, kills, *_ in rows} == {"eager": "2", "warm": "2", "compiled": "2"}
