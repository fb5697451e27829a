"""Snapshots of a device that lags behind its host, with a twin of its streams; and what the driver is asked to pin."""

import mmap
import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from tests.worker.ranks import DEADLINE_S
from tests.worker.state.parts import content
from tests.worker.step.test_snapshots import RANK, Rank, memory

from keepstep.worker.step.side_copies import HostCopies, PinnedSlots, StreamCopies, Wait, side_copies

__all__ = ["memory"]


class TwinStream:
    """Does what was launched when a thread waits for it, and not before."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], object]] = []
        self.is_free = threading.Event()
        self.is_free.set()

    def mark(self) -> Wait:
        place = len(self.launched)

        def wait() -> None:
            assert self.is_free.wait(DEADLINE_S)
            for number in range(place):
                self.launched[number]()
                self.launched[number] = lambda: None

        return wait


class TwinCopies:
    """A device with a stream for the training thread and one for snapshots. Implements `SideCopies`."""

    chunk_bytes, num_ahead = 16, 2

    def __init__(self) -> None:
        self.current, self.side = TwinStream(), TwinStream()
        self.pinned: list[int] = []
        self.num_begun = 0

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        self.pinned.append(slot)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.current.launched.append(lambda: target.copy_(source))

    def mark(self, devices: Collection[torch.device]) -> Wait:
        return self.current.mark()

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        self.num_begun += 1
        self.side.launched.append(lambda: target.copy_(source))
        return self.side.mark()


def rank_with(twin: TwinCopies, memory: int) -> Rank:
    rank = Rank(memory)
    rank.snapshots._side = twin
    return rank


def test_an_update_is_not_begun_before_the_device_has_copied(memory: int) -> None:
    """The twin copies when it is waited for: an update that came first would be in the snapshot."""
    twin = TwinCopies()
    rank = rank_with(twin, memory)
    for step in range(4):
        rank.step(step)
    assert twin.num_begun > 4
    for back in (3, 2):
        assert rank.snapshots.load(RANK, back)
        assert content(rank.state) == rank.contents[back]
    assert twin.pinned == [0, 1, 0, 1]


def test_a_snapshot_does_not_count_before_the_device_has_copied(memory: int) -> None:
    twin = TwinCopies()
    rank = rank_with(twin, memory)
    twin.side.is_free.clear()
    rank.snapshots.hand_out(0)
    waiting = threading.Thread(target=rank.snapshots.complete, args=[0, lambda is_waiting: None])
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "the training thread launches no update"
    assert rank.snapshots.steps(RANK) == ()
    twin.side.is_free.set()
    waiting.join(DEADLINE_S)
    assert rank.snapshots.steps(RANK) == (0,)


def test_a_forward_that_changes_buffers_on_the_device_changes_no_snapshot(memory: int) -> None:
    """A buffer is copied on the stream of the forward, so before it."""
    twin = TwinCopies()
    rank = rank_with(twin, memory)
    rank.contents[0] = content(rank.state)
    rank.snapshots.hand_out(0)
    for buffer in rank.model.buffers():
        twin.current.launched.append(lambda buffer=buffer: buffer.add_(1))
    rank.snapshots.complete(0, lambda is_waiting: None)
    twin.current.mark()()
    assert content(rank.state) != rank.contents[0]
    assert rank.snapshots.load(RANK, 0)
    assert content(rank.state) == rank.contents[0]


def test_a_copy_begins_when_the_update_before_it_is_through(memory: int) -> None:
    """The host has launched the update and asks for the next step: the device is not there yet."""
    twin = TwinCopies()
    rank = rank_with(twin, memory)
    parameter = next(rank.model.parameters())
    twin.current.launched.append(lambda: parameter.data.fill_(7.0))
    rank.snapshots.hand_out(0)
    rank.snapshots.complete(0, lambda is_waiting: None)
    with torch.no_grad():
        parameter.zero_()
    assert rank.snapshots.load(RANK, 0)
    assert torch.equal(parameter, torch.full_like(parameter, 7.0))


def test_what_was_begun_is_waited_for_before_the_state_is_written(memory: int) -> None:
    twin = TwinCopies()
    rank = rank_with(twin, memory)
    twin.side.is_free.clear()
    rank.snapshots.hand_out(0)
    while not twin.num_begun:
        pass
    releasing = threading.Thread(target=rank.snapshots.release_state)
    releasing.start()
    releasing.join(0.05)
    assert releasing.is_alive()
    twin.side.is_free.set()
    releasing.join(DEADLINE_S)
    assert not releasing.is_alive()
    assert twin.num_begun <= twin.num_ahead, "none is begun after that"
    left = [launched for launched in twin.side.launched if launched.__code__.co_freevars]
    assert left == []
    assert rank.snapshots.steps(RANK) == ()


def test_an_error_of_the_device_comes_out_of_the_wait(memory: int) -> None:
    twin = TwinCopies()
    rank = rank_with(twin, memory)

    def fail() -> Any:
        raise RuntimeError("an illegal memory access")

    twin.current.launched.append(fail)
    rank.snapshots.hand_out(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rank.snapshots.complete(0, lambda is_waiting: None)
    assert rank.snapshots.steps(RANK) == ()


class Driver:
    """What pins memory, and what it says."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.problem: str | None = None
        self.num_asked = 0

    def register(self, address: int, num_bytes: int) -> str | None:
        self.num_asked += 1
        if self.problem is None:
            self.pinned[address] = num_bytes
        return self.problem

    def unregister(self, address: int) -> str | None:
        del self.pinned[address]
        return None


def test_a_slot_is_pinned_once_and_again_when_it_grows() -> None:
    driver = Driver()
    slots = PinnedSlots(driver.register, driver.unregister)
    small, other, large = (mmap.mmap(-1, pages * mmap.PAGESIZE) for pages in (1, 1, 2))
    slots.pin(0, small)
    slots.pin(1, other)
    slots.pin(0, small)
    assert list(driver.pinned.values()) == [mmap.PAGESIZE] * 2
    assert driver.num_asked == 2
    slots.pin(0, large)
    assert sorted(driver.pinned.values()) == [mmap.PAGESIZE, 2 * mmap.PAGESIZE]


def test_a_driver_that_refuses_is_asked_once(capfd: pytest.CaptureFixture[str]) -> None:
    driver = Driver()
    driver.problem = "operation not supported"
    slots = PinnedSlots(driver.register, driver.unregister)
    for slot in range(3):
        slots.pin(slot, mmap.mmap(-1, mmap.PAGESIZE))
    assert driver.num_asked == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "it does not pin them: operation not supported" in said


def test_who_copies_follows_from_the_device() -> None:
    assert isinstance(side_copies(torch.device("cpu")), HostCopies)
    assert isinstance(side_copies(torch.device("cuda", 0)), StreamCopies)
