"""Parts of the state that one rank alone holds: the job says so at its first step, and their loss ends it."""

from pathlib import Path

from tests.support.jobs import SCRIPTS, drill, run

SAID = "hold a part of the state that no other rank holds"


def test_they_are_reported_and_their_loss_ends_the_job(tmp_path: Path) -> None:
    ranks = ("--nproc-per-node", 2, "--spares", 1)
    script = (SCRIPTS / "hsdp.py", "--steps", 6, "--replicas", 1, "--snapshot-every", "off")
    code, result, output = drill(tmp_path, *ranks, "--faults", "kill@step=3,phase=backward,rank=1", *script)
    assert code == 1
    assert result["exit_code"] == 75
    assert "no live rank holds the state any more and there is no checkpoint" in result["reason"]
    assert output.count(f"keepstep: 2 of 2 ranks {SAID}") == 2, "once in each run"


def test_a_job_whose_shards_all_have_replicas_says_nothing_of_them(tmp_path: Path) -> None:
    code, out, err = run("run", "--nproc-per-node", 4, SCRIPTS / "hsdp.py", "--steps", 3)
    assert code == 0, err
    assert out == "done\n"
    assert SAID not in err
