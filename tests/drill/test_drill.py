"""Which recovery dealt with which fault."""

from keepstep.drill.drill import _row, own_exceptions, recovery_from
from keepstep.drill.faults import DrillFault
from keepstep.protocol.messages import Cause
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


def raised(generation: int, rank: int, since_s: float) -> RecoveryRecord:
    failure = Failure(rank, "exception", "exit code 1: KeyError: 'x'", 5, "backward", since_s)
    return RecoveryRecord(generation, "exception", "", since_s, [failure])


def test_an_exception_belongs_to_a_fault_or_to_the_script() -> None:
    records = [raised(2, 1, 10.0), record(3, 11.0, (0, 11.0)), raised(4, 1, 12.0)]
    fault = {"fault": "raise", "rank": 1}
    assert own_exceptions(records, [fault, fault, {"fault": "kill", "rank": 0}]) == []
    assert own_exceptions(records, [fault]) == ["step 5, rank 1: exit code 1: KeyError: 'x'"]
    assert len(own_exceptions(records, [{"fault": "kill", "rank": 1}])) == 2


def test_a_recovery_that_was_cut_short_hands_its_losses_on() -> None:
    assert len(own_exceptions([raised(2, 1, 10.0), raised(3, 1, 10.0)], [])) == 1


def test_a_pause_has_caused_no_recovery_but_one_for_silence() -> None:
    pause = DrillFault(number=0, kind="pause", during="forward", rank=1, seconds=2.0)
    killed = record(2, 10.0, (1, 10.0))
    hung = RecoveryRecord(3, Cause.HANG, "", 12.0, [Failure(1, Cause.HANG, "", 5, "forward", 10.2)])
    assert _row(pause, 10.2, 1, [killed])["detect_ms"] is None
    assert _row(pause, 10.2, 1, [killed, hung])["detect_ms"] == 1800.0


def test_a_hang_soon_after_a_kill_of_the_same_rank_has_a_recovery_of_its_own() -> None:
    """It is known, and dated, later than the kill is past."""
    hang = DrillFault(number=1, kind="hang", step=24, phase="updated", rank=1)
    killed = record(2, 10.0, (1, 10.0))
    stopped = RecoveryRecord(3, Cause.STOPPED, "", 10.9, [Failure(1, Cause.STOPPED, "", 24, "updated", 10.4)])
    assert _row(hang, 10.15, 1, [killed, stopped])["detect_ms"] == 750.0
    assert _row(hang, 10.15, 1, [killed])["detect_ms"] is None
