"""What torch and the script expect of a process group besides the collectives: errors, profiles, groups that end."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.groups.collectives import own
from tests.worker.ranks import Watcher, join, meet, run_ranks
from torch import distributed as dist

# ---- whose error it is ----------------------------------------------------------------------------------------------


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


def profiling(rank: int, size: int, path: Path) -> int:
    """Many short profiles, each of which ends right behind a collective."""
    join(path, rank, size)
    for _ in range(40):
        with torch.autograd.profiler.profile(record_shapes=True):
            works = [dist.all_reduce(own(rank, 50), async_op=True) for _ in range(3)]
            works[0].get_future().wait()
            for work in works:
                work.wait()
    return rank


def test_torchs_profiler_ends_with_an_operation_and_not_before(tmp_path: Path) -> None:
    assert run_ranks(2, profiling, tmp_path) == [0, 1]
