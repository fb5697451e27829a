"""The log of a Trainer on each rank, as an object of the rank's own.

A derived trainer may log what only its rank has, so a replacement gets the lines of the rank that it replaces: of rank
0, which writes the log, all of them, and of another rank the newest, since every rank holds the lines of all ranks.

Most lines are logged before a gradient barrier and are known to all ranks after it. A callback may also log after the
update. Such a *late* line is protected with the next barrier; until then a replacement gets what the rank from which it
gets its state has logged meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MAX_MAIN_BYTES = 16 << 20
"""Limit for the lines of rank 0 that are protected."""
MAX_OTHER_BYTES = 64 << 10
"""Limit for those of another rank, and all other ranks together have as much as rank 0."""


class TrainerLog:
    """Follows ``trainer.state.log_history``. Lines are counted from the beginning of the job."""

    def __init__(self, trainer: Any, limit: Callable[[], int]) -> None:
        """Args:
        trainer: whose log it is.
        limit: returns how many bytes of lines are protected on this rank.
        """
        self._trainer = trainer
        self._limit = limit
        self._first = 0
        """Number of the first line that is in the log of this process."""
        self._texts: list[str] = []
        """The lines of the log as JSON, without times."""
        self._oldest = self._end = 0
        """Numbers of the lines that are protected: of the first one, and of the one after the last. Later ones are
        late."""
        self._unit = 0
        """Number of the line that was the first one of the unit."""
        self._late: list[str] = []
        self._state: dict[str, Any] = {"end": 0, "unit": 0, "lines": ""}

    # ---- as each rank's own object ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The lines that were shared last."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the log. Lines that this process has logged itself stay what they were, with their times."""
        texts = state["lines"].split("\n") if state["lines"] else []
        self._state, self._end, self._unit = dict(state), state["end"], state["unit"]
        self._oldest = self._end - len(texts)
        is_known = self._first <= self._oldest <= self._first + len(self._texts)
        before = self._texts[: self._oldest - self._first] if is_known else []
        self._place(self._oldest - len(before), [*before, *texts])

    # ---- late lines, as part of what is the same on all ranks -------------------------------------------------------

    @property
    def late(self) -> list[str]:
        """The late lines."""
        self._follow()
        return self._texts[max(0, self._end - self._first) :]

    @late.setter
    def late(self, late: list[str]) -> None:
        self._late = late
        self._place(self._first, self._texts[: max(0, self._end - self._first)])

    # ---- in the course of a unit ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a unit."""
        self._follow()
        self._unit = self._first + len(self._texts)

    def share(self) -> None:
        """Protects all lines, if they are not too many. Call it before a unit's barrier."""
        self._follow()
        end = self._first + len(self._texts)
        if (end, self._unit) == (self._state["end"], self._state["unit"]):
            return
        self._end, self._oldest = end, max(self._oldest, self._first)
        texts = self._texts[self._oldest - self._first :]
        size, limit = sum(map(len, texts)) + len(texts), self._limit()
        if size > limit:
            num_left_out = 0
            while size > limit // 2:  # by so many that they are not others after each line
                size -= len(texts[num_left_out]) + 1
                num_left_out += 1
            self._oldest += num_left_out
            texts = texts[num_left_out:]
        self._state = {"end": end, "unit": self._unit, "lines": "\n".join(texts)}

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the unit has logged, as callbacks are told."""
        self._follow()
        found = [json.loads(text) for text in self._texts[max(0, self._unit - self._first) :]]
        return [{name: value for name, value in line.items() if name != "step"} for line in found]

    # -----------------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Reads the lines that the Trainer has logged meanwhile."""
        log = self._trainer.state.log_history
        if len(log) < len(self._texts):  # the script has cut it
            self._first += len(self._texts)
            self._texts = []
        self._texts.extend(_text(line) for line in log[len(self._texts) :])

    def _place(self, first: int, texts: list[str]) -> None:
        """Makes these lines, and the late ones after them, the log.

        Args:
            first: number of the first one.
            texts: all but the late ones.
        """
        log = self._trainer.state.log_history
        own = {self._first + index: pair for index, pair in enumerate(zip(self._texts, log, strict=False))}
        texts = [*texts, *self._late]
        pairs = ((text, own.get(first + index)) for index, text in enumerate(texts))
        log[:] = [pair[1] if pair is not None and pair[0] == text else json.loads(text) for text, pair in pairs]
        self._first, self._texts = first, texts


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the log without runtimes and rates, which differ between ranks."""
    return {name: value for name, value in line.items() if not _is_time(name)}


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics of an evaluation with Python's own numbers, and with runtimes and rates of 0."""
    values: dict[str, Any] = json.loads(json.dumps(metrics, default=_plain))
    return values | dict.fromkeys(filter(_is_time, values), 0.0)


def _is_time(name: str) -> bool:
    return name.endswith(("_runtime", "_per_second"))


def _text(line: dict[str, Any]) -> str:
    return json.dumps(without_times(line), default=_plain)


def _plain(value: Any) -> Any:
    """A value of the log that JSON does not know: a number of torch or NumPy as Python's, others as they are shown."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
