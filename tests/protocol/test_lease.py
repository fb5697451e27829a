"""The lease of a run: two controllers never speak at the same time, whatever stands still, is late or is cached."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol import lease
from keepstep.protocol.lease import FIRST, Candidate, Holder, Lease, Replace

HOLD_S = 5.0


def held(now_s: float = 100.0) -> Holder:
    """A lease that was taken just now."""
    candidate = Candidate("a", HOLD_S)
    candidate.observe(FIRST, now_s)
    claim = candidate.claim(now_s)
    assert claim is not None
    return Holder(claim)


@given(st.builds(Lease, *[st.integers(0, 10**9 - 1)] * 3, st.text("abcdef0123456789", min_size=1, max_size=16)))
def test_a_name_says_everything(each: Lease) -> None:
    assert Lease.parse(each.name) == each


@pytest.mark.parametrize("name", ["", "lease", "a.json", "1.2.3.lease", "1.2.3.a.lease.draft", "1.2.-3.a.lease"])
def test_other_names_are_no_leases(name: str) -> None:
    assert Lease.parse(name) is None


def test_a_free_lease_is_taken_at_once() -> None:
    candidate = Candidate("a", HOLD_S)
    assert candidate.claim(0.0) is None, "nothing was seen yet"
    candidate.observe(FIRST, 0.0)
    assert candidate.claim(0.0) == Replace(FIRST, Lease(1, 0, 5000, "a"), 0.0)


def test_a_lease_is_taken_when_it_has_not_changed_for_as_long_as_its_holder_said() -> None:
    candidate = Candidate("b", 60.0)
    seen = Lease(3, 7, 5000, "a")
    candidate.observe(seen, 10.0)
    candidate.observe(seen, 14.9)
    assert candidate.claim(14.9) is None
    assert candidate.claim(14.9, is_gone=True) == Replace(seen, Lease(4, 0, 60_000, "b"), 14.9)
    assert candidate.claim(15.0) == Replace(seen, Lease(4, 0, 60_000, "b"), 15.0)
    candidate.observe(dataclasses.replace(seen, count=8), 15.0)
    assert candidate.num_changes == 1
    assert candidate.claim(19.9) is None


def test_a_holder_may_speak_until_its_time_is_over_and_again_after_a_renewal() -> None:
    holder = held(100.0)
    assert holder.may_transmit(103.9)
    assert not holder.may_transmit(104.0)
    renewal = holder.renewal(110.0)
    assert renewal == Replace(Lease(1, 0, 5000, "a"), Lease(1, 1, 5000, "a"), 110.0)
    assert not holder.may_transmit(110.0), "it was not carried out yet"
    holder.renewed(renewal)
    assert holder.may_transmit(113.9)
    assert not holder.may_transmit(114.0)


def test_what_is_given_back_is_free() -> None:
    release = held().release()
    assert release.old == Lease(1, 0, 5000, "a")
    assert release.new.is_free
    assert release.new.term == 1, "the next one has a greater term"


def test_a_few_renewals_may_fail() -> None:
    holder = held(0.0)
    assert holder.may_transmit(3 * holder.renew_every_s)


# ---- several controllers, a store, and clocks that do not agree ------------------------------------------------------


class TwoSpoke(AssertionError):
    """A controller transmitted although another one had taken its place."""


DRIFT = 0.1
"""Far more than clocks drift by; what `TRUSTED` leaves is enough for 0.11."""
assert (1 + DRIFT) / (1 - DRIFT) * lease.TRUSTED < 1


@dataclasses.dataclass
class Rules:
    """How a controller makes use of the machines; a mutant does it in another way."""

    observed_at_s: Callable[[float, float], float] = lambda asked_s, answered_s: answered_s
    renewed_at_s: Callable[[float, float], float] = lambda asked_s, answered_s: asked_s
    trusted: float = lease.TRUSTED
    always_speaks: bool = False
    is_blind: bool = False
    """The store replaces whatever is there."""
    waits_by_its_own: bool = False


class World:
    """Some controllers on machines of their own and one store, for a while of random delays and pauses."""

    def __init__(self, generator: random.Random, rules: Rules) -> None:
        self.random = generator
        self.rules = rules
        self.now_s = 0.0
        self.past: list[tuple[float, Lease]] = [(0.0, FIRST)]
        self.num_spoken = 0
        self._number = itertools.count()
        self._waiting: list[tuple[float, int, Iterator[float]]] = []
        for name in "abc":
            self._go_on(0.0, self.controller(name))

    @property
    def lease(self) -> Lease:
        """What the store holds."""
        return self.past[-1][1]

    def run(self) -> None:
        """Lives through it."""
        while self._waiting and self.now_s < 60 * HOLD_S:
            self.now_s, _, controller = heapq.heappop(self._waiting)
            if (pause_s := next(controller, None)) is not None:
                self._go_on(pause_s, controller)

    def _go_on(self, pause_s: float, controller: Iterator[float]) -> None:
        heapq.heappush(self._waiting, (self.now_s + pause_s, next(self._number), controller))

    def delay(self) -> float:
        """Mostly nothing much, sometimes about as long as a lease lasts."""
        return self.random.choice([0.001, 0.05, 0.3, self.random.uniform(0.0, 2 * HOLD_S)])

    def controller(self, name: str) -> Iterator[float]:
        """One that waits, serves for a while, and dies, steps down or gives the lease back; and then is back."""
        rate, offset_s = self.random.uniform(1 - DRIFT, 1 + DRIFT), self.random.uniform(-1e5, 1e5)

        def clock() -> float:
            return offset_s + rate * self.now_s

        while True:
            hold_s = HOLD_S * self.random.choice([0.5, 1.0, 2.0])
            candidate = Candidate(name + str(next(self._number)), hold_s)
            holder = yield from self.wait(candidate, clock)
            yield from self.serve(holder, clock)
            yield self.delay()

    def wait(self, candidate: Candidate, clock: Callable[[], float]) -> Iterator[float]:
        """Until it has the lease."""
        while True:
            asked_s = clock()
            yield self.delay()
            seen = self.seen()
            yield self.delay()
            if self.rules.waits_by_its_own:
                seen = dataclasses.replace(seen, hold_ms=0 if seen.is_free else candidate.hold_ms)
            candidate.observe(seen, self.rules.observed_at_s(asked_s, clock()))
            claim = candidate.claim(clock())
            if claim is not None and (yield from self.replace(claim)):
                return Holder(claim)
            yield self.random.uniform(0.1, 1.0)

    def serve(self, holder: Holder, clock: Callable[[], float]) -> Iterator[float]:
        """Until it dies, or has lost the lease."""
        while self.random.random() < 0.98:
            if self.random.random() < 0.02:
                yield from self.replace(holder.release())
                return
            if self.random.random() < 0.4:
                renewal = holder.renewal(clock())
                if not (yield from self.replace(renewal)):
                    return
                counts_s = self.rules.renewed_at_s(renewal.begun_s, clock())
                holder.renewed(dataclasses.replace(renewal, begun_s=counts_s))
            if self.rules.always_speaks or holder.may_transmit(clock()):
                self.num_spoken += 1
                if self.lease.term > holder.lease.term:
                    raise TwoSpoke(f"{holder.lease.name} speaks at {self.now_s:.3f} s, and {self.lease.name} is there")
            yield self.delay() / 3

    def seen(self) -> Lease:
        """What a look at the store shows: what is there, or what was, from a cache."""
        if self.random.random() < 0.7:
            return self.lease
        since_s = self.now_s - self.random.uniform(0.0, 2 * HOLD_S)
        return [each for at_s, each in self.past if at_s <= max(0.0, since_s)][-1]

    def replace(self, order: Replace) -> Iterator[float]:
        """Returns whether the store has replaced one by the other."""
        yield self.delay() / 3
        is_there = self.lease == order.old or (
            self.rules.waits_by_its_own and dataclasses.replace(self.lease, hold_ms=order.old.hold_ms) == order.old
        )
        if is_there or self.rules.is_blind:
            self.past.append((self.now_s, order.new))
        yield self.delay() / 3
        return is_there or self.rules.is_blind


NUM_WORLDS = 150


def live_through(seed: int, num_worlds: int, rules: Rules) -> list[World]:
    """Many worlds, up to the first in which two have spoken."""
    worlds = []
    for number in range(num_worlds):
        worlds.append(World(random.Random(f"{seed} {number}"), rules))
        worlds[-1].run()
    return worlds


def test_one_speaks_at_a_time(seed: int) -> None:
    worlds = live_through(seed, NUM_WORLDS, Rules())
    assert all(world.past == sorted(world.past) for world in worlds), "no lease is older than the one before"
    assert sum(world.num_spoken for world in worlds) > 10 * NUM_WORLDS
    assert sum(world.lease.term for world in worlds) > 5 * NUM_WORLDS


@pytest.mark.parametrize(
    "mutant",
    [
        Rules(observed_at_s=lambda asked_s, answered_s: asked_s),
        Rules(renewed_at_s=lambda asked_s, answered_s: answered_s),
        Rules(trusted=1.5),
        Rules(always_speaks=True),
        Rules(is_blind=True),
        Rules(waits_by_its_own=True),
    ],
    ids=["sees early", "renews late", "trusts too long", "speaks without it", "replaces what is there", "own time"],
)
def test_a_controller_that_breaks_a_rule_is_found_out(
    seed: int, mutant: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "TRUSTED", mutant.trusted)
    with pytest.raises(TwoSpoke):
        live_through(seed, 20 * NUM_WORLDS, mutant)


def test_what_has_lost_its_holder_is_taken(seed: int) -> None:
    """In the end a live controller holds it, and it did not take much longer than the lease lasts."""
    generator = random.Random(seed)
    dead = Lease(4, 2, 5000, "a")
    waiting = [Candidate(name, HOLD_S) for name in "bc"]
    store, now_s = dead, 0.0
    while store == dead:
        now_s += generator.uniform(0.1, 0.5)
        for candidate in waiting:
            candidate.observe(store, now_s)
            claim = candidate.claim(now_s)
            if claim is not None and claim.old == store:
                store = claim.new
        assert now_s < HOLD_S + 1.5
    assert store.term == 5
