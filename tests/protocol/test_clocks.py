"""How far another clock is away: whatever the messages' delays, the truth lies within the error that is stated."""

from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.protocol.clocks import DRIFT, Alignment, ClockEstimate

NS = st.integers(0, 5_000_000_000)


def test_before_the_first_answer_nothing_is_known() -> None:
    assert ClockEstimate().alignment(0) is None


@given(
    st.integers(-(10**18), 10**18),
    st.lists(st.tuples(NS, NS, NS), min_size=1, max_size=20),
    st.integers(0, 10**12),
    st.floats(-DRIFT * 0.9, DRIFT * 0.9),
)
@example(2_000_006, [(0, 0, 2_000_006)], 0, 0.0)  # taken for no offset at all, which it may be by a hair
def test_the_truth_lies_within_the_error(
    offset_ns: int, trips: list[tuple[int, int, int]], later_ns: int, drift: float
) -> None:
    """Each trip: how long after the last one it begins, and what its two ways take. The clocks drift meanwhile."""
    estimate = ClockEstimate()

    def other(now_ns: int) -> int:
        return now_ns + offset_ns + round(now_ns * drift)

    now_ns = 10**9
    for pause_ns, there_ns, back_ns in trips:
        asked_ns = now_ns + pause_ns
        told_ns = other(asked_ns + there_ns)
        now_ns = asked_ns + there_ns + back_ns
        estimate.told(asked_ns, told_ns, now_ns)
    now_ns += later_ns
    alignment = estimate.alignment(now_ns)
    assert alignment is not None
    true_ns = other(now_ns) - now_ns
    # A round trip of seconds drifts within itself, and so does the rounding: DRIFT is stated for what comes after it.
    slack_ns = 2 + round(10_000_000_000 * DRIFT)
    assert abs(alignment.offset_ns - true_ns) <= alignment.error_ns + slack_ns
    assert alignment.error_ns >= 0


def test_the_quickest_answer_counts() -> None:
    estimate = ClockEstimate()
    estimate.told(0, 1_000_500, 1_000)
    estimate.told(2_000, 1_002_150, 2_300)
    estimate.told(3_000, 1_004_000, 5_000)
    assert estimate.alignment(5_000) == Alignment(1_000_000, 150)


def test_one_clock_is_known_as_one() -> None:
    """Question and answer take unequal times on one machine too, and nothing shall be shifted by that."""
    estimate = ClockEstimate()
    estimate.told(100, 180, 200)
    assert estimate.alignment(200) == Alignment(0, 80)


def test_an_old_answer_is_worth_less_than_a_new_one() -> None:
    estimate = ClockEstimate()
    estimate.told(0, 10**12 + 50, 100)
    hour_ns = 3600 * 10**9
    estimate.told(hour_ns, 10**12 + hour_ns + 1_500, hour_ns + 2_000)
    alignment = estimate.alignment(hour_ns + 2_000)
    assert alignment is not None
    assert (alignment.offset_ns, alignment.error_ns) == (10**12 + 500, 1_000)
