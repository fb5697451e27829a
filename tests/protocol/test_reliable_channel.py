"""A reliable channel: a network may do anything to its packets, and each message arrives exactly once and in order."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import Packet, Resume, WorkerFenced
from keepstep.protocol.reliable_channel import CROSSING_S, MAX_MESSAGES, RESEND_S, ReliableChannel, Spoken

NODE, INCARNATION = "node-a", 7
ROUNDS = 4
"""Whole exchanges after the last fault: one resends, the next acknowledges."""


@dataclasses.dataclass(frozen=True)
class Act:
    """One thing that happens. ``which`` names the side (even: the agent), ``at`` the packet under way."""

    kind: str
    which: int
    at: int = 0


KINDS = ["say", "transmit", "deliver"] * 2 + ["repeat", "lose", "reconnect", "wait"]
acts = st.lists(st.builds(Act, st.sampled_from(KINDS), st.integers(0, 1), st.integers(0, 5)), max_size=120)


class Line:
    """Both ends, what is under way to each, and what each has said and heard."""

    def __init__(self, kind: type[ReliableChannel] = ReliableChannel) -> None:
        self.ends = [kind(NODE, INCARNATION), kind(NODE, INCARNATION)]
        self.under_way: list[list[Packet]] = [[], []]
        self.said: list[list[Spoken]] = [[], []]
        self.heard: list[list[Spoken]] = [[], []]
        self.now_s = 100.0

    def perform(self, act: Act) -> None:
        side, other = act.which, 1 - act.which
        packets = self.under_way[side]
        match act.kind:
            case "say":
                number = len(self.said[side])
                message = WorkerFenced(number) if side == 0 else Resume(number)
                self.said[side].append(message)
                self.ends[side].say([message])
            case "transmit":
                self.under_way[other] += self.ends[side].packets(self.now_s)
            case "deliver" if packets:
                self._arrive(side, packets.pop(act.at % len(packets)))
            case "repeat" if packets:
                self._arrive(side, packets[act.at % len(packets)])
            case "lose" if packets:
                packets.pop(act.at % len(packets))
            case "reconnect":
                self.under_way = [[], []]
                for end in self.ends:
                    end.reconnected()
            case "wait":
                self.now_s += RESEND_S / 3

    def _arrive(self, side: int, packet: Packet) -> None:
        self.heard[side] += self.ends[side].receive(packet, self.now_s)
        assert self.heard[side] == self.said[1 - side][: len(self.heard[side])]

    def calm_down(self) -> None:
        """No more faults: what was said arrives, and no process has anything to say any more."""
        for _ in range(ROUNDS):
            self.now_s += RESEND_S
            for side in (0, 1):
                for packet in self.ends[side].packets(self.now_s, heartbeat=True):
                    self._arrive(1 - side, packet)
        assert self.heard == [self.said[1], self.said[0]]


@given(acts)
def test_everything_arrives_exactly_once_and_in_order(story: list[Act]) -> None:
    line = Line()
    for act in story:
        line.perform(act)
    line.calm_down()
    for end in line.ends:
        assert end.packets(line.now_s + 10 * RESEND_S) == []  # all is acknowledged


class Forgetful(ReliableChannel):
    """Takes what came twice for new."""

    def receive(self, packet: Packet, now_s: float) -> tuple[Spoken, ...]:
        super().receive(packet, now_s)
        return packet.messages


class Hasty(ReliableChannel):
    """Never says anything twice."""

    def reconnected(self) -> None:
        pass

    def receive(self, packet: Packet, now_s: float) -> tuple[Spoken, ...]:
        transmitted = self._transmitted
        new = super().receive(packet, now_s)
        self._transmitted = max(transmitted, self._transmitted)
        return new

    def packets(self, now_s: float, *, heartbeat: bool = False) -> list[Packet]:
        self._patient_since_s = None
        return super().packets(now_s, heartbeat=heartbeat)


@pytest.mark.parametrize(
    ("mutant", "kinds"), [(Forgetful, ["say", "transmit", "repeat"]), (Hasty, ["say", "transmit", "lose"])]
)
def test_the_check_finds_a_broken_channel(mutant: type[ReliableChannel], kinds: list[str]) -> None:
    def live_through_it() -> None:
        line = Line(mutant)
        for kind in [*kinds, "deliver"]:
            line.perform(Act(kind, 0 if kind in ("say", "transmit") else 1))
        line.calm_down()

    with pytest.raises(AssertionError):
        live_through_it()


# ---- one by one -----------------------------------------------------------------------------------------------------


def packet(first: int, received: int, *numbers: int) -> Packet:
    return Packet(NODE, INCARNATION, first, received, tuple(WorkerFenced(number) for number in numbers), misses=False)


def test_what_was_said_goes_out_at_once_and_once() -> None:
    end = ReliableChannel(NODE, INCARNATION)
    end.say([WorkerFenced(0), WorkerFenced(1)])
    assert end.packets(0.0) == [packet(0, 0, 0, 1)]
    assert end.packets(0.0) == []
    end.say([WorkerFenced(2)])
    assert end.packets(0.1) == [packet(2, 0, 2)]


def test_what_was_not_acknowledged_goes_out_again() -> None:
    end = ReliableChannel(NODE, INCARNATION)
    end.say([WorkerFenced(0), WorkerFenced(1)])
    end.packets(0.0)
    assert end.packets(RESEND_S * 0.9) == []
    assert end.packets(RESEND_S) == [packet(0, 0, 0, 1)]
    end.receive(Packet(NODE, INCARNATION, 0, 1, (), misses=False), RESEND_S)
    assert end.packets(RESEND_S) == []
    assert end.packets(2 * RESEND_S) == [packet(1, 0, 1)]


def test_a_new_connection_is_not_waited_for() -> None:
    end = ReliableChannel(NODE, INCARNATION)
    end.say([WorkerFenced(0)])
    end.packets(0.0)
    end.reconnected()
    assert end.packets(0.0) == [packet(0, 0, 0)]


def test_what_came_is_acknowledged_and_an_acknowledgement_is_not() -> None:
    agent, controller = ReliableChannel(NODE, INCARNATION), ReliableChannel(NODE, INCARNATION)
    agent.say([WorkerFenced(0)])
    controller.receive(agent.packets(0.0)[0], 0.0)
    assert controller.packets(0.0) == []  # a packet of its own would double what a controller has to send
    (heartbeat,) = agent.packets(1.0, heartbeat=True)
    controller.receive(heartbeat, 1.0)
    (answer,) = controller.packets(1.0)
    assert answer == Packet(NODE, INCARNATION, 0, 1, (), misses=False)
    agent.receive(answer, 1.0)
    assert agent.packets(100.0) == []
    assert controller.packets(100.0) == []


def test_what_comes_twice_is_acknowledged_at_once() -> None:
    end = ReliableChannel(NODE, INCARNATION)
    for _ in range(2):
        end.receive(packet(0, 0, 0), 0.0)
    assert end.packets(0.0) == [Packet(NODE, INCARNATION, 0, 1, (), misses=False)]


def test_a_heartbeat_shows_what_is_missing_and_it_comes_at_once() -> None:
    agent, controller = ReliableChannel(NODE, INCARNATION), ReliableChannel(NODE, INCARNATION)
    agent.say([WorkerFenced(0)])
    agent.packets(0.0)  # lost
    (heartbeat,) = agent.packets(1.0, heartbeat=True)
    assert controller.receive(heartbeat, 1.0) == ()
    (answer,) = controller.packets(1.0)
    assert answer == Packet(NODE, INCARNATION, 0, 0, (), misses=True)
    assert controller.packets(1.0) == []
    agent.receive(answer, 1.0)
    (again,) = agent.packets(1.0)
    assert controller.receive(again, 1.0) == (WorkerFenced(0),)


def test_a_heartbeat_that_meets_an_order_on_the_way_does_not_bring_it_again() -> None:
    agent, controller = ReliableChannel(NODE, INCARNATION), ReliableChannel(NODE, INCARNATION)
    (heartbeat,) = agent.packets(0.0, heartbeat=True)
    controller.say([WorkerFenced(0)])
    (order,) = controller.packets(0.0)
    controller.receive(heartbeat, 0.1)
    assert controller.packets(0.1) == []
    assert agent.receive(order, 0.1) == (WorkerFenced(0),)


def test_a_heartbeat_that_comes_too_late_for_that_brings_the_order_again() -> None:
    agent, controller = ReliableChannel(NODE, INCARNATION), ReliableChannel(NODE, INCARNATION)
    controller.say([WorkerFenced(0)])
    (order,) = controller.packets(0.0)  # lost
    controller.receive(agent.packets(0.0, heartbeat=True)[0], CROSSING_S * 0.9)
    assert controller.packets(CROSSING_S * 0.9) == []
    controller.receive(agent.packets(0.0, heartbeat=True)[0], CROSSING_S)
    assert controller.packets(CROSSING_S) == [order]


def test_a_gap_waits_for_what_is_missing() -> None:
    end = ReliableChannel(NODE, INCARNATION)
    assert end.receive(packet(2, 0, 2, 3), 0.0) == ()
    assert end.receive(packet(0, 0, 0, 1, 2), 0.0) == (WorkerFenced(0), WorkerFenced(1), WorkerFenced(2))
    assert end.receive(packet(2, 0, 2, 3), 0.0) == (WorkerFenced(3),)


def test_a_long_silence_ends_in_several_packets() -> None:
    end = ReliableChannel(NODE, INCARNATION)
    end.say(WorkerFenced(number) for number in range(2 * MAX_MESSAGES + 1))
    sizes = [(each.first, len(each.messages)) for each in end.packets(0.0)]
    assert sizes == [(0, MAX_MESSAGES), (MAX_MESSAGES, MAX_MESSAGES), (2 * MAX_MESSAGES, 1)]


@pytest.mark.parametrize("bad", [packet(0, 2), packet(-1, 0, 5)])
def test_numbers_that_cannot_be_are_refused(bad: Packet) -> None:
    end = ReliableChannel(NODE, INCARNATION)
    end.say([WorkerFenced(0)])
    with pytest.raises(RemoteProtocolError, match=r"of which 1 were said"):
        end.receive(bad, 0.0)
    assert end.packets(0.0) == [packet(0, 0, 0)]


def test_a_journal_says_where_the_other_end_is() -> None:
    end = ReliableChannel(NODE, INCARNATION)
    end.resume_at(2)
    assert end.received == 2
    assert end.receive(packet(1, 0, 1, 2), 0.0) == (WorkerFenced(2),)
