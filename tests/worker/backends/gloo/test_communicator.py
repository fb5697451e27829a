"""A gloo communicator: what is under way in it ends when it is aborted, at any moment."""

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.worker.ranks import DEADLINE_S, Watcher, file_store, meet, run_ranks
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ReduceScatterOptions

from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.backends.communicator import CommunicatorAborted
from keepstep.worker.backends.gloo.communicator import GlooCommunicator

NEVER = timedelta(hours=10)
LARGE = 1 << 20
"""Elements: a message that no socket buffer holds, so a cut finds it half-way."""


def inner(path: Path, rank: int, size: int, generation: int = 1) -> GlooCommunicator:
    group = GlooCommunicator("world", Watcher())
    group.connect(file_store(path, generation), rank, size, timedelta(seconds=DEADLINE_S), NEVER)
    return group


def raised(_error: Exception) -> None:
    return None


def reduce(group: GlooCommunicator, elements: int) -> dist.Work:
    tensor = torch.ones(elements)
    return group.begin(
        Operation.ALL_REDUCE, lambda gloo: gloo.allreduce([tensor], AllreduceOptions()), [tensor], raised
    )


def reduce_scatter(group: GlooCommunicator, elements: int, size: int) -> dist.Work:
    source, output = torch.ones(elements * size), torch.empty(elements)
    return group.begin(
        Operation.REDUCE_SCATTER,
        lambda gloo: gloo._reduce_scatter_base(output, source, ReduceScatterOptions()),
        [output],
        raised,
    )


def send_on(group: GlooCommunicator, elements: int, rank: int, size: int) -> list[dist.Work]:
    """To the next rank, from the one before."""
    tensors = [torch.ones(elements), torch.ones(elements)]
    return [group.send(tensors[:1], (rank + 1) % size, 0), group.recv(tensors[1:], (rank - 1) % size, 0)]


def outcome(work: dist.Work) -> str:
    try:
        work.wait()
    except RuntimeError as error:
        return "deadline" if "Timed out" in str(error) else "broken"
    return "done"


def break_at_any_moment(rank: int, size: int, path: Path, elements: int, seed: int) -> set[str]:
    """Each rank aborts its communicator at a moment of its own while collectives run, one of them first."""
    outcomes = set()
    for trial in range(25):
        moment = random.Random(f"{seed} {trial} {rank}")
        group = inner(path, rank, size, generation=trial)
        meet(path, size, f"built {trial}")
        threading.Timer(moment.uniform(0.0, 0.02 if elements < LARGE else 0.1), group.abort).start()
        works: list[dist.Work] = []
        with suppress(RuntimeError):
            while True:
                works += [
                    reduce(group, elements),
                    reduce_scatter(group, elements, size),
                    *send_on(group, elements, rank, size),
                ]
                works[-4].wait()
        outcomes |= {outcome(work) for work in works}
        assert group.wait_until_quiet(DEADLINE_S)
        meet(path, size, f"through {trial}")
        group.release()
    return outcomes


@pytest.mark.parametrize("elements", [10, LARGE])
def test_a_cut_at_any_moment_frees_all_ranks(elements: int, tmp_path: Path, seed: int) -> None:
    for outcomes in run_ranks(3, break_at_any_moment, tmp_path, elements, seed):
        assert "broken" in outcomes
        assert outcomes <= {"done", "broken"}


Begin = Callable[[GlooCommunicator, int, int], list[dist.Work]]


def stop_half_way(rank: int, size: int, path: Path, begin: Begin) -> list[str]:
    """Rank 1 does nothing: what rank 0 sends fills the sockets and stays there."""
    group = inner(path, rank, size)
    works = begin(group, rank, size)
    meet(path, size, "begun")
    group.abort()
    return [outcome(work) for work in works]


def only_rank_0_sends(group: GlooCommunicator, rank: int, size: int) -> list[dist.Work]:
    return [group.send([torch.ones(LARGE * 8)], 1, 0) for _ in range(3)] if rank == 0 else []


def only_one_receives_what_two_send(group: GlooCommunicator, rank: int, size: int) -> list[dist.Work]:
    """The message of the second is accepted by its header and then comes no further."""
    return [reduce(group, LARGE * 4)] if rank == 0 else []


@pytest.mark.parametrize("begin", [only_rank_0_sends, only_one_receives_what_two_send])
def test_what_waits_for_a_rank_that_does_nothing_is_freed(begin: Begin, tmp_path: Path) -> None:
    first, second = run_ranks(2, stop_half_way, tmp_path, begin)
    assert set(first) == {"broken"}
    assert second == []


def use_after_the_end(rank: int, size: int, path: Path) -> list[str]:
    group = inner(path, rank, size)
    group.barrier().wait()
    meet(path, size, "met")
    assert group.is_up
    group.abort()
    group.abort()
    assert not group.is_up
    with pytest.raises(CommunicatorAborted, match="group world is down"):
        group.barrier()
    assert group.wait_until_quiet(0.0)
    group.release()
    with pytest.raises(CommunicatorAborted):
        reduce(group, 1)
    return []


def test_nothing_begins_in_a_group_that_was_taken_down(tmp_path: Path) -> None:
    assert run_ranks(2, use_after_the_end, tmp_path) == [[], []]


def a_time_of_its_own(rank: int, size: int, path: Path, operation: str) -> str:
    group = GlooCommunicator("world", Watcher())
    group.connect(file_store(path), rank, size, timedelta(seconds=DEADLINE_S), timedelta(milliseconds=50))
    answer = ""
    if rank == 0:
        answer = outcome(reduce(group, 1) if operation == "all_reduce" else group.recv([torch.ones(1)], 1, 0))
    meet(path, size, "asked")
    return answer


@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_operations_have_their_own_deadline_not_that_of_connecting(tmp_path: Path, operation: str) -> None:
    assert run_ranks(2, a_time_of_its_own, tmp_path, operation) == ["deadline", ""]


class LosesOne(dist.Store):
    """The member that uses it is killed when the others know where to reach it, before it connects to any of them."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(key, bytes(value))
        self._inner.set("lost", b"")
        os.kill(os.getpid(), signal.SIGKILL)


def lose_one_while_connecting(rank: int, size: int, path: Path, deadline: timedelta, breaks: bool) -> str:
    """Rank 1 is lost. Its address is the greater one, and of two members that one connects to the other."""
    group = GlooCommunicator("world", Watcher(), host=f"127.0.0.{rank + 1}")
    store = file_store(path)
    if rank == 1:
        group.connect(LosesOne(store), rank, size, deadline, NEVER)
    store.wait(["lost"])
    if breaks:
        threading.Timer(0.3, group.abort).start()
    with pytest.raises(RuntimeError) as error:
        group.connect(store, rank, size, deadline, NEVER)
    assert not group.is_up
    group.abort()
    group.release()
    return str(error.value)


def test_a_wait_for_a_member_that_died_before_it_connected_ends_when_it_is_taken_down(tmp_path: Path) -> None:
    answers = run_ranks(2, lose_one_while_connecting, tmp_path, NEVER, True, silent=frozenset({1}))
    assert answers == ["group world was aborted while it was being connected", None]


def test_a_wait_for_a_member_that_died_before_it_connected_has_a_deadline(tmp_path: Path) -> None:
    deadline = timedelta(seconds=0.5)
    answers = run_ranks(2, lose_one_while_connecting, tmp_path, deadline, False, silent=frozenset({1}))
    assert answers == ["group world, rank 0: not all 2 members connected in 0.5 s", None]
