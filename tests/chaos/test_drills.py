"""Real faults in real jobs: whatever fails, every bit of the protected state is that of a run without failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.jobs import EXAMPLES, SCRIPTS, drill

from keepstep.drill.faults import IN_A_STEP, KINDS

BY_THE_RANK = [kind for kind in KINDS if kind not in ("pause", "spare-kill")]
PAIRS = [(kind, phase) for kind in BY_THE_RANK for phase in IN_A_STEP]
SPACING = 5
SMALL = ("--width", 32, "--layers", 2, "--context", 32, "--batch-size", 4)
"""A shape of the GPT with short steps, where there are many of them."""


CASES = [(example, world_size) for example in ("train_gpt.py", "train_digits.py") for world_size in (2, 3, 4)]


def specification(pairs: list[tuple[str, str]], world_size: int) -> tuple[str, int]:
    """One fault for each (kind, phase), ranks in turn, and the steps that they need."""
    parts = [
        f"{kind}@step={3 + number * SPACING},phase={phase},rank={number % world_size}"
        for number, (kind, phase) in enumerate(pairs)
    ]
    return ";".join(parts), 3 + len(pairs) * SPACING


def changed(tmp_path: Path, *pairs: tuple[str, str]) -> Path:
    """The smallest job with some of its lines replaced."""
    text = (SCRIPTS / "tiny.py").read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "script.py").write_text(text)
    return tmp_path / "script.py"


def check_all(tmp_path: Path, example: str, world_size: int, pairs: list[tuple[str, str]]) -> None:
    faults, steps = specification(pairs, world_size)
    code, result, output = drill(
        tmp_path, "--nproc-per-node", world_size, "--faults", faults, EXAMPLES / example, "--steps", steps
    )
    assert code == 0, output
    assert result["identical"]
    assert result["digest"] == result["reference_digest"]
    assert len(result["faults"]) == len(pairs)
    for row in result["faults"]:
        again = 1 if row["phase"] in ("forward", "backward") else 0
        assert row["steps_recomputed"] == again, row


def test_each_kind_of_fault(tmp_path: Path) -> None:
    """The smallest script, one fault of each kind, each in another phase."""
    by_the_rank = [(kind, phase) for kind, phase in zip(BY_THE_RANK, IN_A_STEP, strict=False)]
    faults, steps = specification(by_the_rank, 2)
    code, result, output = drill(
        tmp_path,
        "--nproc-per-node",
        2,
        "--faults",
        f"{faults};spare-kill@step=2",
        SCRIPTS / "tiny.py",
        "--steps",
        steps,
    )
    assert code == 0, output
    assert result["identical"]
    assert {row["fault"] for row in result["faults"]} == {*BY_THE_RANK, "spare-kill"}


@pytest.mark.parametrize(("example", "world_size"), CASES)
def test_kinds_and_phases(tmp_path: Path, example: str, world_size: int) -> None:
    """A third of all pairs of kind and phase for each job, a different third for the next one."""
    which = CASES.index((example, world_size)) % 3
    pairs = [pair for number, pair in enumerate(PAIRS) if (number + number // 3) % 3 == which]
    check_all(tmp_path, example, world_size, pairs)


@pytest.mark.parametrize(("example", "world_size"), CASES)
def test_every_kind_in_every_phase(tmp_path: Path, example: str, world_size: int) -> None:
    check_all(tmp_path, example, world_size, PAIRS)


def test_random_instants(tmp_path: Path, seed: int) -> None:
    faults = f"kill@phase=random,count=50,seed={seed}"
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--faults", faults, EXAMPLES / "train_gpt.py", *SMALL, "--steps", 500
    )
    assert code == 0, output
    assert len(result["faults"]) == 50
    assert all(row["steps_recomputed"] <= 1 for row in result["faults"])


def test_pauses_that_are_nobodys_fault_cost_no_rank(tmp_path: Path) -> None:
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--weather", "--hang-after", 1.5, SCRIPTS / "tiny.py", "--steps", 60
    )
    assert code == 0, output
    assert result["recoveries"] == []
    assert len(result["faults"]) == 13


@pytest.mark.parametrize(
    ("kind", "moment", "rank"),
    [
        ("kill", "stop", 0),
        ("hang", "stop", 2),
        ("kill", "reset", 0),
        ("hang", "reset", 1),
        ("kill", "restore", 0),
        ("kill", "restore", 1),
        ("hang", "restore", 2),
    ],
)
def test_failure_during_a_recovery(tmp_path: Path, kind: str, moment: str, rank: int) -> None:
    """Of a survivor, and (rank 1) of the replacement itself."""
    faults = f"kill@step=5,phase=backward,rank=1; {kind}@during={moment},rank={rank}"
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--spares", 2, "--faults", faults, SCRIPTS / "everything.py", "--steps", 15
    )
    assert code == 0, output
    assert sum(len(recovery["failed_ranks"]) for recovery in result["recoveries"]) == 2


def test_awkward_moments(tmp_path: Path) -> None:
    """The first step and the last, two at once, a spare, and a hang while another rank dies."""
    faults = [
        "kill@step=0,phase=backward,rank=0",
        "kill@step=6,phase=forward,rank=0",
        "kill@step=6,phase=backward,rank=2",
        "kill@step=12,phase=synced,rank=0",
        "kill@step=12,phase=optimizer,rank=1",
        "hang@step=18,phase=backward,rank=0",
        "kill@step=18,phase=backward,rank=1",
        "spare-kill@step=24",
        "kill@step=26,phase=forward,rank=1",
        "kill@step=39,phase=updated,rank=2",
    ]
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 3, "--faults", ";".join(faults), SCRIPTS / "everything.py", "--steps", 40
    )
    assert code == 0, output
    assert len(result["faults"]) == len(faults)


@pytest.mark.parametrize(
    "flags",
    [
        ["--bucket-view", "--zero-to-none", "0"],
        ["--find-unused"],
    ],
)
def test_ways_to_write_a_step(tmp_path: Path, flags: list[str]) -> None:
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, SCRIPTS / "everything.py", "--steps", 50, *flags)
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)


@pytest.mark.parametrize("flags", [[], ["--strike-cold"]], ids=["warm", "cold"])
def test_a_fault_waits_for_a_warm_spare(tmp_path: Path, flags: list[str]) -> None:
    """The start of this script takes a spare longer than the ranks take for their first steps."""
    waiting = "import time\n\nif 'RANK' not in os.environ:\n    time.sleep(1.5)\nsession = keepstep.init("
    script = changed(tmp_path, ("session = keepstep.init(", waiting))
    faults = "kill@step=1,phase=backward,rank=1"
    code, _result, output = drill(
        tmp_path, "--nproc-per-node", 2, "--run-dir", tmp_path, "--faults", faults, *flags, script, "--steps", 4
    )
    assert code == 0, output
    journal = (tmp_path / "with-faults" / "journal.jsonl").read_text()
    is_warm = journal.index('["WorkerReady",2') < journal.index('["WorkerLost",1')
    assert is_warm is not bool(flags)


def test_what_a_script_switches_off(tmp_path: Path) -> None:
    """Ranks are interrupted while dropout is off, and replacements come when layers are frozen already."""
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, SCRIPTS / "modes.py")
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)


def test_what_a_script_writes_to_parameters_by_itself(tmp_path: Path) -> None:
    """It would be written twice where a step comes again; and so would be drawn what is drawn in front of a step."""
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, SCRIPTS / "by_hand.py")
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)


def test_errors_that_a_script_provokes_and_catches(tmp_path: Path) -> None:
    """A reduction that gloo has not, in every step; and a group's own timeout, while which a rank is killed."""
    faults = [f"kill@step={2 + 5 * n},phase={phase},rank={n % 3}" for n, phase in enumerate(IN_A_STEP)]
    faults.append("kill@step=36,phase=backward,rank=2")
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, "--faults", ";".join(faults), SCRIPTS / "caught.py")
    assert code == 0, output
    assert len(result["faults"]) == len(faults)


