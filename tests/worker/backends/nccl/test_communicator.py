"""An NCCL communicator over a twin of the device and of torch's group: what it makes of what they say, on the CPU.

That torch and NCCL do what the twin does is for the tests that need a GPU, `test_conformance.py` among them.
"""

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from tests.worker.backends.nccl.twin import TwinDevice, TwinGroup, TwinWork
from tests.worker.ranks import DEADLINE_S, Watcher
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ErrorType, HashStore, Store

from keepstep.errors import UsageError
from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.backends.by_device import backends_of
from keepstep.worker.backends.communicator import CommunicatorAborted, FailureCause
from keepstep.worker.backends.nccl.communicator import NcclCommunicator
from keepstep.worker.backends.nccl.work import NcclWork
from keepstep.worker.backends.own_traffic import is_raised

DEADLINE = timedelta(seconds=DEADLINE_S)
MINUTE = timedelta(minutes=1)


class Made:
    """A connected communicator with what is below and above it."""

    def __init__(self) -> None:
        self.watcher, self.device = Watcher(), TwinDevice()
        self.group = NcclCommunicator("world", self.watcher, self.device)
        self.group.connect(HashStore(), 0, 2, DEADLINE, MINUTE)
        assert self.device.group is not None
        self.torch: TwinGroup = self.device.group
        self.told: list[str] = []

    def reduce(self, tensor: torch.Tensor | None = None, *, echoes: bool = False) -> NcclWork:
        output = torch.ones(2) if tensor is None else tensor

        def on_error(error: Exception) -> Callable[[], None] | None:
            self.told.append(str(error))
            return (lambda: self.told.append("went on")) if echoes else None

        return self.group.begin(
            Operation.ALL_REDUCE, lambda inner: inner.allreduce([output], AllreduceOptions()), [output], on_error
        )

    def complete(self) -> None:
        for work in self.torch.works:
            work.is_done = True


@pytest.fixture
def made() -> Made:
    return Made()


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_waiting_holds_up_the_stream_and_not_the_host(made: Made) -> None:
    work = made.reduce()
    assert work.wait()
    assert made.torch.works[0].num_synchronized == 1
    assert not work.is_completed()
    assert made.watcher.num_left == 0
    made.complete()
    assert work.wait()
    assert work.is_success()
    assert (made.watcher.num_entered, made.watcher.num_left, made.watcher.num_awaited) == (1, 1, 1)
    assert made.group.wait_until_quiet(0.0)


def test_a_host_that_waits_for_so_long_is_reported(made: Made) -> None:
    work = made.reduce()
    with pytest.raises(RuntimeError, match=r"did not end within 0:00:00.01"):
        work.wait(timedelta(milliseconds=10))
    made.complete()
    assert work.wait(timedelta(milliseconds=10))


def test_a_barrier_holds_up_the_host(made: Made) -> None:
    work = made.group.barrier()
    threading.Timer(0.05, made.complete).start()
    work.wait()
    assert work.is_completed()


def test_the_next_operation_notices_what_has_ended(made: Made) -> None:
    made.reduce()
    made.complete()
    made.reduce()
    assert made.watcher.num_left == 1


def test_a_future_is_torch_s_own(made: Made) -> None:
    tensor = torch.ones(2)
    (found,) = made.reduce(tensor).get_future().wait()
    assert found is tensor


def test_tensors_live_until_the_device_is_through(made: Made) -> None:
    tensor = torch.ones(2)
    gone = weakref.ref(tensor)
    output = torch.ones(1)
    work = made.group.begin(
        Operation.ALL_REDUCE,
        lambda inner, t=tensor: inner.allreduce([t], AllreduceOptions()),
        [output],
        is_raised,
    )
    made.torch.works[0]._outputs = []
    del tensor
    work.wait()
    gc.collect()
    assert gone() is not None
    made.complete()
    assert work.look()
    gc.collect()
    assert gone() is None


# ---- abort ----------------------------------------------------------------------------------------------------------


def test_what_an_abort_has_completed_is_broken(made: Made) -> None:
    """The handle says that it is complete, and knows no error: what is in the tensors is garbage."""
    work = made.reduce()
    work.wait()
    made.group.abort()
    assert made.group.wait_until_quiet(DEADLINE_S)
    assert made.torch.works[0].is_completed()
    assert not made.torch.works[0].get_future_result().done()
    with pytest.raises(CommunicatorAborted, match="group world was aborted"):
        work.wait()
    assert not work.is_success()
    assert made.torch.num_aborts == 1


def test_what_was_seen_complete_before_an_abort_stays_done(made: Made) -> None:
    work = made.reduce()
    made.complete()
    assert work.is_completed()
    made.group.abort()
    assert work.wait()
    assert made.group.wait_until_quiet(DEADLINE_S)
    assert work.is_success()


