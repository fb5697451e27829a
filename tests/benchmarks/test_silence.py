"""The benchmark of silent ranks runs, and says what it measured. Nothing is timed."""

from pathlib import Path

from tests.benchmarks.quick import measured, table


def test_pauses_and_hangs(tmp_path: Path) -> None:
    page = measured("silence", tmp_path)
    _, *rows = table(page, "Pauses that must cost nothing")
    assert [row[2:] for row in rows] == [["0", "0"]] * 4
    _, row = table(page, "Pauses of one rank beyond its deadline")
    assert row[2:] == ["1", "0"]
    _, *rows = table(page, "Hangs")
    assert rows[0][:2] == ["2 ranks on one node", "1 s"]
    _, *rows = table(page, "Kills at random instants")
    assert [row[1] for row in rows] == ["1", "1", "1"]
    _, *rows = table(page, "Signals")
    assert [row[1::2] for row in rows] == [["goes on", "0"], ["the last step's checkpoint", "1"]]
