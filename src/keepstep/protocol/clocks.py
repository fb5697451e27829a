"""The offset of another machine's monotonic clock, from the round trips of messages.

The method is Cristian's (*Probabilistic clock synchronization*, 1989): one side asks, and the other answers with its
time. It has read that time at some moment between question and answer. The estimate assumes the middle, so its error is
at most half of the round trip. The fastest of several answers is the best.
"""

from __future__ import annotations

import collections
import dataclasses

SAMPLES = 8
"""Number of newest answers to compare. Older ones are too inaccurate, because the clocks have drifted since."""
ASK_EVERY_S = 5.0
DRIFT = 1e-4
"""Bound of the drift between two quartz clocks, in seconds per second (100 ppm)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alignment:
    """This clock's time + ``offset_ns`` = the other clock's time, with an error of up to ``error_ns`` either way."""

    offset_ns: int
    error_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    heard_ns: int
    offset_ns: int
    error_ns: int


class ClockEstimate:
    """This machine's estimate of another machine's clock."""

    def __init__(self) -> None:
        self._answers: collections.deque[_Answer] = collections.deque(maxlen=SAMPLES)

    def told(self, asked_ns: int, told_ns: int, now_ns: int) -> None:
        """Records an answer.

        Args:
            asked_ns: when this machine sent the question, on this clock.
            told_ns: the time in the answer, on the other clock.
            now_ns: the present time, on this clock.
        """
        error_ns = -(-(now_ns - asked_ns) // 2)
        self._answers.append(_Answer(now_ns, told_ns - asked_ns - (now_ns - asked_ns) // 2, error_ns))

    def alignment(self, now_ns: int) -> Alignment | None:
        """Returns the best estimate; None before the first answer.

        An offset that may be zero counts as zero, so that two programs on one machine share one clock exactly. The
        error then grows by the offset.
        """
        candidates = (
            Alignment(answer.offset_ns, answer.error_ns + round((now_ns - answer.heard_ns) * DRIFT))
            for answer in self._answers
        )
        best = min(candidates, key=lambda each: each.error_ns, default=None)
        if best is not None and abs(best.offset_ns) <= best.error_ns:
            return Alignment(0, best.error_ns + abs(best.offset_ns))
        return best
