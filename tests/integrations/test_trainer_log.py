"""The log of a Trainer: restored by rank, and what a callback logs after the update is not lost with one rank."""

import math
from types import SimpleNamespace
from typing import Any

import torch

from keepstep.integrations.transformers.log import TrainerLog


class Process:
    """A process with a log, of which other processes of the job hear at barriers."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.trainer: Any = SimpleNamespace(state=SimpleNamespace(log_history=[]))
        self.log = TrainerLog(self.trainer, lambda: limit)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return self.trainer.state.log_history

    def say(self, *values: Any) -> None:
        self.lines.extend({"loss": value, "step": 1, "train_runtime": 3.5} for value in values)

    @property
    def said(self) -> list[Any]:
        return [line["loss"] for line in self.lines]

    def state(self) -> tuple[dict[str, Any], list[str]]:
        """What is protected: as this rank's own, and as that of all ranks."""
        return dict(self.log.state_dict()), list(self.log.late)

    def load(self, own: dict[str, Any], late: list[str], *, own_first: bool = False) -> None:
        if own_first:
            self.log.load_state_dict(own)
        self.log.late = late
        if not own_first:
            self.log.load_state_dict(own)
        assert self.state() == (own, late)
        self.log.begin()


def unit(process: Process, *values: Any) -> None:
    """A unit in which these are logged before its barrier."""
    process.log.begin()
    process.say(*values)
    process.log.share()


def test_a_replacement_has_the_lines_of_its_rank() -> None:
    process = Process()
    unit(process, 1, 2)
    unit(process, 3, math.nan)
    own, late = process.state()
    assert late == []
    other = Process()
    other.load(own, late)
    assert [line["loss"] for line in other.lines[:3]] == [1, 2, 3]
    assert math.isnan(other.lines[3]["loss"])
    assert [set(line) for line in other.lines] == [{"loss", "step"}] * 4


def test_the_lines_of_the_last_unit_are_told_again() -> None:
    process = Process()
    unit(process, 1)
    unit(process, 2, 3)
    process.say(4)  # late
    own, late = process.state()
    other = Process()
    other.log.late = late
    other.log.load_state_dict(own)
    assert other.log.lines == [{"loss": 2}, {"loss": 3}, {"loss": 4}]


def test_a_rank_that_goes_back_keeps_its_own_lines_with_their_times() -> None:
    for own_first in (False, True):
        process = Process()
        unit(process, 1)
        process.say(2)
        own, late = process.state()
        first, second = process.lines
        unit(process, 3)
        process.load(own, late, own_first=own_first)
        assert process.said == [1, 2]
        assert process.lines[0] is first
        assert own_first or process.lines[1] is second
        unit(process, 5)
        assert process.said == [1, 2, 5]


def test_a_late_line_comes_from_the_rank_that_gives_its_state_until_the_next_barrier() -> None:
    lost, other, replacement = Process(), Process(), Process()
    for process, value in ((lost, 1), (other, 10)):
        unit(process, value)
        process.say(5)
    replacement.load(lost.state()[0], other.state()[1])
    assert replacement.said == [1, 5]
    unit(replacement, 2)
    assert replacement.state()[1] == []
    again = Process()
    again.load(*replacement.state())
    assert again.said == [1, 5, 2]


def test_what_was_shared_does_not_change_before_the_next_barrier() -> None:
    process = Process()
    unit(process, 1)
    before = process.log.state_dict()
    process.say(2)
    process.lines.clear()
    process.log.begin()
    assert process.log.late == []
    assert process.log.state_dict() == before
    unit(process, 3)
    other = Process()
    other.load(*process.state())
    assert other.said == [3]


def test_the_newest_lines_of_a_long_log() -> None:
    process = Process(limit=400)
    for number in range(100):
        unit(process, number)
        assert len(process.state()[0]["lines"]) < 400
    own, late = process.state()
    other = Process(limit=400)
    other.load(own, late)
    assert 0 < len(other.said) < 30
    assert other.said == list(range(100))[-len(other.said) :]
    for each in (process, other):
        unit(each, 100)
        assert each.state() == process.state()
    unit(process, 101)
    process.load(*other.state())
    assert process.said == list(range(101))  # it has the older ones itself
    unit(process, "x" * 500)
    assert process.state()[0]["lines"] == ""


def test_values_that_json_does_not_know() -> None:
    process = Process()
    unit(process, torch.tensor(1.5), range(2))
    other = Process()
    other.load(*process.state())
    assert other.said == [1.5, "range(0, 2)"]
