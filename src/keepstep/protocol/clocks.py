"""The offset of another machine's monotonic clock, from the round trips of messages.

The method is Cristian's (*Probabilistic clock synchronization*, 1989): one side asks, the other tells its time,
and that was read at some moment between question and answer. Taken for the middle, it is wrong by half the round trip
at most, so the quickest of several answers is the best.
"""

from __future__ import annotations

import collections
import dataclasses

SAMPLES = 8
"""The newest so many answers are compared: older ones know nothing of how the clocks have drifted since."""
ASK_EVERY_S = 5.0
DRIFT = 1e-4
"""Two quartz clocks drift apart by less than so many seconds a second (100 ppm)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alignment:
    """What to add to a time of this clock to get the other's: ``offset_ns``, right to ``error_ns`` either way."""

    offset_ns: int
    error_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    heard_ns: int
    offset_ns: int
    error_ns: int


class ClockEstimate:
    """This machine's idea of another one's clock."""

    def __init__(self) -> None:
        self._answers: collections.deque[_Answer] = collections.deque(maxlen=SAMPLES)

    def told(self, asked_ns: int, told_ns: int, now_ns: int) -> None:
        """An answer has come.

        Args:
            asked_ns: when the question was sent, on this clock.
            told_ns: what the other clock showed.
            now_ns: the present time, on this clock.
        """
        error_ns = -(-(now_ns - asked_ns) // 2)
        self._answers.append(_Answer(now_ns, told_ns - asked_ns - (now_ns - asked_ns) // 2, error_ns))

    def alignment(self, now_ns: int) -> Alignment | None:
        """The best that is known; None before the first answer.

        An offset that may be nothing is taken for nothing, so that two programs on one machine share one clock exactly;
        where it was something after all, the error is that much larger, and stated so.
        """
        candidates = (
            Alignment(answer.offset_ns, answer.error_ns + round((now_ns - answer.heard_ns) * DRIFT))
            for answer in self._answers
        )
        best = min(candidates, key=lambda each: each.error_ns, default=None)
        if best is not None and abs(best.offset_ns) <= best.error_ns:
            return Alignment(0, best.error_ns + abs(best.offset_ns))
        return best
