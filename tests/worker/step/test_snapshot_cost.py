"""What a snapshot costs, from what one rank sees in the first steps of a job."""

import pytest

from keepstep.worker.step.snapshot_cost import SnapshotCost

STEP_S = 0.1


class Machine:
    """Its clock, and what its cores leave."""

    def __init__(self, num_cores: int, num_ranks: int, busy_cores: float) -> None:
        self.cost = SnapshotCost(num_ranks, num_cores)
        self.idle_cores = num_cores - busy_cores
        self.now_s = self.idle_s = 0.0

    def step(self, length_s: float = STEP_S) -> None:
        self.cost.begin(self.now_s, self.idle_s)
        self.now_s += length_s
        self.idle_s += length_s * self.idle_cores

    def snapshot(
        self, prepared_s: float = 0.0, waited_s: float = 0.0, processor_s: float = 0.0, size: int = 1,
        length_s: float = STEP_S,
    ) -> None:  # fmt: skip
        self.step(length_s)
        self.cost.prepared(prepared_s)
        self.cost.waited(waited_s, processor_s, size)


def test_copies_on_idle_cores_cost_what_the_training_thread_is_at() -> None:
    machine = Machine(num_cores=8, num_ranks=2, busy_cores=2)
    for _ in range(5):
        machine.snapshot(prepared_s=0.00199, processor_s=0.05)
        machine.step()
    assert machine.cost.fewest_steps() == 2, "2 ms of 100 ms"


def test_copies_on_busy_cores_cost_all_ranks_their_share() -> None:
    machine = Machine(num_cores=2, num_ranks=4, busy_cores=2)
    for _ in range(5):
        machine.snapshot(processor_s=0.0099)
        machine.step()
    assert machine.cost.fewest_steps() == 20, "four copies of 10 ms on two cores, which take them from steps of 100 ms"


def test_what_is_waited_for_is_not_counted_twice() -> None:
    machine = Machine(num_cores=2, num_ranks=4, busy_cores=2)
    for _ in range(5):
        machine.snapshot(waited_s=0.0299, processor_s=0.0099)
        machine.step()
    assert machine.cost.fewest_steps() == 30


def test_what_steps_become_longer_by_counts_where_it_is_more_than_copies_take() -> None:
    """They also take caches and the memory's bandwidth, and all ranks wait for the slowest."""
    machine = Machine(num_cores=2, num_ranks=4, busy_cores=2)
    for _ in range(6):
        machine.snapshot(processor_s=0.0099, length_s=STEP_S + 0.0299)
        machine.step()
    assert machine.cost.fewest_steps() == 30


@pytest.mark.parametrize(("longer_s", "every"), [(0.02, 17), (-0.02, 25)])
def test_lengths_that_differ_by_more_than_a_snapshot_costs_tell_nothing(longer_s: float, every: int) -> None:
    machine = Machine(num_cores=2, num_ranks=4, busy_cores=2)
    for number in range(8):
        machine.snapshot(processor_s=0.0099, length_s=STEP_S + longer_s * (number % 3))
        machine.step(STEP_S + longer_s * (number % 3))
    assert machine.cost.fewest_steps() == every, "a snapshot costs 20 ms of steps of 120 or 80"


def test_memory_that_is_touched_for_the_first_time_is_not_counted() -> None:
    machine = Machine(num_cores=1, num_ranks=1, busy_cores=1)
    for number in range(4):
        machine.snapshot(processor_s=0.03 if number < 2 else 0.0099, length_s=STEP_S)
        machine.step()
    assert machine.cost.fewest_steps() == 10


def test_one_step_that_is_disturbed_changes_nothing() -> None:
    machine = Machine(num_cores=2, num_ranks=2, busy_cores=2)
    for number in range(5):
        machine.snapshot(processor_s=1.0 if number == 3 else 0.0099)
        machine.step(5.0 if number == 2 else STEP_S)
    machine.step()
    assert machine.cost.fewest_steps() == 10


def test_what_was_seen_before_there_was_optimizer_state_tells_nothing() -> None:
    machine = Machine(num_cores=1, num_ranks=1, busy_cores=1)
    machine.snapshot(processor_s=0.001)
    machine.step(1.0)
    for _ in range(2):
        machine.snapshot(processor_s=0.0099, size=3)
        machine.step()
    machine.step()
    assert machine.cost.fewest_steps() == 10


def test_a_broken_step_tells_nothing() -> None:
    machine = Machine(num_cores=1, num_ranks=1, busy_cores=1)
    for _ in range(3):
        machine.snapshot(processor_s=0.0099)
        machine.step(9.0)
        machine.cost.interrupted()
        machine.step()
    machine.step()
    assert machine.cost.fewest_steps() == 10


@pytest.mark.parametrize("num_snapshots", [0, 1])
def test_nothing_was_measured(num_snapshots: int) -> None:
    machine = Machine(num_cores=1, num_ranks=1, busy_cores=1)
    for _ in range(num_snapshots):
        machine.snapshot(processor_s=0.0099)
    assert machine.cost.fewest_steps() == 1


def test_the_next_second_copy_cannot_be_on_its_way_before_the_last_one_is_there() -> None:
    machine = Machine(num_cores=8, num_ranks=1, busy_cores=1)
    for sending_s in (0.9, 0.75):
        machine.snapshot(prepared_s=0.001)
        machine.step()
        machine.cost.sent(sending_s)
    machine.step()
    assert machine.cost.fewest_steps() == 8
