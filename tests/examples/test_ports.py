"""Scripts in the style of everyday ones: what they compute, and save, is the same with and without failures."""

from pathlib import Path

from tests.support.jobs import EXAMPLES, drill

from keepstep.drill.faults import IN_A_STEP


def test_epochs_with_a_file_of_the_best_weights(tmp_path: Path) -> None:
    """Start-up is seeded by `init` alone, and what was the best so far is known to a replacement."""
    script = EXAMPLES / "train_epochs.py"
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, "--compare", "best.pt", script)
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)
    assert "files identical: yes (1 of 1)" in output


def test_a_loss_that_is_reduced_after_the_update(tmp_path: Path) -> None:
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, EXAMPLES / "train_logged.py")
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)
