"""One end of a reliable channel between an agent and the controller, over connections that may break.

A message arrives exactly once and in order, or not at all: messages are numbered, duplicates are dropped, and so are
messages that arrive too early, which are sent again. So the machines above see neither loss nor duplicates.
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

    @property
    def is_due(self) -> bool:
        """Whether `packets` has something to send, except for repetitions because nothing at all comes back."""
        is_waiting = self._transmitted - self._acknowledged < len(self._unheard)
        return is_waiting or self._owes_answer or self._misses

    def say(self, messages: Iterable[Spoken]) -> None:
        """Adds messages to what the other end must come to hear."""
        self._unheard.extend(messages)

    def receive(self, packet: Packet, now_s: float) -> tuple[Spoken, ...]:
        """The messages of a packet that are new and in order.

        A packet of another incarnation must not come here: the owner of the channels picks by `incarnation`.

        Raises:
            RemoteProtocolError: its numbers cannot be; nothing has changed.
        """
        num_skipped = self.accept(packet.first, packet.received, len(packet.messages), now_s, misses=packet.misses)
        return packet.messages[num_skipped:]

    def accept(self, first: int, received: int, num_messages: int, now_s: float, *, misses: bool = False) -> int:
        """Takes in a packet by its numbers; see `Packet` and `receive`.

        Returns:
            how many of its messages count for nothing, from the first on: those that came before, or all of them where
            some before them are missing.
        """
        num_heard = received - self._acknowledged
        if first < 0 or num_heard > len(self._unheard):
            raise RemoteProtocolError(
                f"node {self.node}: a packet acknowledges {received} messages, of which "
                f"{self._acknowledged + len(self._unheard)} were said, and begins with number {first}"
            )
        if num_heard > 0:
            self.heard(received, now_s)
        since_s = self._patient_since_s
        if misses or (since_s is not None and since_s <= now_s - CROSSING_S):
            self._transmitted = self._acknowledged
        num_skipped = self._received - first
        if num_skipped < 0:
            self._misses = True
            return num_messages  # some before it are missing, and will come again together with these
        if num_skipped == 0 < num_messages:  # mostly
            self._owes_news = True
            self._received += num_messages
            return 0
        num_skipped = min(num_skipped, num_messages)
        self._owes_answer = self._owes_answer or num_skipped > 0 or (self._owes_news and not num_messages)
        self._owes_news = self._owes_news or num_skipped < num_messages
        self._received += num_messages - num_skipped
        return num_skipped

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

    def single(self, now_s: float) -> tuple[int, Spoken] | None:
        """The one message that is to be transmitted now, with its number; None where `packets` has more to say."""
        since_s, num_waiting = self._patient_since_s, len(self._unheard) - (self._transmitted - self._acknowledged)
        if num_waiting != 1 or self._misses or (since_s is not None and since_s <= now_s - RESEND_S):
            return None
        first = self._transmitted
        self._transmitted += 1
        self._patient_since_s = now_s
        self._owes_answer = self._owes_news = False
        return first, self._unheard[-1]

    def packets(self, now_s: float, *, heartbeat: bool = False) -> list[Packet]:
        """What is to be transmitted now: what was not yet, or was and got no answer in time.

        Args:
            now_s: the present time in seconds.
            heartbeat: transmit a packet even if there is nothing to say.
        """
        if self._is_waiting_since(now_s - RESEND_S):
            self._transmitted = self._acknowledged
        num_known = self._transmitted - self._acknowledged
        if num_known == len(self._unheard) and not (heartbeat or self._owes_answer or self._misses):
            return []
        waiting = list(self._unheard)[num_known:]
        packets = []
        for at in range(0, len(waiting) or 1, MAX_MESSAGES):
            chunk = tuple(waiting[at : at + MAX_MESSAGES])
            packets.append(Packet(self.node, self.incarnation, self._transmitted, self._received, chunk, self._misses))
            self._transmitted += len(chunk)
            self._misses = False
        if waiting:
            self._patient_since_s = now_s
        self._owes_answer = self._owes_news = False
        return packets

    def _is_waiting_since(self, at_s: float) -> bool:
        """Whether nothing was retransmitted and nothing acknowledged since then, though something should be."""
        return self._patient_since_s is not None and self._patient_since_s <= at_s
