"""Jobs on several machines whose network fails: real processes, in network namespaces.

Whatever happens, the weights at the end are those of a run without failures, and nothing hangs.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.network.cluster import DEADLINE_S, SCRIPT, SHARDED_SCRIPT, Cluster
from tests.network.lab import Lab, why_no_clocks, why_not

from keepstep.protocol.recovery import RecoveryMachine, Stage
from keepstep.trace.record import journal, runfolder

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

STEPS, STEP_S = 60, 0.05
AHEAD_S = 10_000_000
"""Of one machine's monotonic clock: four months, which no test takes."""
ONE_IS_ENOUGH = ["--nproc-per-node", "1", "--nnodes", "2", "--min-nodes", "1", "--spares", "0"]
TWO_RANKS = ["--nproc-per-node", "1", "--nnodes", "2:3", "--spares", "1"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the ranks say of their weights after a run in which nothing fails."""
    digests = run_undisturbed(tmp_path_factory.mktemp("reference"), 2, SCRIPT, STEPS, 0)
    assert len(set(digests.values())) == 1
    return digests


def run_undisturbed(folder: Path, num_ranks: int, *script: object) -> dict[int, str]:
    """A run on one machine in which nothing fails; what its ranks say of their weights."""
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--nproc-per-node", str(num_ranks), "--spares", "0"]
    command += ["--run-dir", str(folder), *map(str, script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("digest ")]
    return {int(rank): digest for _, rank, digest in lines}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The same of four ranks under FSDP2."""
    digests = run_undisturbed(tmp_path_factory.mktemp("sharded"), 4, SHARDED_SCRIPT, STEPS, 0, 1)
    assert len(set(digests.values())) == 4
    return digests


@pytest.fixture
def lab(seed: int) -> Iterator[Lab]:
    """Three machines."""
    with Lab(3, seed).built() as built:
        yield built


def a_job(
    lab: Lab, folder: Path, *, flags: list[str] = TWO_RANKS, num_steps: int = STEPS, is_apart: bool = False
) -> Cluster:
    """The job of these tests, which takes three seconds and a bit where nothing fails."""
    return Cluster(lab, folder, flags, [str(SCRIPT), str(num_steps), str(STEP_S)], is_apart=is_apart)


def a_sharded_job(lab: Lab, folder: Path, every: int, *more: object) -> Cluster:
    """Two ranks on each of two machines, two spares on the third."""
    flags = ["--nproc-per-node", "2", "--nnodes", "2:3", "--spares", "2"]
    return Cluster(lab, folder, flags, [str(SHARDED_SCRIPT), str(STEPS), str(STEP_S), str(every), *map(str, more)])


def has_two_spares(job: RecoveryMachine) -> bool:
    """All is well: it trains, snapshots have been taken, and both spares wait."""
    spares = [spare for spare in job.roster.spares() if spare.ready or spare.awaits_rank]
    return job.stage is Stage.TRAINING and job.progress.trained_to > 0 and len(spares) == 2


def trains_with_a_spare(job: RecoveryMachine) -> bool:
    """All is well: it trains, and a warm spare waits."""
    return job.stage is Stage.TRAINING and job.roster.num_ready_spares > 0


def has_recovered(job: RecoveryMachine) -> bool:
    """The last recovery is over."""
    return bool(job.records) and job.records[-1].resumed_s is not None


def has_replaced(job: RecoveryMachine, num_lost: int) -> bool:
    """So many ranks were lost, and all ranks train."""
    return sum(len(record.failures) for record in job.records) == num_lost and job.stage is Stage.TRAINING


def test_a_machine_loses_its_power(lab: Lab, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    with a_job(lab, tmp_path).running() as cluster:
        cluster.wait_until(trains_with_a_spare, "training")
        cluster.power_off(1)
        cluster.wait_until(has_recovered, "a recovery")
        assert cluster.wait({0, 2}) == {0: 0, 2: 0}
        (record,) = cluster.job.records
        assert record.cause == "node lost"
        assert [failure.rank for failure in record.failures] == [1]
        assert cluster.digests() == undisturbed


def test_a_machine_is_drained(lab: Lab, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """Its rank moves to a warm spare elsewhere, and then it leaves."""
    with a_job(lab, tmp_path).running() as cluster:
        cluster.wait_until(trains_with_a_spare, "training")
        cluster.nodes[1].send_signal(signal.SIGTERM)
        cluster.wait_until(has_recovered, "a recovery")
        assert cluster.wait() == {0: 0, 1: 1, 2: 0}
        (record,) = cluster.job.records
        assert (record.cause, record.detail) == ("rank moved", "rank 1 lost: its node drains")
        assert cluster.digests() == undisturbed


def test_a_machine_is_cut_off_and_comes_back(lab: Lab, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """Another worker has its rank by then: it ends what still runs there, and is the next one to help out."""
    with a_job(lab, tmp_path).running() as cluster:
        cluster.wait_until(trains_with_a_spare, "training")
        cluster.lab.cut_off(1)
        cluster.wait_until(has_recovered, "a recovery")
        zombies = [worker.pid for worker in cluster.job.roster.workers.values() if worker.lost]
        cluster.lab.heal()
        cluster.wait_until(trains_with_a_spare, "the machine offered as a spare")
        assert not any(pid is not None and Path(f"/proc/{pid}").exists() for pid in zombies)
        cluster.power_off(2)
        cluster.wait_until(lambda job: len(job.records) == 2 and has_recovered(job), "a second recovery")
        assert cluster.wait({0, 1}) == {0: 0, 1: 0}
        assert cluster.digests() == undisturbed


def test_a_machine_takes_in_the_ranks_of_another_until_that_is_back(seed: int, tmp_path: Path) -> None:
    num_steps = 400  # a machine that starts again imports torch

    def are_apart(job: RecoveryMachine) -> bool:
        return job.stage is Stage.TRAINING and len({worker.node for worker in job.roster.holders()}) == 2

    with (
        Lab(2, seed).built() as lab,
        a_job(lab, tmp_path, flags=ONE_IS_ENOUGH, num_steps=num_steps).running() as cluster,
    ):
        cluster.wait_until(are_apart, "training")
        cluster.power_off(1)
        cluster.wait_until(has_recovered, "a recovery")
        assert len(cluster.job.roster.displaced()) == 1
        lab.heal()
        cluster.start(1)
        cluster.wait_until(are_apart, "the rank back on the other machine")
        assert cluster.wait() == {0: 0, 1: 0}
        assert [record.cause for record in cluster.job.records] == ["node lost", "rank moved"]
        assert cluster.digests() == run_undisturbed(tmp_path / "reference", 2, SCRIPT, num_steps, 0)


@pytest.mark.parametrize("every", [1, 3])
def test_a_machine_is_lost_whose_shards_no_other_rank_holds(
    lab: Lab, tmp_path: Path, every: int, sharded: dict[int, str]
) -> None:
    """The second copy of its ranks' snapshots is on another machine, which sends it to the spares on the third."""
    with a_sharded_job(lab, tmp_path, every).running() as cluster:
        cluster.wait_until(has_two_spares, "training")
        cluster.power_off(1)
        cluster.wait_until(has_recovered, "a recovery")
        assert cluster.wait({0, 2}) == {0: 0, 2: 0}
        (record,) = cluster.job.records
        assert record.cause == "node lost"
        assert sorted(failure.rank for failure in record.failures) == [2, 3]
        assert {rank for rank, action in record.actions.items() if action == "restore"} == {2, 3}
        recomputed = record.steps_recomputed
        assert recomputed is not None
        # Those since the snapshot, as many again where its second copy was under way, and the broken one.
        assert recomputed <= 2 * every + 1
        assert cluster.digests() == sharded


def test_a_machine_is_lost_and_with_it_the_rank_that_keeps_its_second_copies(
    lab: Lab, tmp_path: Path, sharded: dict[int, str]
) -> None:
    """The copies are in memory that the agent of that rank's machine holds: another rank there sends them."""
    with a_sharded_job(lab, tmp_path, 1).running() as cluster:
        cluster.wait_until(has_two_spares, "training")
        cluster.power_off(1)
        assert cluster.kill_rank(0)
        cluster.wait_until(lambda job: has_replaced(job, 3), "a recovery")
        assert cluster.wait({0, 2}) == {0: 0, 2: 0}
        assert cluster.digests() == sharded


def test_a_machine_takes_ranks_and_has_no_memory_for_second_copies(
    lab: Lab, tmp_path: Path, sharded: dict[int, str]
) -> None:
    """The job goes on without those of the other machine's ranks, says so, and takes them when there is memory."""
    with a_sharded_job(lab, tmp_path, 1, 2).running() as cluster:
        cluster.wait_until(has_two_spares, "training")
        cluster.power_off(1)
        cluster.wait_until(has_recovered, "a recovery")
        assert cluster.wait({0, 2}) == {0: 0, 2: 0}
        assert cluster.digests() == sharded
    told = (tmp_path / "node-0.log").read_text().splitlines()
    for rank, buddy in ((0, 2), (1, 3)):
        first, then = (line for line in told if f"keepstep: the snapshots of rank {rank} " in line)
        assert re.search(rf"have one copy only: node '.*', where rank {buddy} would keep the second one, has no", first)
        assert then.endswith(f"have a second copy again: rank {buddy} keeps it")


@pytest.mark.parametrize("way", ["nothing arrives there", "nothing comes from there"])
def test_a_cable_works_one_way_only(lab: Lab, tmp_path: Path, undisturbed: dict[int, str], way: str) -> None:
    with a_job(lab, tmp_path).running() as cluster:
        cluster.wait_until(trains_with_a_spare, "training")
        for other in (0, 2):
            cluster.lab.change(*((other, 1) if way == "nothing arrives there" else (1, other)), lose=1.0)
        cluster.wait_until(has_recovered, "a recovery")
        cluster.lab.heal()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}
        assert cluster.digests() == undisturbed


def test_a_fifth_of_all_packets_is_lost(lab: Lab, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    with a_job(lab, tmp_path).running() as cluster:
        cluster.wait_until(trains_with_a_spare, "training")
        cluster.lab.change_between({0}, {1, 2}, lose=0.2)
        cluster.lab.change_between({1}, {2}, lose=0.2)
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}
        assert cluster.digests() == undisturbed


def test_everything_takes_a_fifth_of_a_second(lab: Lab, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    with a_job(lab, tmp_path).running() as cluster:
        cluster.wait_until(trains_with_a_spare, "training")
        cluster.lab.change_between({0}, {1, 2}, delay_s=0.2)
        cluster.lab.change_between({1}, {2}, delay_s=0.2)
        assert cluster.kill_rank(1)
        cluster.wait_until(has_recovered, "a recovery")
        cluster.lab.heal()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}
        assert cluster.digests() == undisturbed


def test_the_controller_is_cut_off_from_half_of_the_agents(
    seed: int, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """The ranks still reach one another, and the one that was given up goes on for a while: it can harm no process."""
    with Lab(4, seed).built() as lab, a_job(lab, tmp_path, is_apart=True).running() as cluster:
        cluster.wait_until(trains_with_a_spare, "training")
        victim = next(worker.node for worker in cluster.job.roster.holders() if worker.rank == 1)
        node = next(node for node in range(1, 4) if victim.endswith(f"-{node}"))
        cluster.lab.change_between({0}, {node}, lose=1.0)
        cluster.wait_until(has_recovered, "a recovery")
        cluster.lab.heal()
        assert set(cluster.wait().values()) == {0}
        assert cluster.digests() == undisturbed


@pytest.mark.skipif(WHY_NOT is None and why_no_clocks() is not None, reason="time namespaces are not permitted")
def test_the_machine_of_the_controller_loses_its_power(seed: int, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """One on another machine takes its place, whose clock shows something else altogether."""
    gate = tmp_path / "gate"
    flags = ["--nproc-per-node", "1", "--nnodes", "2", "--spares", "1"]
    script = [str(SCRIPT), str(STEPS), str(STEP_S), str(gate)]
    with Lab(4, seed).built() as lab:
        lab.clock_ahead_s[3] = AHEAD_S
        with Cluster(lab, tmp_path, flags, script, is_apart=True, standby=3).running() as cluster:
            cluster.wait_until(trains_with_a_spare, "training")
            cluster.wait_for(lambda: all(Path(f"{gate}.{rank}").exists() for rank in (0, 1)), "the gate")
            cluster.power_off(0)
            cluster.wait_for(lambda: "controller listens" in cluster.log(3), "the second controller")
            assert cluster.kill_rank(1)
            gate.touch()
            assert cluster.wait({1, 2, 3}) == {1: 0, 2: 0, 3: 0}
            (record,) = cluster.job.records
            assert [failure.rank for failure in record.failures] == [1]
            assert cluster.digests() == undisturbed
    times_s = [entry.at_s for entry in journal.read(tmp_path / "node-0" / runfolder.JOURNAL)]
    assert times_s == sorted(times_s)
    assert times_s[-1] - times_s[0] < AHEAD_S / 2, "the job's clock did not jump"


def test_the_controller_dies_while_ranks_die(lab: Lab, tmp_path: Path, seed: int) -> None:
    disturb(lab, tmp_path, seed, num_crashes=4, num_losses=2)


def test_the_controller_dies_twenty_times(lab: Lab, tmp_path: Path, seed: int) -> None:
    disturb(lab, tmp_path, seed, num_crashes=20, num_losses=10)


def disturb(lab: Lab, folder: Path, seed: int, *, num_crashes: int, num_losses: int) -> None:
    """Kills the controller and ranks at random instants."""
    generator = random.Random(seed)
    kinds = ["controller"] * num_crashes + ["rank"] * num_losses
    generator.shuffle(kinds)
    num_steps = 50 * len(kinds)  # longer than the disturbance
    with a_job(lab, folder, num_steps=num_steps).running() as cluster:
        cluster.wait_until(trains_with_a_spare, "training")
        num_lost = 0
        for kind in kinds:
            if kind == "rank":
                # Of two ranks one has to live: the other one's successor must have its state first.
                cluster.wait_until(lambda job, num=num_lost: has_replaced(job, num), f"{num_lost} replacements")
            cluster.let_pass(generator.uniform(0.0, 1.5))
            if kind == "controller":
                cluster.wait_for(lambda: cluster.kill_controller() != 0, "a controller to kill")
            else:
                assert cluster.kill_rank(generator.randrange(2))
                num_lost += 1
        assert set(cluster.wait().values()) == {0}, cluster.logs()
        assert sum(len(record.failures) for record in cluster.job.records) == num_losses
        assert cluster.digests() == run_undisturbed(folder / "reference", 2, SCRIPT, num_steps, 0)
