"""A group that carries tensors of several types of device: it has a communicator for each, and they live together.

A machine without a GPU has no second type that gloo would carry. So the second communicator here is one of gloo's on
the CPU that stands in for another type, "meta": what is chosen, connected, claimed and broken is the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.worker.ranks import DEADLINE_S, Watcher, join, meet, run_ranks
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from keepstep.config import forces_gloo
from keepstep.errors import ConfigurationError
from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.backends.by_device import backends_of, nccl_version
from keepstep.worker.backends.communicator import FailureCause
from keepstep.worker.backends.gloo.communicator import GlooCommunicator
from keepstep.worker.groups import communicators, registry
from keepstep.worker.groups.communicators import Communicators

CPU, OTHER = torch.device("cpu"), torch.device("meta")


@contextmanager
def two_types() -> Iterator[None]:
    """Inside, every process has a device of the other type."""

    def both(_device: torch.device) -> dict[str, type[GlooCommunicator]]:
        return {CPU.type: GlooCommunicator, OTHER.type: GlooCommunicator}

    with mock.patch.object(communicators, "backends_of", both), mock.patch.object(registry, "backends_of", both):
        yield


def test_a_process_without_a_device_of_its_own_has_one_backend() -> None:
    assert list(backends_of(CPU)) == ["cpu"]
    assert list(backends_of(torch.device("cuda", 1))) == ["cpu", "cuda"]


@pytest.mark.parametrize(("name", "version"), [(None, (2, 30, 1)), ("nccl", (2, 30, 1)), ("gloo", ())])
def test_gloo_carries_tensors_of_a_gpu_where_it_is_forced(
    name: str | None, version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose torch has NCCL, with which several ranks on one GPU may not be possible."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    if name is not None:
        monkeypatch.setenv("KEEPSTEP_GPU_BACKEND", name)
    assert nccl_version() == version
    assert (backends_of(torch.device("cuda", 0))["cuda"] is GlooCommunicator) is (version == ())


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_GPU_BACKEND", "mpi")
    with pytest.raises(ConfigurationError, match="KEEPSTEP_GPU_BACKEND=mpi: allowed are nccl"):
        forces_gloo()


def test_the_first_tensor_decides_and_none_goes_by_the_cpu() -> None:
    with two_types():
        found = Communicators("world", Watcher(), "127.0.0.1", OTHER)
    here, there = torch.empty(1), torch.empty(1, device="meta")
    other = found._by_type["meta"]
    assert found.device_types == ("cpu", "meta")
    assert found.of([here]) is found.of([]) is found.of([[]], []) is found.own
    assert found.of([there]) is found.of([[there]]) is found.of([], [there]) is found.of([[], [there]]) is other


def test_a_device_that_nothing_carries_is_left_to_the_cpu_to_refuse() -> None:
    found = Communicators("world", Watcher(), "127.0.0.1", CPU)
    assert found.of([torch.empty(1, device="meta")]) is found.own


def all_reduce_there(world: Any) -> dist.Work:
    """In the other communicator, which is one of gloo's: with a tensor that it can reduce."""
    tensor = torch.ones(1)
    other = world._communicators._by_type["meta"]
    work: dist.Work = other.begin(
        Operation.ALL_REDUCE, lambda inner: inner.allreduce([tensor], AllreduceOptions()), [tensor], lambda _error: None
    )
    return work


def use_both(rank: int, size: int, path: Path) -> list[object]:
    watcher = Watcher()
    with two_types():
        groups, world = join(path, rank, size, watcher)
        dist.all_reduce(torch.ones(1))
        all_reduce_there(world).wait()
        found: list[object] = [
            [device.type for device in world._device_types],
            world._get_backend(OTHER) is world,
            world._get_sequence_number_for_group(),
            watcher.num_left,
            not groups.world.is_down,
        ]
        groups.take_down()
        found += [world.is_down, world.inner]
        before = world._communicators
        groups.drain()
        groups.connect(2, rank)  # nothing was under way: both stay
        all_reduce_there(world).wait()
        found += [world._communicators is before, groups.rebuilt]
    return found


def test_both_are_closed_and_stay_together(tmp_path: Path) -> None:
    expected = [["cpu", "meta"], True, 2, 2, True, True, None, True, {}]
    assert run_ranks(2, use_both, tmp_path) == [expected, expected]


def break_one(rank: int, size: int, path: Path, ahead: int) -> list[object]:
    """Something is under way in one of the two when the generation ends."""
    with two_types():
        groups, world = join(path, rank, size)
        dist.all_reduce(torch.ones(1))
        before = world._communicators
        if rank == ahead:
            work = all_reduce_there(world)
        meet(path, size, "begun")
        groups.take_down()
        if rank == ahead:
            with pytest.raises(RuntimeError):
                work.wait()
        groups.drain()
        groups.connect(2, rank)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        all_reduce_there(world).wait()
        return [world._communicators is before, tensor.item(), list(groups.rebuilt)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_where_one_is_broken_both_are_rebuilt(ahead: int, tmp_path: Path) -> None:
    answers = run_ranks(2, break_one, tmp_path, ahead)
    assert [answer[:2] for answer in answers] == [[False, 2.0]] * 2
    assert answers[1 - ahead][2] == ["world"], "the group seemed whole here"
    assert answers[ahead][2] == []


def test_another_device_s_communicator_judges_its_own_errors() -> None:
    watcher = Watcher(echoes=True)
    found = Communicators("world", watcher, "127.0.0.1", CPU)
    assert found.own.cause_of(RuntimeError("gloo/transport: closed")) is FailureCause.CONNECTION
    assert found.is_of_a_failure(found.own, RuntimeError("gloo/transport: closed"))
    assert not found.is_of_a_failure(found.own, RuntimeError("Invalid use of a bitwise operation"))
    assert watcher.errors == ["world: gloo/transport: closed"]


def disconnect(rank: int, size: int, path: Path) -> list[bool]:
    with two_types():
        _groups, world = join(path, rank, size)
        work = all_reduce_there(world) if rank == 0 else None
        meet(path, size, "begun")
        quiet_before = world.drain(0.0)
        meet(path, size, "looked")
        world.shutdown()
        if work is not None:
            with pytest.raises(RuntimeError):
                work.wait()
        return [quiet_before, world.drain(DEADLINE_S), world.is_down]


def test_a_group_that_is_destroyed_breaks_both(tmp_path: Path) -> None:
    assert run_ranks(2, disconnect, tmp_path) == [[False, True, True], [True, True, True]]
