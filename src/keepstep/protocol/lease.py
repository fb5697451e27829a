"""The lease of a run: which controller serves it, when another one may take its place, and when the first is silent.

There is one lease to a run. The controller that can replace it by a later one holds it: a store (a folder, a database)
has to offer nothing but *replace this lease if it is still there*, whole or not at all. A holder renews its lease by
counting it up. One that waits watches it with its own clock, and takes it when it has not changed for as long as it
says itself: then the term is one greater. No two clocks are ever compared, only how long a second takes on them. That
is safe because of three things:

* A holder counts from before it *began* a renewal, one that waits from after it *saw* it. So the holder's time is over
  first, as long as one clock does not run faster than the other by what `TRUSTED` leaves.
* What one that waits has seen late, or from a cache, cannot be replaced any more: it has to look again.
* A holder whose time is over asks before it transmits, by a renewal: either it still holds the lease, or it learns that
  it does not.
"""

from __future__ import annotations

import dataclasses
import re

HOLD_S = 5.0
"""A controller whose lease has not changed for so long has died. Longer than the four seconds after which an agent
gives up a connection on which nothing comes, so that what the former one had under way is gone by then."""
TRUSTED = 0.8
"""The share of that time during which the holder itself relies on its lease. The rest is for clocks that do not run
alike, which takes 1e-4 of it, and for what is on its way."""
RENEWALS = 5
"""In the time of one lease: a few may fail, and it still holds."""
FREE_HOLDER = "free"
_NAME = re.compile(r"([0-9]{1,12})\.([0-9]{1,12})\.([0-9]{1,9})\.([a-z0-9]{1,32})\.lease")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Lease:
    """What the store holds: of two, the greater is the newer."""

    term: int
    """Number of the holder: one more at each that takes it."""
    count: int
    """How often it was renewed in this term."""
    hold_ms: int
    """It may be taken when it has not changed for so long. Its holder says so, for it relies on it."""
    holder: str
    """Made up at random by the holder, for itself alone."""

    @property
    def is_free(self) -> bool:
        """No controller holds it: it was given back, or has not been taken yet."""
        return self.holder == FREE_HOLDER

    @property
    def name(self) -> str:
        """As it is called in the store."""
        return f"{self.term}.{self.count}.{self.hold_ms}.{self.holder}.lease"

    @staticmethod
    def parse(name: str) -> Lease | None:
        """The lease of that name; None if it is the name of something else."""
        if (found := _NAME.fullmatch(name)) is None:
            return None
        term, count, hold_ms, holder = found.groups()
        return Lease(int(term), int(count), int(hold_ms), holder)


FIRST = Lease(0, 0, 0, FREE_HOLDER)
"""The lease of a run that no controller has served yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """An order to the store: one lease in place of another, if that is still there."""

    old: Lease
    new: Lease
    begun_s: float
    """When, on the clock of the store."""


class Candidate:
    """Who would hold the lease, and watches it."""

    def __init__(self, holder: str, hold_s: float) -> None:
        """Args:
        holder: its name, which no other controller has.
        hold_s: how long the lease must not have changed for another one to take it from this one.
        """
        self.holder = holder
        self.hold_ms = round(1000 * hold_s)
        self.seen: Lease | None = None
        self.num_changes = 0
        """How often it was seen to have changed: a controller renews it."""
        self._since_s = 0.0

    def observe(self, lease: Lease, now_s: float) -> None:
        """This is what the store held. ``now_s``: read after the store had answered."""
        if lease != self.seen:
            self.num_changes += self.seen is not None
            self.seen, self._since_s = lease, now_s

    def unchanged_s(self, now_s: float) -> float:
        """For how long the lease has been seen as it is."""
        return now_s - self._since_s if self.seen is not None else 0.0

    def claim(self, now_s: float, *, is_gone: bool = False) -> Replace | None:
        """How to take it, where that is allowed.

        Args:
            now_s: the present time on this one's clock.
            is_gone: the process that holds it is known to have ended.
        """
        if self.seen is None:
            return None
        if is_gone or self.seen.is_free or self.unchanged_s(now_s) >= self.seen.hold_ms / 1000:
            return Replace(self.seen, Lease(self.seen.term + 1, 0, self.hold_ms, self.holder), now_s)
        return None


class Holder:
    """Who has taken the lease."""

    def __init__(self, claim: Replace) -> None:
        """Args:
        claim: with which it was taken.
        """
        self.lease = claim.new
        self._hold_s = claim.new.hold_ms / 1000
        self._renewed_s = claim.begun_s

    def renewal(self, now_s: float) -> Replace:
        """How to renew it. ``now_s``: read before the store is asked."""
        return Replace(self.lease, dataclasses.replace(self.lease, count=self.lease.count + 1), now_s)

    def renewed(self, renewal: Replace) -> None:
        """The store has done so."""
        self.lease, self._renewed_s = renewal.new, renewal.begun_s

    def may_transmit(self, now_s: float) -> bool:
        """Whether no other controller can have taken it yet."""
        return now_s < self._renewed_s + self._hold_s * TRUSTED

    @property
    def renew_every_s(self) -> float:
        """The renewal interval."""
        return self._hold_s / RENEWALS

    def release(self) -> Replace:
        """How to give it back: then no controller has to wait."""
        return Replace(self.lease, Lease(self.lease.term, self.lease.count + 1, 0, FREE_HOLDER), self._renewed_s)
