"""The coordinator's machine: one update, from the first offer to its end.

An update ends in one of two ways, the same on every device: *committed*, when each device has reported that it is
prepared, or *aborted*, with the process at fault. The machine knows nothing of a consumer that fails: its device
continues without it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias, assert_never

from keepstep.errors import ConfigurationError
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.layout import Consumer, HeldPart, Layout, lay_out
from keepstep.protocol.transfer.plan import Limits


class UpdateStage(enum.StrEnum):
    """The stages of an update."""

    OFFERING = "offering"
    MOVING = "moving"
    COMMITTED = "committed"
    ABORTED = "aborted"


class SubscriberStanding(enum.Enum):
    """Whether an offer is for this update, an earlier one, or a later one."""

    JOINS = enum.auto()
    IS_PAST = enum.auto()
    """The device is behind: the update that it offers is over."""
    IS_AHEAD = enum.auto()
    """The device has given up this update, and offers a later one."""


Report: TypeAlias = msg.UpdateOffered | msg.MovementSeen | msg.StillThere | msg.DevicePrepared | msg.DeviceFailed
Verdict: TypeAlias = msg.UpdateAgreed | msg.VersionCommitted | msg.UpdateAborted
"""Messages to every device."""


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """The terms of an update, set by its coordinator.

    Attributes:
        version: version of the weights.
        generation: generation of the membership.
        world_size: number of devices.
        limits: the sizes of buckets.
        deadline_s: how long a device may show no movement, in seconds.
    """

    version: int
    generation: int
    world_size: int
    limits: Limits
    deadline_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """A layout with the offers from which it was made."""

    held: tuple[tuple[HeldPart, ...], ...]
    consumers: tuple[tuple[Consumer, ...], ...]
    layout: Layout


class UpdateMachine:
    """The coordinator's machine for one update. Not thread-safe.

    The caller must send every returned verdict to all devices, in order.
    """

    def __init__(self, terms: Terms, now_s: float, former: Agreement | None = None) -> None:
        """Args:
        terms: terms of the update.
        now_s: the present time.
        former: the agreement of the last update. The machine uses it again if all devices offer the same as then.
        """
        self.terms = terms
        self.stage = UpdateStage.OFFERING
        self.agreement = former
        self._update = 0
        self._offers: dict[int, msg.UpdateOffered] = {}
        self._prepared: set[int] = set()
        self._moved_s = dict.fromkeys(range(terms.world_size), now_s)
        self._heard_s = dict(self._moved_s)

    @property
    def is_over(self) -> bool:
        """Whether the update is committed or aborted."""
        return self.stage in (UpdateStage.COMMITTED, UpdateStage.ABORTED)

    @property
    def deadline_s(self) -> float:
        """When `tick` aborts the update, unless a report arrives before."""
        return min((self._moved_s[rank] for rank in self._awaited()), default=0.0) + self.terms.deadline_s

    def receive(self, rank: int, report: Report, now_s: float) -> list[Verdict]:
        """Processes a device's report. Ignores a report that does not fit the stage or the number of the update.

        The caller must pass only offers that join; for the others see `standing_of`, `past` and `ahead`.
        """
        if self.is_over or rank not in self._moved_s:
            return []
        self._heard_s[rank] = now_s
        if isinstance(report, msg.UpdateOffered):
            self._moved_s[rank] = now_s
            return self._offered(rank, report, now_s)
        if isinstance(report, msg.StillThere):
            return []
        is_failure_before = isinstance(report, msg.DeviceFailed) and report.update == 0 and rank in self._offers
        if not is_failure_before and (self.stage is not UpdateStage.MOVING or report.update != self._update):
            return []
        self._moved_s[rank] = now_s
        match report:
            case msg.MovementSeen():
                return []
            case msg.DevicePrepared():
                self._prepared.add(rank)
                if len(self._prepared) < self.terms.world_size:
                    return []
                self.stage = UpdateStage.COMMITTED
                return [msg.VersionCommitted(self._update, self.terms.version)]
            case msg.DeviceFailed() if report.stalled:
                return self.abort(*(self._most_silent(now_s) or (report.culprit, report.reason)))
            case msg.DeviceFailed():
                return self.abort(report.culprit, report.reason)
            case _:
                assert_never(report)

    def standing_of(self, offer: msg.UpdateOffered) -> SubscriberStanding:
        """Returns whether an offer is for this update. Generations and versions ascend."""
        offered, wanted = (offer.generation, offer.version), (self.terms.generation, self.terms.version)
        if offered == wanted:
            return SubscriberStanding.JOINS
        return SubscriberStanding.IS_PAST if offered < wanted else SubscriberStanding.IS_AHEAD

    def past(self, offer: msg.UpdateOffered) -> msg.UpdateAborted:
        """Returns the answer to a device that is behind. Send it to that device only."""
        return msg.UpdateAborted(0, msg.TransferFault.STALE, f"rank {offer.rank}", self._differs(offer))

    def ahead(self, offer: msg.UpdateOffered) -> list[Verdict]:
        """Aborts the update, because a device has gone on to a later one. The caller keeps its offer for that one."""
        return [] if self.is_over else self.abort(f"rank {offer.rank}", self._differs(offer), msg.TransferFault.STALE)

    def lost(self, rank: int, reason: str) -> list[Verdict]:
        """Records that the connection to a device has ended. Before the update is agreed, the rank may connect again.

        Later, the update is aborted.
        """
        if self.stage is UpdateStage.OFFERING:
            self._offers.pop(rank, None)
            return []
        return [] if self.is_over else self.abort(f"rank {rank}", reason)

    def tick(self, now_s: float) -> list[Verdict]:
        """Aborts the update if a device has missed the deadline; else does nothing."""
        if self.is_over or now_s < self.deadline_s:
            return []
        late = [rank for rank in self._awaited() if now_s >= self._moved_s[rank] + self.terms.deadline_s]
        late = [rank for rank in late if self._is_silent(rank, now_s)] or late
        culprit = f"rank {late[0]}" if len(late) == 1 else f"ranks {late}"
        what = "did not offer this version" if self.stage is UpdateStage.OFFERING else "has shown no movement"
        return self.abort(culprit, f"{what} within {self.terms.deadline_s:g} s")

    def _is_silent(self, rank: int, now_s: float) -> bool:
        """Whether a device has sent nothing for half the deadline. Devices that only wait send signs of life."""
        return self.stage is UpdateStage.MOVING and now_s >= self._heard_s[rank] + self.terms.deadline_s / 2

    def _most_silent(self, now_s: float) -> tuple[str, str] | None:
        """Returns the device that has been silent for longest, and the reason; None if none is silent.

        A device that hangs makes others wait, and these then blame each other.
        """
        rank = min(self._heard_s, key=self._heard_s.__getitem__)
        if not self._is_silent(rank, now_s):
            return None
        return f"rank {rank}", f"has said nothing for {now_s - self._heard_s[rank]:.1f} s"

    def abort(self, culprit: str, reason: str, fault: msg.TransferFault = msg.TransferFault.LOST) -> list[Verdict]:
        """Aborts the update."""
        self.stage = UpdateStage.ABORTED
        return [msg.UpdateAborted(self._update, fault, culprit, reason)]

    def _awaited(self) -> list[int]:
        """Returns the devices whose offer, or later whose report, is missing."""
        done = self._offers if self.stage is UpdateStage.OFFERING else self._prepared
        return [rank for rank in range(self.terms.world_size) if rank not in done]

    def _differs(self, offer: msg.UpdateOffered) -> str:
        if offer.generation != self.terms.generation:
            return f"it is of generation {offer.generation}, rank 0 of {self.terms.generation}"
        return f"it publishes version {offer.version}, rank 0 publishes {self.terms.version}"

    def _offered(self, rank: int, offer: msg.UpdateOffered, now_s: float) -> list[Verdict]:
        terms = self.terms
        if self.stage is not UpdateStage.OFFERING:
            return self.abort(f"rank {rank}", "it has started over")
        self._offers[rank] = offer
        if len(self._offers) < terms.world_size:
            return []
        offers = [self._offers[each] for each in range(terms.world_size)]
        try:
            layout = self._layout_of(offers)
        except ConfigurationError as error:
            return self.abort("the layout", str(error), msg.TransferFault.LAYOUT)
        self.stage = UpdateStage.MOVING
        self._update = 1 + max(each.last_update for each in offers)
        self._moved_s = dict.fromkeys(self._moved_s, now_s)
        self._heard_s = dict(self._moved_s)
        holds = tuple(held for each in offers for held in _holds(each))
        return [msg.UpdateAgreed(self._update, terms.version, terms.generation, layout, holds)]

    def _layout_of(self, offers: list[msg.UpdateOffered]) -> Layout:
        held = tuple(each.held for each in offers)
        consumers = tuple(each.consumers for each in offers)
        former = self.agreement
        if former is None or (former.held, former.consumers) != (held, consumers):
            self.agreement = Agreement(held, consumers, lay_out(held, consumers, self.terms.limits))
        assert self.agreement is not None
        return self.agreement.layout


def _holds(offer: msg.UpdateOffered) -> tuple[int | None, ...]:
    """Returns the version that each consumer keeps; None for all if the offer does not have a value for each."""
    return offer.holds if len(offer.holds) == len(offer.consumers) else (None,) * len(offer.consumers)