def test_a_group_is_not_quiet_before_the_device_is(made: Made) -> None:
    made.reduce()
    made.torch.completes_at_abort = False
    made.group.abort()
    assert not made.group.wait_until_quiet(0.05)
    made.complete()
    assert made.group.wait_until_quiet(DEADLINE_S)
    assert made.device.ends


def test_a_group_is_not_quiet_while_it_is_being_aborted(made: Made) -> None:
    made.torch.may_abort.clear()
    made.group.abort()
    assert not made.group.wait_until_quiet(0.02)
    made.torch.may_abort.set()
    assert made.group.wait_until_quiet(DEADLINE_S)


def test_a_group_that_cannot_be_aborted_is_never_quiet(made: Made) -> None:
    made.torch.cannot_abort = RuntimeError("Future for ProcessGroup abort timed out after 60000 ms")
    made.group.abort()
    assert not made.group.wait_until_quiet(0.05)


def test_an_abort_waits_for_nothing_and_happens_once(made: Made) -> None:
    made.torch.may_abort.clear()
    made.group.abort()
    made.group.abort()
    made.group.release()
    assert not made.group.is_up
    with pytest.raises(CommunicatorAborted, match="group world is down"):
        made.reduce()
    made.torch.may_abort.set()
    assert made.group.wait_until_quiet(DEADLINE_S)
    assert made.torch.num_aborts == 1


def test_an_abort_that_took_longer_than_an_operation_may_has_ended_all_the_same() -> None:
    made = Made()
    made.group.set_timeout(timedelta(milliseconds=5))
    made.torch.abort_takes_s = 0.05
    made.group.abort()
    assert made.group.wait_until_quiet(DEADLINE_S)


def test_an_abort_lets_a_call_of_nccl_s_finish(made: Made) -> None:
    """Which takes microseconds: NCCL frees under it what it works with."""
    num_aborts: list[int] = []

    def in_call() -> None:
        made.group.abort()
        made.torch.is_aborted.wait(0.02)
        num_aborts.append(made.torch.num_aborts)

    made.torch.in_call = in_call
    made.reduce()
    assert num_aborts == [0]
    assert made.group.wait_until_quiet(DEADLINE_S)
    assert made.torch.num_aborts == 1


def test_a_call_that_waits_in_nccl_is_freed_by_an_abort(made: Made) -> None:
    """Sends and receives connect when they are first used, and wait for the peer in the call."""

    def in_call() -> None:
        made.group.abort()
        assert made.torch.is_aborted.wait(DEADLINE_S)

    made.torch.in_call = in_call
    with pytest.raises(CommunicatorAborted):
        made.group.send([torch.ones(1)], 1, 0)
    assert made.group.wait_until_quiet(DEADLINE_S)


def test_no_handle_of_torch_s_is_asked_while_an_abort_holds_its_lock(made: Made) -> None:
    work = made.reduce()
    made.torch.may_abort.clear()
    made.group.abort()
    assert made.torch.has_begun_to_abort.wait(DEADLINE_S)
    with pytest.raises(CommunicatorAborted):
        work.wait()
    assert work.is_completed()
    made.torch.may_abort.set()
    assert made.group.wait_until_quiet(DEADLINE_S)


def test_a_host_that_waits_is_freed_by_an_abort(made: Made) -> None:
    work = made.group.barrier()
    threading.Timer(0.05, made.group.abort).start()
    with pytest.raises(CommunicatorAborted):
        work.wait()


def test_an_error_that_was_dealt_with_is_not_raised(made: Made) -> None:
    work = made.reduce(echoes=True)
    made.group.abort()
    assert made.group.wait_until_quiet(DEADLINE_S)
    assert work.wait()
    assert made.told == ["group world was aborted", "went on"]
    (found,) = work.get_future().wait()
    assert found.tolist() == [1.0, 1.0]


def test_closing_a_quiet_group_keeps_it(made: Made) -> None:
    made.reduce().wait()
    made.complete()
    assert made.group.wait_until_quiet(0.0)
    made.group.close()
    assert made.group.claim(3) == GroupClaim(3, 1, {}, {})
    made.group.reopen()
    assert made.group.is_up
    assert made.torch.num_aborts == 0


def test_closing_looks_at_the_device_and_calls_nothing_of_the_script_s(made: Made) -> None:
    made.reduce()
    made.complete()  # no process has looked
    made.group.close()
    assert made.told == []
    assert made.watcher.num_left == 0
    assert made.group.wait_until_quiet(0.0)
    assert made.group.claim(1) == GroupClaim(1, 1, {}, {})


