"""What each backend keeps of the promises of `Communicator`, whatever the device of its tensors.

One set of tests for all of them: a test takes the backend and the device as its `Kind`. What is skipped says what it
lacks. What concerns one backend alone is in its own folder.
"""

import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.worker.ranks import DEADLINE_S, Watcher, file_store, meet, run_ranks
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ReduceScatterOptions

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation
from keepstep.worker.backends.by_device import nccl_version
from keepstep.worker.backends.communicator import Communicator, CommunicatorAborted, FailureCause
from keepstep.worker.backends.gloo.communicator import GlooCommunicator
from keepstep.worker.backends.nccl.communicator import NcclCommunicator
from keepstep.worker.backends.nccl.device import CudaDevice

NEVER = timedelta(hours=10)
SOON = timedelta(milliseconds=50)
LARGE = 1 << 20
"""Elements: a message that no socket buffer holds, so an abort finds it halfway."""


@dataclass(frozen=True)
class Kind:
    """One backend with tensors on one type of device."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"

    def lacks(self, num_ranks: int) -> str:
        """What this machine lacks for as many ranks; empty: nothing."""
        if self.device == "cpu":
            return ""
        if not torch.cuda.is_available():
            return "needs a GPU: torch finds none"
        if self.backend == "nccl" and not dist.is_nccl_available():
            return "needs NCCL: torch was built without it"
        if self.backend == "nccl" and torch.cuda.device_count() < num_ranks and not ranks_may_share_a_gpu():
            return f"needs {num_ranks} GPUs, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1"
        return ""

    def here(self, rank: int) -> None:
        """Has this process use its own GPU."""
        if self.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())

    def communicator(self, watcher: Watcher) -> Communicator:
        """A communicator that is not connected yet."""
        if self.backend == "nccl":
            own = torch.device("cuda", torch.cuda.current_device())
            return NcclCommunicator("world", watcher, CudaDevice(own))
        return GlooCommunicator("world", watcher)

    def ones(self, elements: int) -> torch.Tensor:
        """A tensor of ones on the device of the kind."""
        return torch.ones(elements, device=self.device)


KINDS = [Kind("gloo", "cpu"), Kind("gloo", "cuda"), Kind("nccl", "cuda")]


def ranks_may_share_a_gpu() -> bool:
    """Whether NCCL lets two processes use one GPU."""
    return nccl_version() >= (2, 30) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # environ: the user's own


def on_own_device(rank: int, size: int, function: Callable[..., object], kind: Kind, *arguments: object) -> object:
    kind.here(rank)
    return function(rank, size, kind, *arguments)


def run(kind: Kind, num_ranks: int, function: Callable[..., object], *arguments: object) -> list[object]:
    """`run_ranks` of ``function(rank, num_ranks, kind, *arguments)``, where the machine has what it takes."""
    if lacks := kind.lacks(num_ranks):
        pytest.skip(lacks)
    return run_ranks(num_ranks, on_own_device, function, kind, *arguments)


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def connected(
    kind: Kind,
    path: Path,
    rank: int,
    size: int,
    *,
    generation: int = 1,
    timeout: timedelta = NEVER,
    watcher: Watcher | None = None,
) -> Communicator:
    group = kind.communicator(watcher or Watcher())
    group.connect(file_store(path, generation), rank, size, timedelta(seconds=DEADLINE_S), timeout)
    return group


def raised(_error: Exception) -> None:
    return None


def reduce(group: Communicator, tensor: torch.Tensor) -> dist.Work:
    return group.begin(
        Operation.ALL_REDUCE, lambda torch_s: torch_s.allreduce([tensor], AllreduceOptions()), [tensor], raised
    )


def reduce_scatter(group: Communicator, kind: Kind, elements: int, size: int) -> dist.Work:
    source, output = kind.ones(elements * size), kind.ones(elements)
    return group.begin(
        Operation.REDUCE_SCATTER,
        lambda torch_s: torch_s._reduce_scatter_base(output, source, ReduceScatterOptions()),
        [output],
        raised,
    )


def send_on(group: Communicator, kind: Kind, elements: int, rank: int, size: int) -> list[dist.Work]:
    """To the next rank, from the one before. On NCCL one waits for the other, so not all ranks send first."""
    tensors = [kind.ones(elements), kind.ones(elements)]

    def send() -> dist.Work:
        return group.send(tensors[:1], (rank + 1) % size, 0)

    def receive() -> dist.Work:
        return group.recv(tensors[1:], (rank - 1) % size, 0)

    return [begin() for begin in ((receive, send) if rank % 2 else (send, receive))]


def finish(kind: Kind, work: dist.Work) -> None:
    """Waits until an operation is complete on its device. Where the first wait holds up a stream alone, the second one
    raises the error that the operation has ended in."""
    work.wait()
    if kind.device == "cuda":
        torch.cuda.synchronize()
        work.wait()


def outcome(kind: Kind, group: Communicator, work: dist.Work) -> str:
    try:
        finish(kind, work)
    except RuntimeError as error:
        is_late = group.is_up and group.cause_of(error) is FailureCause.DEADLINE  # an abort may be told as a deadline
        return "deadline" if is_late else "broken"
    return "done"


# ---- abort ----------------------------------------------------------------------------------------------------------


def break_at_any_moment(rank: int, size: int, kind: Kind, path: Path, elements: int, seed: int) -> set[str]:
    """Each rank aborts its communicator at a moment of its own while operations run, one of them first."""
    outcomes = set()
    for trial in range(25):
        moment = random.Random(f"{seed} {trial} {rank}")
        group = connected(kind, path, rank, size, generation=trial)
        meet(path, size, f"built {trial}")
        threading.Timer(moment.uniform(0.0, 0.02 if elements < LARGE else 0.1), group.abort).start()
        works: list[dist.Work] = []
        with suppress(RuntimeError):
            while True:
                works += [
                    reduce(group, kind.ones(elements)),
                    reduce_scatter(group, kind, elements, size),
                    *send_on(group, kind, elements, rank, size),
                ]
                finish(kind, works[-4])
        outcomes |= {outcome(kind, group, work) for work in works}
        assert group.wait_until_quiet(DEADLINE_S)
        meet(path, size, f"through {trial}")
        group.release()
    return outcomes


@pytest.mark.parametrize("elements", [10, LARGE])
def test_an_abort_at_any_moment_frees_all_ranks(kind: Kind, elements: int, tmp_path: Path, seed: int) -> None:
    for outcomes in run(kind, 3, break_at_any_moment, tmp_path, elements, seed):
        assert isinstance(outcomes, set)
        assert "broken" in outcomes
        assert outcomes <= {"done", "broken"}


Begin = Callable[[Communicator, Kind, int], list[dist.Work]]


def stop_half_way(rank: int, size: int, kind: Kind, path: Path, begin: Begin) -> list[str]:
    """Rank 1 does nothing: what rank 0 sends fills the buffers between them and stays there."""
    group = connected(kind, path, rank, size)
    works = begin(group, kind, rank)
    meet(path, size, "begun")
    group.abort()
    return [outcome(kind, group, work) for work in works]


def only_rank_0_sends(group: Communicator, kind: Kind, rank: int) -> list[dist.Work]:
    return [group.send([kind.ones(LARGE * 8)], 1, 0) for _ in range(3)] if rank == 0 else []


def only_rank_0_reduces(group: Communicator, kind: Kind, rank: int) -> list[dist.Work]:
    return [reduce(group, kind.ones(LARGE * 4))] if rank == 0 else []


@pytest.mark.parametrize("begin", [only_rank_0_sends, only_rank_0_reduces])
def test_what_waits_for_a_rank_that_does_nothing_is_freed(kind: Kind, begin: Begin, tmp_path: Path) -> None:
    first, second = run(kind, 2, stop_half_way, tmp_path, begin)
    assert isinstance(first, list)
    assert set(first) == {"broken"}
    assert second == []


def abort_while_another_thread_waits(rank: int, size: int, kind: Kind, path: Path) -> list[bool]:
    group = connected(kind, path, rank, size)
    found = []
    if rank == 0:
        work = reduce(group, kind.ones(1))
        found.append(group.wait_until_quiet(0.05))  # the other ranks do not reduce
        threading.Timer(0.05, group.abort).start()
        with pytest.raises(RuntimeError):
            finish(kind, work)
        found.append(group.wait_until_quiet(DEADLINE_S))
        found.append(work.is_success())
    meet(path, size, "aborted")
    return found


def test_a_wait_is_freed_by_an_abort_from_another_thread(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, abort_while_another_thread_waits, tmp_path) == [[False, True, False], []]


def use_after_the_end(rank: int, size: int, kind: Kind, path: Path) -> list[str]:
    group = connected(kind, path, rank, size)
    finish(kind, group.barrier())
    meet(path, size, "met")
    assert group.is_up
    group.abort()
    group.abort()
    assert not group.is_up
    with pytest.raises(CommunicatorAborted, match="group world is down"):
        group.barrier()
    assert group.wait_until_quiet(DEADLINE_S)
    group.release()
    with pytest.raises(CommunicatorAborted):
        reduce(group, kind.ones(1))
    return []


def test_nothing_begins_in_a_group_that_was_aborted(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, use_after_the_end, tmp_path) == [[], []]


# ---- connecting -----------------------------------------------------------------------------------------------------


def wait_for_nobody(rank: int, size: int, kind: Kind, path: Path, aborts: bool) -> list[str]:
    """Rank 1 does not connect."""
    if rank == 1:
        meet(path, size, "gave up")
        return []
    group = kind.communicator(Watcher())
    if aborts:
        threading.Timer(0.3, group.abort).start()
    store = file_store(path)
    store.set_timeout(timedelta(seconds=1.5))
    with pytest.raises(RuntimeError) as error:
        group.connect(store, rank, size, timedelta(seconds=DEADLINE_S if aborts else 0.5), NEVER)
    assert not group.is_up
    with pytest.raises(CommunicatorAborted):
        group.barrier()
    group.abort()
    assert group.wait_until_quiet(0.0)
    group.release()
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    meet(path, size, "gave up")
    return [str(error.value)]


def test_waiting_for_a_member_that_does_not_connect_ends_when_the_group_is_aborted(kind: Kind, tmp_path: Path) -> None:
    first, _second = run(kind, 2, wait_for_nobody, tmp_path, True)
    assert first == ["group world was aborted while it was being connected"]


def test_waiting_for_a_member_that_does_not_connect_has_a_deadline(kind: Kind, tmp_path: Path) -> None:
    first, _second = run(kind, 2, wait_for_nobody, tmp_path, False)
    assert first == ["group world, rank 0: not all 2 members connected in 0.5 s"]


def connect_too_late(rank: int, size: int, kind: Kind, path: Path) -> str:
    group = kind.communicator(Watcher())
    group.abort()
    with pytest.raises(CommunicatorAborted) as error:
        group.connect(file_store(path), rank, size, timedelta(seconds=DEADLINE_S), NEVER)
    return str(error.value)


def test_a_communicator_that_was_aborted_is_not_connected(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 1, connect_too_late, tmp_path) == ["group world was aborted before it was connected"]


def connect_again(rank: int, size: int, kind: Kind, path: Path) -> list[float]:
    sums = []
    for generation in (1, 2, 3):
        group = connected(kind, path, rank, size, generation=generation)
        tensor = kind.ones(3) * (rank + generation)
        finish(kind, reduce(group, tensor))
        sums.append(tensor.sum().item())
        meet(path, size, f"through {generation}")
        group.abort()
        assert group.wait_until_quiet(DEADLINE_S)
        group.release()
    return sums


def test_one_generation_is_connected_after_the_other(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, connect_again, tmp_path) == [[9.0, 15.0, 21.0]] * 2


# ---- leaving, and deadlines -----------------------------------------------------------------------------------------


def leave(rank: int, size: int, kind: Kind, path: Path) -> str:
    group = connected(kind, path, rank, size, timeout=timedelta(seconds=5))
    meet(path, size, "connected")  # a member that is still connecting would fail with an error of that
    answer = ""
    if rank == 0:
        group.leave()
    else:
        answer = outcome(kind, group, reduce(group, kind.ones(1)))
    meet(path, size, "left")
    return answer


def test_no_other_member_waits_for_one_that_has_left(kind: Kind, tmp_path: Path) -> None:
    _first, second = run(kind, 2, leave, tmp_path)
    assert second in ("broken", "deadline")


def a_time_of_its_own(rank: int, size: int, kind: Kind, path: Path, operation: str) -> str:
    group = connected(kind, path, rank, size, timeout=SOON)
    answer = ""
    if rank == 0:
        work = reduce(group, kind.ones(1)) if operation == "all_reduce" else group.recv([kind.ones(1)], 1, 0)
        answer = outcome(kind, group, work)
    meet(path, size, "asked")
    return answer


@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_operations_have_their_own_deadline_not_that_of_connecting(kind: Kind, tmp_path: Path, operation: str) -> None:
    assert run(kind, 2, a_time_of_its_own, tmp_path, operation) == ["deadline", ""]


def another_time(rank: int, size: int, kind: Kind, path: Path) -> list[str]:
    group = connected(kind, path, rank, size)
    answers = [outcome(kind, group, reduce(group, kind.ones(1)))]
    group.set_timeout(SOON)
    if rank == 0:
        answers.append(outcome(kind, group, reduce(group, kind.ones(1))))
    meet(path, size, "asked")
    return answers


def test_the_timeout_of_operations_to_come_can_be_set(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, another_time, tmp_path) == [["done", "deadline"], ["done"]]


def set_it_early(rank: int, size: int, kind: Kind, path: Path) -> bool:
    group = kind.communicator(Watcher())
    group.set_timeout(SOON)  # there is nothing yet that could have one
    return group.is_up


def test_a_timeout_may_be_set_before_there_is_a_connection(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 1, set_it_early, tmp_path) == [False]


# ---- groups that stay -----------------------------------------------------------------------------------------------


def close_and_reopen(rank: int, size: int, kind: Kind, path: Path) -> tuple[object, ...]:
    group = connected(kind, path, rank, size)
    finish(kind, reduce(group, kind.ones(4)))
    finish(kind, group.barrier())
    for work in send_on(group, kind, 4, rank, size):
        finish(kind, work)
    assert group.wait_until_quiet(DEADLINE_S)
    while_open = group.claim(7)
    group.close()
    group.close()
    claim, was_up = group.claim(7), group.is_up
    with pytest.raises(CommunicatorAborted):
        group.barrier()
    meet(path, size, "closed")
    group.reopen()
    tensor = kind.ones(2)
    finish(kind, reduce(group, tensor))
    return while_open, claim, was_up, group.is_up, group.num_begun, tensor.tolist()


def test_connections_stay_where_nothing_was_under_way(kind: Kind, tmp_path: Path) -> None:
    claims = [GroupClaim(7, 2, {1: 1}, {1: 1}), GroupClaim(7, 2, {0: 1}, {0: 1})]
    assert run(kind, 2, close_and_reopen, tmp_path) == [(None, claim, False, True, 5, [2.0, 2.0]) for claim in claims]


def close_in_the_middle(rank: int, size: int, kind: Kind, path: Path) -> tuple[object, ...]:
    group = connected(kind, path, rank, size)
    meet(path, size, "connected")
    found: tuple[object, ...] = ()
    if rank == 0:
        work = reduce(group, kind.ones(1))
        group.close()
        found = (outcome(kind, group, work), group.wait_until_quiet(DEADLINE_S), group.claim(1))
    meet(path, size, "closed")
    return found


def test_closing_breaks_what_is_under_way_and_then_nothing_stays(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, close_in_the_middle, tmp_path) == [("broken", True, None), ()]


def claim_early(rank: int, size: int, kind: Kind, path: Path) -> object:
    group = kind.communicator(Watcher())
    group.close()
    return group.claim(1)


def test_there_is_nothing_to_claim_where_nothing_was_connected(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 1, claim_early, tmp_path) == [None]


# ---- errors of a call -----------------------------------------------------------------------------------------------


def ask_for_the_impossible(rank: int, size: int, kind: Kind, path: Path) -> list[object]:
    watcher = Watcher()
    group = connected(kind, path, rank, size, watcher=watcher)
    tensor, options = kind.ones(4), AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.BAND)
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        finish(
            kind,
            group.begin(
                Operation.ALL_REDUCE,
                lambda torch_s: torch_s.allreduce([tensor], options),
                [tensor],
                lambda _error: None,
            ),
        )
    return [group.cause_of(error.value), group.wait_until_quiet(DEADLINE_S), watcher.num_entered == watcher.num_left]


def test_what_the_backend_refuses_is_an_error_of_the_call(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, ask_for_the_impossible, tmp_path) == [[FailureCause.CALL, True, True]] * 2


def deal_with_it(rank: int, size: int, kind: Kind, path: Path) -> list[str]:
    """The error has been dealt with: who waits goes on, and is told on the way."""
    group = connected(kind, path, rank, size)
    told: list[str] = []

    def on_error(error: Exception) -> Callable[[], None]:
        told.append("error")
        return lambda: told.append("went on")

    if rank == 0:
        tensor = kind.ones(1)
        work = group.begin(
            Operation.ALL_REDUCE, lambda torch_s: torch_s.allreduce([tensor], AllreduceOptions()), [tensor], on_error
        )
        threading.Timer(0.05, group.abort).start()
        if kind.device == "cuda":
            torch.cuda.synchronize()
        work.wait()
        assert group.wait_until_quiet(DEADLINE_S)
    meet(path, size, "dealt with")
    return told


def test_an_error_that_was_dealt_with_is_not_raised(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, deal_with_it, tmp_path) == [["error", "went on"], []]


# ---- what keepstep sends itself -------------------------------------------------------------------------------------


def agree(rank: int, size: int, kind: Kind, path: Path) -> list[int]:
    group = connected(kind, path, rank, size)
    finish(kind, group.barrier())
    greatest = torch.tensor([rank, -rank, 5], device=kind.device)
    finish(kind, group.barrier(greatest))
    found: list[int] = greatest.tolist()
    return found


def test_a_barrier_gives_all_members_the_greatest_numbers(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 3, agree, tmp_path) == [[2, 0, 5]] * 3


def send_in_the_background(rank: int, size: int, kind: Kind, path: Path) -> tuple[object, ...]:
    watcher = Watcher()
    group = connected(kind, path, rank, size, watcher=watcher)
    carrier, received, peer = group.background, kind.ones(8), 1 - rank
    for sender in (0, 1):
        if sender == rank:
            finish(kind, carrier.send([kind.ones(8) * rank], peer, 3))
        else:
            finish(kind, carrier.recv([received], peer, 3))
    counted = (group.num_begun, watcher.num_entered, watcher.num_left, watcher.num_awaited)
    meet(path, size, "sent")
    group.close()
    return received[0].item(), counted, group.claim(1)


def test_what_is_sent_in_the_background_is_not_counted_and_nothing_stays_after_it(kind: Kind, tmp_path: Path) -> None:
    nothing = (0, 0, 0, 0)
    assert run(kind, 2, send_in_the_background, tmp_path) == [(1.0, nothing, None), (0.0, nothing, None)]


def abort_the_background(rank: int, size: int, kind: Kind, path: Path) -> list[str]:
    group = connected(kind, path, rank, size)
    answers = []
    if rank == 0:
        work = group.background.recv([kind.ones(1)], 1, 3)
        threading.Timer(0.05, group.abort).start()
        answers.append(outcome(kind, group, work))
    meet(path, size, "aborted")
    return answers


def test_what_waits_in_the_background_is_freed_by_an_abort(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, abort_the_background, tmp_path) == [["broken"], []]


# ---- what is told of operations -------------------------------------------------------------------------------------


def watch(rank: int, size: int, kind: Kind, path: Path) -> tuple[object, ...]:
    watcher = Watcher()
    group = connected(kind, path, rank, size, watcher=watcher)
    tensor = kind.ones(2)
    work = reduce(group, tensor)
    future = work.get_future()
    (found,) = future.wait()
    finish(kind, work)
    for each in send_on(group, kind, 2, rank, size):
        finish(kind, each)
    assert group.wait_until_quiet(DEADLINE_S)
    peer = 1 - rank
    expected = {(Operation.ALL_REDUCE, ALL_MEMBERS), (Operation.SEND, peer), (Operation.RECV, peer)}
    assert {(operation, who) for _group, operation, who in watcher.operations} == expected
    assert work.is_completed()
    assert work.is_success()
    assert watcher.num_awaited <= 3
    assert watcher.num_came == watcher.num_awaited
    return found.tolist(), watcher.num_entered, watcher.num_left, work.result()[0].tolist()


def test_the_observer_is_told_of_each_operation_once(kind: Kind, tmp_path: Path) -> None:
    assert run(kind, 2, watch, tmp_path) == [([2.0, 2.0], 3, 3, [2.0, 2.0])] * 2
