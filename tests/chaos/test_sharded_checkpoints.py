"""Checkpoints of state of which each rank holds a part: in jobs that lose a part, that are drained, that end."""

import json
import re
import signal
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill, run, running

SCRIPT = SCRIPTS / "hsdp.py"
OFF = ("--snapshot-every", "off")


def digest(out: str) -> str:
    """Of the full tensors, as rank 0 of the script prints it."""
    found = re.findall(r"^[0-9a-f]{64}$", out, re.MULTILINE)
    assert len(found) == 1, out
    return str(found[0])


def test_the_loss_of_a_part_goes_back_to_the_checkpoint_of_all(tmp_path: Path) -> None:
    ranks = ("--nproc-per-node", 4, "--spares", 1, "--faults", "kill@step=5,phase=backward,rank=2")
    code, result, output = drill(
        tmp_path, *ranks, SCRIPT, "--steps", 8, "--replicas", 1, *OFF, "--checkpoint-dir", "saved"
    )
    assert code == 0, output
    assert result["identical"], output
    [recovery] = result["recoveries"]
    assert recovery["resume_step"] == 3, output


@pytest.mark.parametrize(
    ("num_writers", "layouts"),
    [(4, [(4, 1), (2, 1), (1, 1), (4, 2)]), (2, [(4, 2), (4, 1)])],
    ids=["FSDP2", "HSDP"],
)
def test_another_number_of_ranks_loads_the_same_values(
    num_writers: int, layouts: list[tuple[int, int]], tmp_path: Path
) -> None:
    digests = set()
    for num_ranks, replicas in layouts:
        job = ("run", "--nproc-per-node", num_ranks, SCRIPT, "--steps", 6, "--replicas", replicas)
        code, out, err = run(*job, "--checkpoint-dir", tmp_path / "saved")
        assert code == 0, err
        digests.add(digest(out))
    assert len(digests) == 1, "the first has trained, the others have loaded what it wrote"
    files = sorted(path.name for path in (tmp_path / "saved" / "step_0000000006").iterdir())
    assert files == [
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(num_writers)),
        "checksums",
        "content.msgpack",
    ]


def test_a_drained_job_has_the_parts_of_all_ranks(tmp_path: Path) -> None:
    ranks, saved = ("--nproc-per-node", 4), tmp_path / "saved"
    with running("run", *ranks, SCRIPT, "--forever", "--replicas", 1, *OFF, "--checkpoint-dir", saved) as job:
        assert job.process.stdout is not None
        assert job.process.stdout.readline() == "trains\n"
        job.process.send_signal(signal.SIGTERM)
        code, _out, err = job.finish()
        job.wait_until_gone()
    assert code == 1, err
    found = re.search(r"ended by SIGTERM: drained at step (\d+), with a checkpoint", err)
    assert found, err
    step = int(found[1])
    assert max(path.name for path in saved.iterdir()) == f"step_{step:010d}"
    again = ("--nproc-per-node", 2, SCRIPT, "--steps", step, "--replicas", 1, *OFF, "--checkpoint-dir", saved)
    undisturbed = (*ranks, SCRIPT, "--steps", step, "--replicas", 1, *OFF, "--checkpoint-dir", tmp_path / "other")
    outputs = [run("run", *arguments) for arguments in (again, undisturbed)]
    assert [code for code, _out, _err in outputs] == [0, 0], outputs
    assert len({digest(out) for _code, out, _err in outputs}) == 1


def test_what_live_ranks_rescue_together_is_a_checkpoint(tmp_path: Path) -> None:
    """Of two replicas one has lost a rank, and none takes its place."""
    report = tmp_path / "report.json"
    job = ("run", "--nproc-per-node", 4, "--max-restarts", 0, "--report", report, SCRIPT, "--kill-at", 4)
    code, _out, err = run(*job, cwd=tmp_path)
    assert code == 76, err
    [rescued] = tmp_path.glob("keepstep-rescue-step4-*")
    assert f"state saved: {rescued}" in json.loads(report.read_text())["reason"]
    (tmp_path / "saved").mkdir()
    rescued.rename(tmp_path / "saved" / "step_0000000004")
    again = ("run", "--nproc-per-node", 2, SCRIPT, "--steps", 4, *OFF, "--checkpoint-dir", tmp_path / "saved")
    undisturbed = ("run", "--nproc-per-node", 4, SCRIPT, "--steps", 4, "--checkpoint-dir", tmp_path / "other")
    outputs = [run(*arguments) for arguments in (again, undisturbed)]
    assert [code for code, _out, _err in outputs] == [0, 0], outputs
    assert len({digest(out) for _code, out, _err in outputs}) == 1


def test_no_rank_begins_a_checkpoint_before_all_have_written_the_last_one(tmp_path: Path) -> None:
    code, out, err = run("run", "--nproc-per-node", 2, SCRIPTS / "slow_disk.py", tmp_path / "saved")
    assert code == 0, err
    drafts, checkpoints = (line.split()[1:] for line in out.splitlines())
    assert drafts[0] == "draft_0000000001_generation_1"
    assert not {f"draft_{step:010d}_generation_1" for step in range(2, 6)} & set(drafts), "while rank 1 still writes"
    assert checkpoints == ["step_0000000007", "step_0000000008"], "the last one, though rank 1 still wrote step 7"


@pytest.mark.parametrize("script", ["pipeline.py", "tensor_parallel.py"])
def test_half_the_replicas_load_what_stages_and_tensor_parallel_ranks_hold(script: str, tmp_path: Path) -> None:
    held = []
    for num_ranks in (4, 2):
        job = ("run", "--nproc-per-node", num_ranks, SCRIPTS / script, "--steps", 6)
        code, out, err = run(*job, "--checkpoint-dir", tmp_path / "saved")
        assert code == 0, err
        held.append(sorted(line for line in out.splitlines() if line.startswith("holds ")))
    assert len(held[0]) == 4
    assert len(set(held[0])) == 2, "each part is held by two"
    assert held[1] == sorted(set(held[0]))


def test_zero_goes_on_from_a_checkpoint_and_loads_it_on_fewer_ranks(tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    def trained(num_ranks: int) -> str:
        script = (SCRIPTS / "zero.py", "--steps", 9, "--checkpoint-dir", saved)
        code, out, err = run("run", "--nproc-per-node", num_ranks, *script)
        assert code == 0, err
        return digest(out)

    undisturbed = trained(4)
    newest = saved / "step_0000000009"
    assert [trained(num_ranks) for num_ranks in (2, 1)] == [undisturbed] * 2, "they find that all steps are done"
    newest.rename(tmp_path / newest.name)
    assert trained(4) == undisturbed, "three more steps, with the optimizer state of step 6"
    assert newest.is_dir()
