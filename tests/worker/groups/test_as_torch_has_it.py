"""What torch and the script expect of a process group besides the collectives: errors, profiles, groups that end."""

import gc
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.groups.collectives import own
from tests.worker.ranks import DEADLINE_S, Watcher, join, meet, run_ranks
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

# ---- whose error it is ----------------------------------------------------------------------------------------------


IS_MONITORED_ON_GLOO_ONLY = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "none"


def calling_wrongly(rank: int, size: int, path: Path, knows: bool) -> Any:
    """What only gloo's own thread finds out: a bitwise reduction of floats; asked for by wait, future and at once."""
    watcher = Watcher(knows=knows)
    join(path, rank, size, watcher)
    works = [dist.all_reduce(own(rank, 3), op=dist.ReduceOp.BAND, async_op=True) for _ in range(2)]
    errors = [
        error_of(lambda: dist.all_reduce(own(rank, 3), op=dist.ReduceOp.BAND)),
        error_of(works[0].wait),
        error_of(works[1].get_future().wait),
    ]
    after = own(rank, 2)
    dist.all_reduce(after)
    return errors, watcher.errors, watcher.num_echoed, after.tolist()


@pytest.mark.parametrize("knows", [False, True], ids=["no-failure", "a-failure-is-known"])
def test_an_error_of_the_call_is_raised_and_no_failure(knows: bool, tmp_path: Path) -> None:
    total = (own(0, 2) + own(1, 2)).tolist()
    for errors, reported, num_echoed, after in run_ranks(2, calling_wrongly, tmp_path, knows):
        assert [("Cannot use ReduceOp.BAND" in error) for error in errors] == [not knows] * 3
        assert (reported, num_echoed, after) == ([], 3 if knows else 0, total)


def alone_in_a_barrier(rank: int, size: int, path: Path, knows: bool) -> Any:
    watcher = Watcher(knows=knows)
    join(path, rank, size, watcher)
    group = dist.new_group(timeout=timedelta(milliseconds=50))
    errors = [error_of(lambda: dist.barrier(group)) for _ in range(2)] if rank == 0 else []
    meet(path, size, "tried")
    after = own(rank, 2)
    dist.all_reduce(after)
    return errors, watcher.errors, watcher.num_echoed, after.tolist()


@pytest.mark.parametrize("knows", [False, True], ids=["no-failure", "a-failure-is-known"])
def test_a_timeout_of_the_group_is_the_callers_unless_a_failure_is_known(knows: bool, tmp_path: Path) -> None:
    (errors, reported, num_echoed, after), other = run_ranks(2, alone_in_a_barrier, tmp_path, knows)
    if knows:
        assert errors == ["none", "none"]
    else:
        assert "Timed out waiting 50ms" in errors[0]
        # Gloo closes the connections a moment later, and then says so.
        assert any(
            words in errors[1] for words in ("Timed out waiting 50ms", "Application timeout caused pair closure")
        )
    assert (reported, num_echoed) == ([], 2 if knows else 0)
    assert after == other[3] == (own(0, 2) + own(1, 2)).tolist()


# ---- as torch has it ------------------------------------------------------------------------------------------------


def resources() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def making_and_destroying(rank: int, size: int, path: Path) -> Any:
    registry, _world = join(path, rank, size)
    dist.destroy_process_group(dist.new_group())  # what is made once comes with the first
    meet(path, size, "first")
    before = resources()
    groups = [dist.new_group() for _ in range(5)]
    for group in groups:
        dist.all_reduce(own(rank, 2), group=group)
    meet(path, size, "used")
    for group in groups:
        dist.destroy_process_group(group)
    after = resources()
    meet(path, size, "destroyed")
    error = error_of(lambda: groups[0].allreduce([own(rank, 2)]))
    registry.take_down()
    registry.connect(2, rank)
    again = own(rank, 2)
    dist.all_reduce(again)
    return [now - then for now, then in zip(after, before, strict=True)], error, again.tolist()


def test_a_destroyed_group_leaves_nothing_behind_and_does_not_echo(tmp_path: Path) -> None:
    total = (own(0, 2) + own(1, 2)).tolist()
    for left, error, again in run_ranks(2, making_and_destroying, tmp_path):
        assert max(left) <= 0
        assert "group 0-1.1 was destroyed" in error or "group 0-1.2 was destroyed" in error
        assert again == total


