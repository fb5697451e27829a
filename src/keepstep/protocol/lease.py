"""The lease of a run: which controller serves the run, when another may take over, and when the first must be silent.

A run has one lease. The store (a folder, a database) needs only one operation, a compare-and-swap: *replace this lease
by another if it is still there*. The *holder* renews its lease by incrementing the lease's count. A *candidate* watches
the lease with its own clock. When the lease has not changed for the time that is written in it, the candidate takes it,
with the next term. The protocol never compares two clocks, only durations. It is safe for three reasons:

* A holder measures from before it *began* a renewal, a candidate from after it *saw* it. So the holder's time ends
  first, as long as the two clocks do not differ in speed by more than `TRUSTED` allows.
* If a candidate has seen an old lease, late or from a cache, its replacement fails: it has to look again.
* A holder whose time is over must renew the lease before it transmits. Either it still holds the lease, or the renewal
  fails.
"""

from __future__ import annotations

import dataclasses
import re

HOLD_S = 5.0
"""A controller counts as dead when its lease has not changed for so long. Longer than the four seconds after which an
agent closes a silent connection, so that packets of the former controller can no longer arrive."""
TRUSTED = 0.8
"""The share of that time during which the holder itself relies on its lease. The rest covers clocks of different speed,
which need 1e-4 of it, and packets on their way."""
RENEWALS = 5
"""Number of renewals in the time of one lease, so that a few may fail."""
FREE_HOLDER = "free"
_NAME = re.compile(r"([0-9]{1,12})\.([0-9]{1,12})\.([0-9]{1,9})\.([a-z0-9]{1,32})\.lease")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Lease:
    """A lease as the store holds it. Of two leases, the greater is the newer."""

    term: int
    """Number of the term: one more each time that a controller takes the lease."""
    count: int
    """How often the lease was renewed in this term."""
    hold_ms: int
    """After this time without a change, in milliseconds, another controller may take the lease. The holder sets it."""
    holder: str
    """A random name that the holder has chosen for itself."""

    @property
    def is_free(self) -> bool:
        """Whether no controller holds the lease: it was released, or never taken."""
        return self.holder == FREE_HOLDER

    @property
    def name(self) -> str:
        """The name of the lease in the store."""
        return f"{self.term}.{self.count}.{self.hold_ms}.{self.holder}.lease"

    @staticmethod
    def parse(name: str) -> Lease | None:
        """Returns the lease with this name; None if the name is not that of a lease."""
        if (found := _NAME.fullmatch(name)) is None:
            return None
        term, count, hold_ms, holder = found.groups()
        return Lease(int(term), int(count), int(hold_ms), holder)


FIRST = Lease(0, 0, 0, FREE_HOLDER)
"""The lease of a run that no controller has served yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """An order to the store: replace the lease ``old`` by ``new``, if ``old`` is still there."""

    old: Lease
    new: Lease
    begun_s: float
    """When the replacement began, on the clock of the controller that makes it."""


class Candidate:
    """A controller that waits for the lease, and watches it."""

    def __init__(self, holder: str, hold_s: float) -> None:
        """Args:
        holder: the controller's name, which no other controller has.
        hold_s: once this controller holds the lease, another may take it after so long without a renewal, in seconds.
        """
        self.holder = holder
        self.hold_ms = round(1000 * hold_s)
        self.seen: Lease | None = None
        self.num_changes = 0
        """How many changes this controller has seen. Above 0, another controller renews the lease."""
        self._since_s = 0.0

    def observe(self, lease: Lease, now_s: float) -> None:
        """Records the lease in the store. The caller must read ``now_s`` after the store has answered."""
        if lease != self.seen:
            self.num_changes += self.seen is not None
            self.seen, self._since_s = lease, now_s

    def unchanged_s(self, now_s: float) -> float:
        """Returns for how many seconds this controller has seen the lease unchanged."""
        return now_s - self._since_s if self.seen is not None else 0.0

    def claim(self, now_s: float, *, is_gone: bool = False) -> Replace | None:
        """Returns the replacement with which to take the lease; None if that is not allowed yet.

        Args:
            now_s: the present time on this controller's clock.
            is_gone: whether the holder's process is known to have ended.
        """
        if self.seen is None:
            return None
        if is_gone or self.seen.is_free or self.unchanged_s(now_s) >= self.seen.hold_ms / 1000:
            return Replace(self.seen, Lease(self.seen.term + 1, 0, self.hold_ms, self.holder), now_s)
        return None


class Holder:
    """A controller that has taken the lease."""

    def __init__(self, claim: Replace) -> None:
        """Args:
        claim: the replacement with which it has taken the lease.
        """
        self.lease = claim.new
        self._hold_s = claim.new.hold_ms / 1000
        self._renewed_s = claim.begun_s

    def renewal(self, now_s: float) -> Replace:
        """Returns the replacement that renews the lease. The caller must read ``now_s`` before it calls the store."""
        return Replace(self.lease, dataclasses.replace(self.lease, count=self.lease.count + 1), now_s)

    def renewed(self, renewal: Replace) -> None:
        """Records that the store has carried out the renewal."""
        self.lease, self._renewed_s = renewal.new, renewal.begun_s

    def may_transmit(self, now_s: float) -> bool:
        """Returns whether no other controller can have taken the lease yet."""
        return now_s < self._renewed_s + self._hold_s * TRUSTED

    @property
    def renew_every_s(self) -> float:
        """The renewal interval, in seconds."""
        return self._hold_s / RENEWALS

    def release(self) -> Replace:
        """Returns the replacement that frees the lease, so that the next controller need not wait."""
        return Replace(self.lease, Lease(self.lease.term, self.lease.count + 1, 0, FREE_HOLDER), self._renewed_s)
