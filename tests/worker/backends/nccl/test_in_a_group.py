"""A surviving group over an NCCL communicator, whose device and group are twins: what is echoed, and what is raised."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.worker.backends.nccl.twin import TwinDevice, TwinGroup
from tests.worker.ranks import DEADLINE_S, Watcher, join, run_ranks
from torch import distributed as dist
from torch._C._distributed_c10d import ErrorType

from keepstep.worker.backends.gloo.communicator import GlooCommunicator
from keepstep.worker.backends.nccl.communicator import NcclCommunicator
from keepstep.worker.groups import communicators, registry
from keepstep.worker.groups.registry import GroupRegistry

META = torch.device("meta")


class Job:
    """One rank whose own device is a twin that carries tensors of type "meta"."""

    def __init__(self, path: Path, watcher: Watcher) -> None:
        self.device, self.watcher = TwinDevice(), watcher
        self.device.device = META
        backends = {
            "cpu": GlooCommunicator,
            "meta": lambda name, observer, _host: NcclCommunicator(name, observer, self.device),
        }
        for module in (communicators, registry):
            mock.patch.object(module, "backends_of", return_value=backends).start()
        self.groups: GroupRegistry = join(path, 0, 1, watcher)[0]

    @property
    def torch(self) -> TwinGroup:
        assert self.device.group is not None
        return self.device.group

    def reduce(self) -> Any:
        return dist.all_reduce(torch.ones(2, device=META), async_op=True)

    def complete(self) -> None:
        for work in self.torch.works:
            work.is_done = True


def use(_rank: int, _size: int, path: Path) -> list[object]:
    job = Job(path, Watcher())
    work = job.reduce()
    work.wait()
    job.groups.look()
    before = job.watcher.num_left
    job.complete()
    job.groups.look()
    dist.barrier()
    return [before, job.watcher.num_left, len(job.torch.works), work.is_success(), job.watcher.num_echoed]


def test_tensors_of_the_device_go_by_nccl_and_a_barrier_by_the_cpu(tmp_path: Path) -> None:
    assert run_ranks(1, use, tmp_path) == [[0, 2, 1, True, 0]]


def use_at_once(_rank: int, _size: int, path: Path) -> list[object]:
    """What ``async_op=False`` becomes: NCCL would have no handle for it, and no process could tell how it ends."""
    job = Job(path, Watcher())
    tensors = [torch.ones(2, device=META) for _ in range(2)]
    dist.all_reduce(tensors[0])
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    waited = [work.num_synchronized for work in job.torch.works]
    job.complete()
    quiet = job.groups.world.drain(DEADLINE_S)
    dist.all_reduce(tensors[0])
    job.groups.take_down()
    job.groups.drain()
    return [waited, quiet, job.watcher.num_echoed]


def test_an_operation_that_is_not_asynchronous_is_followed_too(tmp_path: Path) -> None:
    assert run_ranks(1, use_at_once, tmp_path) == [[[1, 1], True, 1]]


def batch(_rank: int, _size: int, path: Path) -> list[object]:
    """A send to this rank itself before the receive: issued one by one, they would wait for each other for ever."""
    job = Job(path, Watcher())
    tensors = [torch.ones(2, device=META) for _ in range(3)]
    sides = (dist.isend, dist.isend, dist.irecv)
    works = dist.batch_isend_irecv([dist.P2POp(side, each, 0) for side, each in zip(sides, tensors, strict=True)])
    for work in works:
        work.wait()
    waited = [work.num_synchronized for work in job.torch.works]
    is_done_early = [work.is_completed() for work in works]
    job.complete()
    quiet = job.groups.world.drain(DEADLINE_S)
    one = dist.isend(tensors[0], 0)
    assert one is not None
    one.wait()
    return [waited, is_done_early, quiet, job.watcher.num_left, job.torch.batches]


def test_a_batch_is_issued_at_once(tmp_path: Path) -> None:
    calls = [4, 1, 0]  # three and the end of the batch; one; none after it
    assert run_ranks(1, batch, tmp_path) == [[[3], [False] * 3, True, 3, calls]]


def break_a_batch(_rank: int, _size: int, path: Path, when: str) -> list[object]:
    job = Job(path, Watcher())
    begin = NcclCommunicator.begin

    def begin_and_take_down(*arguments: Any, is_held: bool) -> Any:
        work = begin(*arguments, is_held=is_held)
        job.groups.take_down()
        return work

    if when == "while it is issued":
        job.torch.in_call = job.groups.take_down
    else:
        mock.patch.object(NcclCommunicator, "begin", begin_and_take_down).start()
    tensors = [torch.ones(2, device=META) for _ in range(2)]
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensors[0], 0), dist.P2POp(dist.irecv, tensors[1], 0)]):
        work.wait()
    job.groups.drain()
    job.groups.look()
    watcher = job.watcher
    return [watcher.num_entered == watcher.num_left, watcher.num_awaited == watcher.num_came, watcher.num_echoed]


@pytest.mark.parametrize("when", ["between its operations", "while it is issued"])
def test_a_batch_that_is_broken_is_echoed_as_a_whole(when: str, tmp_path: Path) -> None:
    assert run_ranks(1, break_a_batch, tmp_path, when) == [[True, True, 2]]


def take_down(_rank: int, _size: int, path: Path) -> list[object]:
    job = Job(path, Watcher())
    job.reduce().wait()
    job.groups.take_down()
    job.groups.drain()
    job.groups.look()
    echoed, first = job.watcher.num_echoed, job.torch
    while_down = job.reduce()
    assert while_down.wait()
    job.groups.connect(2, 0)
    job.reduce().wait()
    job.complete()
    job.groups.look()
    return [echoed, job.watcher.num_echoed, job.torch is first, first.num_aborts, job.groups.world.is_down]


def test_what_was_under_way_is_echoed_and_the_next_generation_has_a_group_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(1, take_down, tmp_path) == [[1, 2, False, 1, False]]


def lose_a_peer(_rank: int, _size: int, path: Path) -> list[object]:
    """NCCL finds it before an agent does: the operation is echoed and the session told, at the gradient barrier."""
    job = Job(path, Watcher(echoes=True))
    job.reduce().wait()
    job.torch.error = ErrorType.COMM_ERROR
    job.torch.works[0].error = RuntimeError("NCCL error: remote process exited or there was a network error")
    job.groups.look()
    return [job.watcher.num_echoed, len(job.watcher.errors), "NCCL has failed" in job.watcher.errors[0]]


def test_a_peer_whose_loss_nccl_has_found_is_reported(tmp_path: Path) -> None:
    assert run_ranks(1, lose_a_peer, tmp_path) == [[1, 1, True]]


def be_late(_rank: int, _size: int, path: Path, knows: bool) -> str:
    job = Job(path, Watcher(knows=knows))
    job.reduce().wait()
    job.torch.give_up()
    try:
        job.groups.look()
    except RuntimeError as error:
        return str(error)
    assert job.groups.world.drain(DEADLINE_S)
    return f"echoed {job.watcher.num_echoed}"


@pytest.mark.parametrize(("knows", "answer"), [(True, "echoed 1"), (False, "group world: all_reduce did not end")])
def test_an_operation_that_is_late_is_an_error_of_the_script_s_unless_a_failure_is_known(
    knows: bool, answer: str, tmp_path: Path
) -> None:
    (found,) = run_ranks(1, be_late, tmp_path, knows)
    assert found.startswith(answer)