def gloo_by_name(rank: int, size: int, path: Path) -> Any:
    registry, _world = join(path, rank, size)
    group = dist.new_group(backend="gloo")
    registry.take_down()
    registry.connect(2, rank)
    tensor = own(rank, 2)
    dist.all_reduce(tensor, group=group)
    return type(group).__name__, dist.get_backend(group), tensor.tolist(), group.group_name != "", len(registry._groups)


def test_a_group_that_is_asked_for_as_gloo_survives(tmp_path: Path) -> None:
    total = (own(0, 2) + own(1, 2)).tolist()
    assert run_ranks(2, gloo_by_name, tmp_path) == [("SurvivingGroup", "gloo", total, True, 2)] * 2


def asking_for_the_end(rank: int, size: int, path: Path, way: str) -> bool:
    """On rank 0 gloo's thread stands still for a moment between the end of its future and that of its handle, which is
    where it tells the profiler."""
    join(path, rank, size)
    if rank == 1:
        meet(path, size, "begun")
        threading.Event().wait(0.05)  # a wait first waits in gloo, for less than this
        dist.all_reduce(own(rank, 50))
        return True
    work: Any = dist.all_reduce(own(rank, 50), async_op=True)
    standing = threading.Event()
    if way != "future-of-a-moment-before":
        future = work.get_future()
    work._issued.get_future().add_done_callback(lambda _: (standing.set(), threading.Event().wait(0.1)))
    meet(path, size, "begun")
    match way:
        case "future-of-a-moment-before":
            standing.wait()
            work.get_future().wait()
        case "wait":
            work.wait()
        case "wait-behind-its-future":
            future.wait()
            work.wait()
        case _:
            while not work.is_completed():
                threading.Event().wait(0.001)
    return bool(work._issued.is_completed())


@pytest.mark.parametrize(
    "way", ["wait", "wait-behind-its-future", "ask-until-it-has-ended", "future-of-a-moment-before"]
)
def test_an_operation_has_ended_when_torchs_profiler_was_told_of_it(way: str, tmp_path: Path) -> None:
    """Else gloo's thread writes into a profile that may have been closed, and whose memory may be another's."""
    assert run_ranks(2, asking_for_the_end, tmp_path, way) == [True, True]


def waiting_in_a_callback(rank: int, size: int, path: Path) -> Any:
    join(path, rank, size)
    if rank == 1:  # rank 0 gets its answer from gloo's thread
        meet(path, size, "begun")
    work = dist.all_reduce(own(rank, 50), async_op=True)
    seen = work.get_future().then(lambda _: (work.wait(), work.is_success()))
    if rank == 0:
        meet(path, size, "begun")
    return seen.wait()


def test_a_callback_may_wait_for_its_operation(tmp_path: Path) -> None:
    assert run_ranks(2, waiting_in_a_callback, tmp_path) == [(True, True)] * 2


# ---- what is C++ in torch -------------------------------------------------------------------------------------------


def model_of(rank: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))


