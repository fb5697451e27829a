"""What an agent knows of its controller's clock, when that is another controller's all of a sudden."""

from __future__ import annotations

import time

import pytest
from tests.support.published import news

from keepstep.agent.phases import PhaseReporter
from keepstep.protocol.messages import AnyMessage, ClockAsked, ClockTold, PublicationStage
from keepstep.transports.interface import Connected


class Line:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []

    def send(self, message: AnyMessage) -> None:
        self.sent.append(message)

    async def receive(self) -> AnyMessage | Connected:
        raise AssertionError("no process listens")


def told(asked: AnyMessage, ahead_s: int) -> ClockTold:
    """The answer of a controller whose clock is so far ahead."""
    assert isinstance(asked, ClockAsked)
    return ClockTold(asked.asked_ns, time.monotonic_ns() + ahead_s * 10**9, 0.0)


def test_a_new_line_is_asked_at_once_and_the_former_answers_count_no_more() -> None:
    line = Line()
    phases = PhaseReporter("node-a", line)
    now_s = 100.0
    for _ in range(3):
        phases.tick((), now_s, is_sending=True)
        assert phases.told(told(line.sent.pop(), 1000)) == pytest.approx(1000, abs=5.0)
        now_s += 5.0
    phases.tick((), now_s - 4.9, is_sending=True)
    assert line.sent == [], "it was asked not long ago"
    phases.reconnected()
    phases.tick((), now_s - 4.8, is_sending=True)
    assert phases.told(told(line.sent.pop(), 7)) == pytest.approx(7, abs=5.0)


def test_what_is_told_of_weights_is_put_on_the_controllers_clock() -> None:
    line = Line()
    phases = PhaseReporter("node-a", line)
    weights = news(0, PublicationStage.COMMITTED, 3, at_s=50.0)
    assert phases.on_job_clock(weights) == weights, "nothing is known of that clock yet"
    phases.tick((), 100.0, is_sending=True)
    phases.told(told(line.sent.pop(), 1000))
    moved = phases.on_job_clock(weights)
    assert moved.at_s == pytest.approx(1050, abs=5.0)
    assert moved.at_s - moved.begun_s == pytest.approx(0.5)
