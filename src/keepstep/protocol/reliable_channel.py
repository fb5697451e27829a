"""One end of a reliable channel between an agent and the controller, over connections that may break.

A message arrives exactly once and in order, or not at all. Messages are numbered. The receiver drops duplicates, and
messages after a gap, which the sender sends again. So the machines above see neither loss nor duplicates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import AgentOrder, Packet, Report

RESEND_S = 2.5
"""A message without an acknowledgement is sent again after so long. Normally a message is lost only together with its
connection, and after a new connection the channel sends again at once (`reconnected`). The timeout is for a connection
that stays open but has lost something. It is two and a half heartbeats: a message without an answer is acknowledged
with the next heartbeat, because a packet for each acknowledgement would double the packets of the controller."""
CROSSING_S = 0.5
"""If a packet does not acknowledge a message that was sent so long ago, the message counts as lost. A packet that
arrives sooner may have crossed the message on the way. On a slower connection, some messages are sent twice."""
MAX_MESSAGES = 1024
"""Most messages in one packet, so that the frame after a long silence stays below the limit of the transport."""

Spoken = Report | AgentOrder


class ReliableChannel:
    """One end of a channel, for one incarnation of a node's agent."""

    def __init__(self, node: str, incarnation: int) -> None:
        self.node = node
        self.incarnation = incarnation
        self._unheard: deque[Spoken] = deque()
        """Messages that are not acknowledged yet. The first has the number ``_acknowledged``."""
        self._acknowledged = 0
        self._transmitted = 0
        """Number of the next message to put in a packet. A loss or a new connection resets it to ``_acknowledged``."""
        self._received = 0
        self._patient_since_s: float | None = None
        """The last time at which messages were sent, or some of them acknowledged; None if none wait for that."""
        self._owes_news = False
        """Whether messages have arrived that no sent packet has acknowledged yet."""
        self._owes_answer = False
        """Whether the other end needs that acknowledgement at once: it repeats messages that have arrived, or asks."""
        self._misses = False
        """Whether a message has arrived after a gap, and no packet has reported that yet."""

    @property
    def received(self) -> int:
        """How many messages of the other end have arrived without a gap."""
        return self._received

    @property
    def is_heard(self) -> bool:
        """Whether the other end has acknowledged all messages."""
        return not self._unheard

    @property
    def is_due(self) -> bool:
        """Whether `packets` has something to send, apart from repetitions after `RESEND_S`."""
        is_waiting = self._transmitted - self._acknowledged < len(self._unheard)
        return is_waiting or self._owes_answer or self._misses

    def say(self, messages: Iterable[Spoken]) -> None:
        """Queues messages for the other end."""
        self._unheard.extend(messages)

    def receive(self, packet: Packet, now_s: float) -> tuple[Spoken, ...]:
        """Processes a packet, and returns its messages that are new and in order.

        The caller must pass packets of this incarnation only.

        Raises:
            RemoteProtocolError: the packet's numbers are impossible. The channel has not changed.
        """
        num_skipped = self.accept(packet.first, packet.received, len(packet.messages), now_s, misses=packet.misses)
        return packet.messages[num_skipped:]

    def accept(self, first: int, received: int, num_messages: int, now_s: float, *, misses: bool = False) -> int:
        """Processes a packet by its numbers alone; see `Packet` and `receive`.

        Returns:
            how many messages at the front of the packet to skip: those that arrived before, or all if there is a gap.
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
            return num_messages  # earlier messages are missing; the other end sends them again together with these
        if num_skipped == 0 < num_messages:  # the common case
            self._owes_news = True
            self._received += num_messages
            return 0
        num_skipped = min(num_skipped, num_messages)
        self._owes_answer = self._owes_answer or num_skipped > 0 or (self._owes_news and not num_messages)
        self._owes_news = self._owes_news or num_skipped < num_messages
        self._received += num_messages - num_skipped
        return num_skipped

    def heard(self, received: int, now_s: float) -> None:
        """Records that the other end has received so many messages. A number from an older packet changes nothing."""
        if received <= self._acknowledged:
            return
        for _ in range(received - self._acknowledged):
            self._unheard.popleft()
        self._acknowledged = received
        self._transmitted = max(self._transmitted, received)
        self._patient_since_s = now_s if self._unheard else None

    def reconnected(self) -> None:
        """Records a new connection. `packets` repeats unacknowledged messages, which the old one may have lost."""
        self._transmitted = self._acknowledged

    def resume_at(self, received: int) -> None:
        """Records how many messages of the other end the journal contains."""
        self._received = received

    def single(self, now_s: float) -> tuple[int, Spoken] | None:
        """Returns the number of the only message to send now, and the message, and counts it as sent.

        Returns None, and changes nothing, unless exactly one message is to be sent: then call `packets`.
        """
        since_s, num_waiting = self._patient_since_s, len(self._unheard) - (self._transmitted - self._acknowledged)
        if num_waiting != 1 or self._misses or (since_s is not None and since_s <= now_s - RESEND_S):
            return None
        first = self._transmitted
        self._transmitted += 1
        self._patient_since_s = now_s
        self._owes_answer = self._owes_news = False
        return first, self._unheard[-1]

    def packets(self, now_s: float, *, heartbeat: bool = False) -> list[Packet]:
        """Returns the packets to send now: with new messages, and with messages not acknowledged in time.

        Args:
            now_s: the present time in seconds.
            heartbeat: return a packet even if there is no message to send.
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
        """Whether messages wait for an acknowledgement, and nothing was sent or acknowledged since then."""
        return self._patient_since_s is not None and self._patient_since_s <= at_s