# ---- when it says NO ------------------------------------------------------------------------------------------------


def test_a_difference_is_noticed_and_explained(tmp_path: Path) -> None:
    """The drill itself must be able to say no: this script keeps state that it does not protect."""
    script = changed(
        tmp_path,
        ("first = None\n", "first = None\nhidden = 0\n"),
        ("model(data).pow(2)", "hidden += 1\n        (model(data) * hidden).pow(2)"),
    )
    faults = "kill@step=3,phase=updated,rank=0; kill@step=9,phase=backward,rank=1"
    code, result, output = drill(tmp_path, "--nproc-per-node", 2, "--faults", faults, script, "--steps", 14)
    assert code == 1
    assert result["identical"] is False
    explanation = result["explanation"]
    # The first kill comes after the step: the replacement takes part from step 4 on.
    assert (explanation["kind"], explanation["step"], explanation["ranks"]) == ("computed differently", 5, [0, 1])
    assert explanation["fault"] == "kill@step=3,phase=updated,rank=0"
    assert "model.module.0.weight" in explanation["names"]
    assert "first difference: at the start of step 5, on all ranks, in model.module.0.weight" in output


def test_a_script_that_begins_differently_each_time_needs_no_fault(tmp_path: Path) -> None:
    script = changed(tmp_path, ("torch.manual_seed(0)\n", "torch.seed()\n"))
    code, result, output = drill(tmp_path, "--nproc-per-node", 2, "--faults", "none", script, "--steps", 3)
    assert code == 1
    assert (result["explanation"]["kind"], result["explanation"]["step"]) == ("began differently", 0)
    assert "The two runs started differently" in output


