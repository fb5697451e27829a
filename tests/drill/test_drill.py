"""Which recovery dealt with which fault."""

from keepstep.drill.drill import recovery_from
from keepstep.protocol.recovery.records import Failure, RecoveryRecord


def record(generation: int, begun_s: float, *lost: tuple[int, float]) -> RecoveryRecord:
    failures = [Failure(rank, "signal", "", 5, "backward", since_s) for rank, since_s in lost]
    return RecoveryRecord(generation, "signal", "", begun_s, failures)


def test_a_rank_lost_in_a_recovery_that_had_begun_shares_it() -> None:
    shared = record(2, 10.001, (0, 10.001), (1, 10.030))
    assert recovery_from(10.029, 1, [shared]) is shared


def test_a_rank_that_is_lost_twice_has_two() -> None:
    first, second = record(2, 10.01, (1, 10.01)), record(3, 10.21, (1, 10.21))
    assert recovery_from(10.0, 1, [first, second]) is first
    assert recovery_from(10.2, 1, [first, second]) is second


def test_a_hang_counts_from_the_last_move() -> None:
    hang = record(2, 12.0, (1, 9.7))
    assert recovery_from(10.0, 1, [hang]) is hang


def test_none_without_a_loss_of_that_rank() -> None:
    assert recovery_from(10.0, 1, [record(2, 10.01, (0, 10.01)), record(3, 8.0, (1, 8.0))]) is None
    assert recovery_from(10.0, None, [record(2, 10.01, (0, 10.01))]) is None
