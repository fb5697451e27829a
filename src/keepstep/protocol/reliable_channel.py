"""One end of a reliable channel between an agent and the controller, over connections that may break and come back.

What is said arrives exactly once and in order, or not at all: messages are numbered, what came twice is dropped, what
came too early is dropped as well and comes again. So the machines above need to think of neither loss nor repetition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import AgentOrder, Packet, Report

RESEND_S = 2.5
"""A message is lost only together with its connection, and who opens a new one sends at once (`reconnected`); this
is for a connection that goes on but swallowed something. Two heartbeats and a half: what nothing is said in answer to
is acknowledged with the next heartbeat, for a packet of its own would double what a controller has to send."""
CROSSING_S = 0.5
"""What takes so long to arrive is lost: a packet that does not acknowledge a message and comes sooner may have met it
on the way. Over a connection that takes longer to answer, messages come twice now and then."""
MAX_MESSAGES = 1024
"""In one packet: a long silence must not end in a frame beyond the size that is accepted."""

Spoken = Report | AgentOrder


class ReliableChannel:
    """One end, for one incarnation of a node's agent."""

    def __init__(self, node: str, incarnation: int) -> None:
        self.node = node
        self.incarnation = incarnation
        self._unheard: deque[Spoken] = deque()
        """Said, and not yet acknowledged; the first has the number ``_acknowledged``."""
        self._acknowledged = 0
        self._transmitted = 0
        """How many were put into a packet since they were said, or since the connection came back."""
        self._received = 0
        self._patient_since_s: float | None = None
        """When something was transmitted last of which not all is acknowledged yet, or some of that was."""
        self._owes_news = False
        """Something has arrived that nothing transmitted since acknowledges."""
        self._owes_answer = False
        """The other end waits for that, and transmits for nothing what has arrived."""
        self._misses = False
        """Something has arrived beyond a gap, and the other end has not been told."""

    @property
    def received(self) -> int:
        """How many messages of the other end have arrived."""
        return self._received

    @property
    def is_heard(self) -> bool:
        """Whether the other end has heard all that was said."""
        return not self._unheard

    def say(self, messages: Iterable[Spoken]) -> None:
        """Adds messages to what the other end must come to hear."""
        self._unheard.extend(messages)

    def receive(self, packet: Packet, now_s: float) -> tuple[Spoken, ...]:
        """The messages of a packet that are new and in order.

        A packet of another incarnation must not come here: the owner of the channels picks by `incarnation`.

        Raises:
            RemoteProtocolError: its numbers cannot be; nothing has changed.
        """
        if packet.first < 0 or packet.received > self._acknowledged + len(self._unheard):
            raise RemoteProtocolError(
                f"node {packet.node}: a packet acknowledges {packet.received} messages, of which "
                f"{self._acknowledged + len(self._unheard)} were said, and begins with number {packet.first}"
            )
        self.heard(packet.received, now_s)
        if packet.misses or self._is_waiting_since(now_s - CROSSING_S):
            self._transmitted = self._acknowledged
        skip = self._received - packet.first
        if skip < 0:
            self._misses = True
            return ()  # some before it are missing, and will come again together with these
        new = packet.messages[skip:]
        came_before = len(new) < len(packet.messages)
        self._owes_answer = self._owes_answer or came_before or (self._owes_news and not packet.messages)
        self._owes_news = self._owes_news or bool(new)
        self._received += len(new)
        return new

    def heard(self, received: int, now_s: float) -> None:
        """The other end has received so many messages; what an older packet says of it changes nothing."""
        if received <= self._acknowledged:
            return
        for _ in range(received - self._acknowledged):
            self._unheard.popleft()
        self._acknowledged = received
        self._transmitted = max(self._transmitted, received)
        self._patient_since_s = now_s if self._unheard else None

    def reconnected(self) -> None:
        """A new connection: what was not acknowledged may have been lost with the old one."""
        self._transmitted = self._acknowledged

    def resume_at(self, received: int) -> None:
        """The other end's messages up to this number are known, from a journal."""
        self._received = received

    def packets(self, now_s: float, *, heartbeat: bool = False) -> list[Packet]:
        """What is to be transmitted now: what was not yet, or was and got no answer in time.

        Args:
            now_s: the present time in seconds.
            heartbeat: transmit a packet even if there is nothing to say.
        """
        if self._is_waiting_since(now_s - RESEND_S):
            self._transmitted = self._acknowledged
        has_to_speak = heartbeat or self._owes_answer or self._misses
        if self._transmitted - self._acknowledged == len(self._unheard) and not has_to_speak:
            return []
        waiting = list(self._unheard)[self._transmitted - self._acknowledged :]
        chunks = [tuple(waiting[at : at + MAX_MESSAGES]) for at in range(0, len(waiting), MAX_MESSAGES)]
        packets = []
        for chunk in chunks or [()]:
            packets.append(Packet(self.node, self.incarnation, self._transmitted, self._received, chunk, self._misses))
            self._transmitted += len(chunk)
            self._misses = False
        if waiting:
            self._patient_since_s = now_s
        self._owes_answer = self._owes_news = False
        return packets

    def _is_waiting_since(self, at_s: float) -> bool:
        """Whether nothing was transmitted anew and nothing acknowledged since then, though something should be."""
        return self._patient_since_s is not None and self._patient_since_s <= at_s
