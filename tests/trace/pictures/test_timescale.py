"""From times to places and back to words."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.trace.pictures.timescale import MIN_TICK, Timescale, duration_text

TIMES = st.floats(-100, 100, allow_nan=False)


@given(st.lists(TIMES, max_size=20), st.floats(1e-6, 1e3), st.lists(TIMES, min_size=2, max_size=9))
def test_places_keep_the_order_of_times(marks: list[float], length_s: float, times: list[float]) -> None:
    scale = Timescale(-10.0, -10.0 + length_s, 100, 900, marks)
    places = [scale.at(time_s) for time_s in sorted(times)]
    assert places == sorted(places)
    assert all(100 <= place <= 900 + 1e-6 for place in places)
    assert scale.at(-10.0 + length_s) == pytest.approx(900)
    assert scale.at(-10.0) == 100


@given(st.lists(TIMES, max_size=20), st.floats(1e-6, 1e3), st.floats(-200, 200))
def test_ticks_are_apart_and_where_they_say(marks: list[float], length_s: float, zero_s: float) -> None:
    scale = Timescale(-10.0, -10.0 + length_s, 100, 900, marks)
    ticks = scale.ticks(zero_s)
    assert all(right[0] - left[0] >= MIN_TICK * 0.9 for left, right in itertools.pairwise(ticks))
    assert all(99.9 <= x <= 900.1 for x, _ in ticks)
    assert len({label for _, label in ticks}) == len(ticks)


def test_what_is_long_and_empty_is_cut() -> None:
    marks = [0.1, 0.2, 0.3, 60.3, 60.4, 60.5]
    scale = Timescale(0.0, 60.6, 0, 1000, marks)
    ((x, missing_s),) = scale.cuts
    assert 59 < missing_s < 60
    assert scale.at(0.3) < x < scale.at(60.3)
    assert scale.at(0.2) - scale.at(0.1) == pytest.approx(scale.at(60.4) - scale.at(60.3)), "the rest is to scale"
    assert scale.at(30.0) == pytest.approx(x), "what is missing has no place of its own"


@pytest.mark.parametrize("marks", [(), (1.0, 2.0, 3.0, 4.0), (3.0,)])
def test_what_is_even_or_unknown_is_not_cut(marks: tuple[float, ...]) -> None:
    scale = Timescale(0.0, 6.0, 0, 600, marks)
    assert scale.cuts == []
    assert scale.at(1.5) == pytest.approx(150)


def test_ticks_of_a_recovery() -> None:
    ticks = Timescale(-0.15, 0.2, 0, 700).ticks(0.0)
    assert [label for _, label in ticks] == ["-150 ms", "-100 ms", "-50 ms", "0", "50 ms", "100 ms", "150 ms", "200 ms"]
    assert [round(x) for x, _ in ticks] == [0, 100, 200, 300, 400, 500, 600, 700]


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0"), (0.0001, "0.1 ms"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (4.656, "4.66 s"), (90, "90 s"),
     (300, "5 min"), (7200, "2 h"), (36000, "10 h"), (5000, "83.3 min")],
)  # fmt: skip
def test_durations_for_people(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text