def test_closing_in_the_middle_aborts(made: Made) -> None:
    made.reduce()
    made.group.close()
    assert made.group.wait_until_quiet(DEADLINE_S)
    assert made.torch.num_aborts == 1
    assert made.group.claim(1) is None


def test_an_operation_in_the_background_is_not_counted_and_nothing_stays(made: Made) -> None:
    work = made.group.background.send([torch.ones(1)], 1, 0)
    made.complete()
    assert work.is_completed()
    assert (made.group.num_begun, made.watcher.num_entered, made.watcher.num_left) == (0, 0, 0)
    made.group.close()
    assert made.group.claim(1) is None


# ---- what the watchdog finds ----------------------------------------------------------------------------------------


def test_an_operation_that_the_watchdog_has_given_up_is_late_and_not_done(made: Made) -> None:
    work = made.reduce()
    work.wait()
    made.torch.give_up()
    with pytest.raises(RuntimeError, match=r"all_reduce did not end within 60 s") as error:
        work.wait()
    assert made.group.cause_of(error.value) is FailureCause.DEADLINE
    assert made.group.is_up, "the group judges by the cause"
    made.group.close()
    assert made.group.wait_until_quiet(DEADLINE_S)
    assert made.group.claim(1) is None


def test_a_broken_connection_is_told_as_one(made: Made) -> None:
    work = made.reduce()
    made.torch.error = ErrorType.COMM_ERROR
    with pytest.raises(RuntimeError, match=r"NCCL has failed .*COMM_ERROR") as error:
        work.wait()
    assert made.group.cause_of(error.value) is FailureCause.CONNECTION
    assert not made.group.wait_until_quiet(0.01), "the kernel has not ended"
    made.group.abort()
    assert made.group.wait_until_quiet(DEADLINE_S)


def test_an_error_that_a_look_at_the_handle_has_found_counts_before_the_watchdog_has_told_the_group(made: Made) -> None:
    """Torch calls the handle complete for its error alone; the kernel still runs."""
    work = made.reduce()
    made.torch.works[0].error = RuntimeError("NCCL error: remote process exited or there was a network error")
    with pytest.raises(RuntimeError, match=r"NCCL has failed: COMM_ERROR") as error:
        work.wait()
    assert made.group.cause_of(error.value) is FailureCause.CONNECTION
    assert not work.is_success()
    assert not made.group.wait_until_quiet(0.01), "the kernel has not ended"


def test_a_call_that_fails_because_the_watchdog_has_given_up_is_late(made: Made) -> None:
    """Torch says only that the communicator was aborted, as it does when a peer is gone."""
    made.torch.give_up()
    with pytest.raises(RuntimeError, match=r"all_reduce did not end within 60 s") as error:
        made.reduce()
    assert made.group.cause_of(error.value) is FailureCause.DEADLINE
    assert made.group.wait_until_quiet(0.0)


def test_an_error_of_the_device_is_raised(made: Made) -> None:
    work = made.reduce()
    made.torch.works[0].raises = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access") as error:
        work.wait()
    assert made.group.cause_of(error.value) is FailureCause.CALL


def test_what_ends_after_this_rank_has_left_is_not_done(made: Made) -> None:
    work = made.reduce()
    made.group.leave()
    made.group.leave()
    assert made.group.wait_until_quiet(DEADLINE_S)
    with pytest.raises(RuntimeError, match="this rank has left"):
        work.wait()
    assert made.torch.num_aborts == 1


def test_the_timeout_is_torch_s(made: Made) -> None:
    assert made.torch.timeout == MINUTE
    made.group.set_timeout(timedelta(seconds=7))
    assert made.torch.timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("NCCL communicator was aborted on rank 1.", FailureCause.CONNECTION),
        ("NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO)", FailureCause.CONNECTION),
        ("NCCL error in: x.cpp:1, invalid usage", FailureCause.CALL),
        ("Cannot use ReduceOp.BAND with NCCL", FailureCause.CALL),
        ("unhandled cuda error", FailureCause.CALL),
    ],
)
def test_causes(made: Made, message: str, cause: FailureCause) -> None:
    assert made.group.cause_of(RuntimeError(message)) is cause


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_graph_that_captures_a_collective_is_refused(made: Made) -> None:
    made.device.is_recording = True
    with pytest.raises(UsageError, match="a CUDA graph captures a collective"):
        made.reduce()
    assert made.torch.works == []


def test_a_tensor_on_another_device_is_refused(made: Made) -> None:
    with pytest.raises(UsageError, match="carries tensors on cpu, this process's own device, and this one is on meta"):
        made.reduce(torch.ones(1, device="meta"))


