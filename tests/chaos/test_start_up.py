"""Real jobs whose ranks exchange objects and numbers while they start, and of which every rank is lost later."""

from __future__ import annotations

from pathlib import Path

from tests.support.jobs import SCRIPTS, drill, run

from keepstep.drill.faults import IN_A_STEP

KILLS = ";".join(f"kill@step={3 + 4 * n},phase={phase},rank={n % 3}" for n, phase in enumerate(IN_A_STEP))


def test_a_replacement_trains_with_what_the_ranks_exchanged(tmp_path: Path) -> None:
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, "--faults", KILLS, SCRIPTS / "exchange.py")
    assert code == 0, output
    assert len(result["faults"]) == len(IN_A_STEP)


def test_a_replacement_holds_the_very_objects_of_the_process_that_it_replaces() -> None:
    """Rank 0 is lost, from whom the objects came: its replacement would send others."""
    code, out, err = run("run", "--nproc-per-node", 3, SCRIPTS / "exchange.py", "--kill-at", 9)
    assert code == 0, err
    said = [line.removeprefix("EXCHANGED ") for line in out.splitlines() if line.startswith("EXCHANGED")]
    begun = {line.replace(" at the start", "") for line in said if " at the start" in line}
    ended = {line.replace(" at the end", "") for line in said if " at the end" in line}
    assert len(begun) == 3
    assert ended == begun