def joining(rank: int, size: int, path: Path, by_first_size: bool) -> Any:
    """Rank 0 has fewer inputs than rank 1, whose last gradients are divided by all ranks or by those still there."""
    join(path, rank, size)
    ddp = model_of(rank)
    gradients = []
    with ddp.join(divide_by_initial_world_size=by_first_size):
        for _ in range(1 + 2 * rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
            gc.collect()  # what Python has dropped is gone
            gradients.append(ddp.module.weight.grad.tolist())
    return gradients


@pytest.mark.parametrize(("by_first_size", "last"), [(True, 0.5), (False, 1.0)], ids=["by-all", "by-those-there"])
def test_ddp_joins_with_uneven_inputs(by_first_size: bool, last: float, tmp_path: Path) -> None:
    short, long = run_ranks(2, joining, tmp_path, by_first_size)
    assert short == [[[1.0, 1.0]]]
    assert long == [[[1.0, 1.0]]] + 2 * [[[last, last]]]


def half_precision(rank: int, size: int, path: Path, is_down: bool) -> Any:
    """Gradients by DDP's own C++ hook for float16, with torch's Python hook beside it."""
    registry, _world = join(path, rank, size)
    built_in, by_hook = model_of(rank), model_of(rank)
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    by_hook.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if is_down:
        registry.take_down()
    for ddp in (built_in, by_hook):
        ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
    return built_in.module.weight.grad.tolist(), by_hook.module.weight.grad.tolist()


@pytest.mark.parametrize("is_down", [False, True], ids=["up", "down"])
def test_the_built_in_hook_for_float16(is_down: bool, tmp_path: Path) -> None:
    for rank, (built_in, by_hook) in enumerate(run_ranks(2, half_precision, tmp_path, is_down)):
        mean = (1.0 + rank) / 2 if is_down else 1.5  # an echoed sum is this rank's own part
        assert built_in == by_hook == [[mean, mean]]


def failing_half_precision(rank: int, size: int, path: Path) -> str:
    join(path, rank, size)
    work = dist.all_reduce(own(rank, 3).half(), op=dist.ReduceOp.BAND, async_op=True)
    return error_of(work.get_future().wait)


def test_a_future_of_float16_ends_with_the_error(tmp_path: Path) -> None:
    for error in run_ranks(2, failing_half_precision, tmp_path):
        assert "Cannot use ReduceOp.BAND" in error


def compiled(rank: int, size: int, path: Path) -> Any:
    join(path, rank, size)
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    call = torch.compile(ddp, backend="aot_eager")
    for _ in range(2):
        call(torch.eye(2) * (1 + rank)).sum().backward()
    return [parameter.grad.tolist() for parameter in ddp.parameters()]


def test_a_compiled_ddp_trains(tmp_path: Path) -> None:
    first, second = run_ranks(2, compiled, tmp_path)
    assert first == second


# ---- what a rank that gave up leaves to the others ------------------------------------------------------------------


def barrier_without_one(rank: int, size: int, path: Path) -> str:
    _registry, _world = join(path, rank, size, Watcher(echoes=False))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
    error = "absent"
    if rank != 1:
        error = error_of(lambda: dist.monitored_barrier(group, timeout=timedelta(milliseconds=200)))
    meet(path, size, "tried")
    return error


def test_a_rank_whose_deadline_has_passed_frees_the_others(tmp_path: Path) -> None:
    first, absent, other = run_ranks(3, barrier_without_one, tmp_path)
    assert "Rank 1 failed to pass monitoredBarrier" in first
    assert absent == "absent"
    assert "Connection closed by peer" in other


def asking(rank: int, size: int, path: Path) -> Any:
    """What torch's own functions and scripts ask a group and its works for."""
    _registry, world = join(path, rank, size)
    world.set_timeout(timedelta(seconds=7))
    backend = world._get_backend(torch.device("cpu"))
    before = world._get_sequence_number_for_group()
    work = dist.all_reduce(own(rank, 2), async_op=True) if rank == 0 else None
    early = error_of(work.result) if work is not None else ""
    meet(path, size, "asked")
    work = work or dist.all_reduce(own(rank, 2), async_op=True)
    work.wait()
    return (
        (backend is world, backend.options.backend, backend.options._timeout, world._device_types),
        (before, world._get_sequence_number_for_group(), world.bound_device_id),
        early,
        work.result()[0].tolist(),
        error_of(lambda: world._get_backend(torch.device("cuda"))),
        error_of(dist.monitored_barrier),
    )


def test_a_group_answers_what_a_user_of_gloo_asks(tmp_path: Path) -> None:
    answers = run_ranks(2, asking, tmp_path)
    for about, numbers, _early, result, cuda, monitored in answers:
        assert about == (True, "keepstep", timedelta(seconds=7), [torch.device("cpu")])
        assert numbers == (0, 1, None)
        assert result == (own(0, 2) + own(1, 2)).tolist()
        assert "No backend type associated with device type cuda: group world is keepstep's" in cuda
        if IS_MONITORED_ON_GLOO_ONLY:
            assert "monitored_barrier is only implemented for GLOO backend" in monitored
        else:
            assert monitored == "none"
    assert "Should call wait() before result()" in answers[0][2]