def test_what_torch_refuses_is_not_under_way(made: Made) -> None:
    def refused(_inner: object) -> dist.Work:
        raise ValueError("Tensors must be CUDA and dense")

    with pytest.raises(ValueError, match="Tensors must be CUDA"):
        made.group.begin(Operation.ALL_REDUCE, refused, [], lambda _error: None)
    assert made.group.wait_until_quiet(0.0)
    assert (made.watcher.num_entered, made.watcher.num_left) == (1, 1)


# ---- connecting -----------------------------------------------------------------------------------------------------


def test_the_store_serves_for_connecting_only() -> None:
    stores: list[Store] = []
    inside: list[object] = []

    def ask(store: Store) -> None:
        stores.append(store)
        store.set("id", "seven")
        store.wait(["id"], timedelta(seconds=5))
        inside.extend([store.get("id"), store.check(["id"])])

    inner = HashStore()
    group = NcclCommunicator("world", Watcher(), TwinDevice(ask))
    group.connect(inner, 0, 1, DEADLINE, MINUTE)
    assert inside == [b"seven", True]
    with pytest.raises(RuntimeError, match="after the group was connected"):
        stores[0].set("exception_dump", "1")
    assert inner.check(["exception_dump"]) is False
    assert stores[0].check(["id"]) is False
    with pytest.raises(RuntimeError, match="after the group was connected"):
        stores[0].get("id")
    with pytest.raises(RuntimeError, match="after the group was connected"):
        stores[0].wait(["id"])


def test_a_member_that_does_not_come_holds_up_nobody_for_longer_than_the_deadline() -> None:
    never = threading.Event()
    group = NcclCommunicator("world", Watcher(), TwinDevice(lambda store: never.wait(DEADLINE_S) and None))
    with pytest.raises(RuntimeError, match=r"group world, rank 0: not all 2 members connected in 0.05 s"):
        group.connect(HashStore(), 0, 2, timedelta(seconds=0.05), MINUTE)
    assert not group.is_up
    group.abort()
    assert group.wait_until_quiet(0.0)
    never.set()


def test_connecting_ends_when_the_group_is_aborted() -> None:
    never = threading.Event()
    group = NcclCommunicator("world", Watcher(), TwinDevice(lambda store: never.wait(DEADLINE_S) and None))
    threading.Timer(0.05, group.abort).start()
    with pytest.raises(CommunicatorAborted, match="aborted while it was being connected"):
        group.connect(HashStore(), 0, 2, DEADLINE, MINUTE)
    never.set()


def test_an_error_of_connecting_is_raised() -> None:
    def fail(_store: Store) -> None:
        raise RuntimeError("NCCL error in: NCCLUtils.cpp, unhandled system error")

    with pytest.raises(RuntimeError, match="unhandled system error"):
        NcclCommunicator("world", Watcher(), TwinDevice(fail)).connect(HashStore(), 0, 2, DEADLINE, MINUTE)


def test_a_gpu_has_nccl_where_torch_was_built_with_it() -> None:
    made = backends_of(torch.device("cuda", 0))["cuda"]("world", Watcher(), "127.0.0.1")
    assert isinstance(made, NcclCommunicator) is dist.is_nccl_available()


def test_the_twin_is_no_gentler_than_torch() -> None:
    """What keepstep may not rely on raises in the twin."""
    work = TwinWork(TwinGroup(MINUTE), [])
    with pytest.raises(NotImplementedError):
        work.is_success()
    for ask in (work.wait, work.synchronize):
        with pytest.raises(AssertionError):
            ask()
    with pytest.raises(TypeError):
        work.exception()


# ---- errors that were never reported --------------------------------------------------------------------------------


def test_an_error_that_comes_after_the_wait_is_raised_by_a_look_once(made: Made) -> None:
    made.reduce().wait()
    made.group.look()
    made.torch.give_up()
    with pytest.raises(RuntimeError, match="did not end within 60 s"):
        made.group.look()
    made.group.look()


def test_an_error_that_somebody_was_told_of_is_not_raised_again(made: Made) -> None:
    work = made.reduce()
    made.torch.give_up()
    with pytest.raises(RuntimeError, match="did not end within 60 s"):
        work.wait()
    made.group.look()


def test_an_error_that_was_dealt_with_is_raised_by_no_look(made: Made) -> None:
    made.reduce(echoes=True).wait()
    made.torch.give_up()
    made.group.look()
    assert made.told == ["group world: all_reduce did not end within 60 s (began 0.0 s ago)"]


def test_an_abort_is_no_news(made: Made) -> None:
    made.reduce().wait()
    made.group.abort()
    assert made.group.wait_until_quiet(DEADLINE_S)
    made.group.look()