def test_files_that_a_replacement_writes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best loss so far is a variable of the script, so a replacement saves what is not the best."""
    saving = """
    loss = 1.0 + step.index % 5
    if step.committed and session.rank == 0 and loss < best:
        best = loss
        torch.save({"model": model.module.state_dict(), "loss": loss}, open("in.txt").read().strip() + "/best.pt")
    if step.committed and step.index == arguments.stop_early_at:"""
    script = changed(
        tmp_path,
        ("first = None\n", "first = None\nbest = 9.0\n"),
        ("\n    if step.committed and step.index == arguments.stop_early_at:", saving),
    )
    (tmp_path / "in.txt").write_text("out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "best.pt").write_text("of an earlier job")
    monkeypatch.chdir(tmp_path)
    faults = "kill@step=6,phase=backward,rank=0"
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 2, "--faults", faults, "--compare", "out/*.pt", script.name, "--steps", 9
    )
    assert code == 1
    assert result["identical"] is True
    assert result["explanation"] is None
    (file,) = result["files"]
    assert file["file"] == "out/best.pt"
    assert file["difference"].startswith("['model']['0.weight']: ")
    assert "files identical: NO (0 of 1)" in output
    assert (tmp_path / "out" / "best.pt").read_text() == "of an earlier job"


@pytest.mark.parametrize("named", ["link", "../runs"])
def test_paths_of_the_run_folder_in_files_are_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    saving = """
    if step.committed and session.rank == 0:
        os.makedirs("out", exist_ok=True)
        paths = {"here": os.getcwd(), "out": os.path.abspath("out")}
        for name in ("last.ckpt", "last.pt"):
            torch.save({"paths": paths, "of " + os.getcwd(): step.index}, "out/" + name)
        open("out/paths.txt", "w").write(str(paths))
    if step.committed and step.index == arguments.stop_early_at:"""
    script = changed(tmp_path, ("\n    if step.committed and step.index == arguments.stop_early_at:", saving))
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "runs").mkdir()
    (work / "link").symlink_to(tmp_path / "runs")
    monkeypatch.chdir(work)
    flags = ("--nproc-per-node", 2, "--run-dir", named, "--faults", "kill@step=3,phase=backward,rank=0")
    code, result, output = drill(tmp_path, *flags, "--compare", "out", script, "--steps", 6)
    assert code == 0, output
    assert [file["file"] for file in result["files"]] == ["out/last.ckpt", "out/last.pt", "out/paths.txt"]
    for name in ("reference", "with-faults"):
        assert str(tmp_path / "runs" / name / "work") in (tmp_path / "runs" / name / "work/out/paths.txt").read_text()


def test_a_loop_that_is_left_early_cannot_be_compared(tmp_path: Path) -> None:
    code, result, output = drill(
        tmp_path, "--nproc-per-node", 2, SCRIPTS / "tiny.py", "--steps", 50, "--stop-early-at", 6
    )
    assert (code, result) == (1, {})
    assert "steps() was not iterated to its end: the script ended on rank 0 after 7 steps, rank 1 after 7" in output


@pytest.mark.parametrize("flags", [["--in-front"], ["--behind"], ["--reduce", "update"], ["--reduce", "behind"]])
def test_lines_around_a_step(tmp_path: Path, flags: list[str]) -> None:
    """An interrupted attempt takes along what the script changed before its ``with``, and behind it.

    A loss that is reduced for a log line after the update costs no rank its copy.
    """
    code, _result, output = drill(tmp_path, "--nproc-per-node", 3, SCRIPTS / "habits.py", *flags)
    assert code == 0, output


@pytest.mark.parametrize("flags", [[], ["--look"]])
def test_what_all_survivors_decide_behind_the_update_costs_no_state(tmp_path: Path, flags: list[str]) -> None:
    """The one that is lost there takes a value with it, by which both others then decide the same."""
    code, result, output = drill(tmp_path, "--nproc-per-node", 3, SCRIPTS / "behind_update.py", *flags)
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)


@pytest.mark.parametrize("flags", [[], ["--detach"]])
def test_two_models_that_are_updated_in_turn(tmp_path: Path, flags: list[str]) -> None:
    """A forward changes the buffers of the model whose turn it is not, and may leave its reducer waiting."""
    code, result, output = drill(tmp_path, "--nproc-per-node", 2, SCRIPTS / "gan.py", *flags)
    assert code == 0, output
    assert {row["phase"] for row in result["faults"]} >= set(IN_A_STEP)


def test_a_drill_leaves_no_state_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    flags = ("--nproc-per-node", 2, "--max-restarts", 0, "--strike-cold", "--run-dir", tmp_path / "run")
    faults = "kill@step=3,phase=forward,rank=1; kill@step=6,phase=forward,rank=1"
    code, result, output = drill(tmp_path, *flags, "--faults", faults, SCRIPTS / "tiny.py", "--steps", 8)
    assert code == 1, output
    assert list(here.iterdir()) == []
    assert list((tmp_path / "run" / "with-faults").glob("keepstep-rescue-*")), result["reason"]
