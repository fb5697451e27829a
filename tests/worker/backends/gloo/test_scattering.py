"""reduce_scatter as torch's gloo has it, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import DEADLINE_S, file_store, run_ranks
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, ReduceOp, ReduceScatterOptions
from torch.utils._python_dispatch import TorchDispatchMode

from keepstep.worker.backends.gloo.scattering import CopyingWork, ScatteringGloo

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def options(operation: ReduceOp.RedOpType = ReduceOp.SUM) -> ReduceScatterOptions:
    chosen = ReduceScatterOptions()
    chosen.reduceOp = operation
    return chosen


def groups(path: Path, rank: int, size: int) -> list[Any]:
    """Torch's own, and keepstep's."""
    kinds: list[Any] = [ProcessGroupGloo, ScatteringGloo]
    timeout = timedelta(seconds=DEADLINE_S)
    return [kind(file_store(path, number), rank, size, timeout) for number, kind in enumerate(kinds)]


def scatter_by_both(rank: int, size: int, path: Path, seed: int) -> list[str]:
    both = groups(path, rank, size)
    common, mine = random.Random(seed), torch.Generator().manual_seed(seed + rank)
    wrong = []
    for dtype in DTYPES:
        for operation in (ReduceOp.SUM, ReduceOp.MAX):
            shape = (common.randint(1, 5000), common.randint(1, 3))
            source = (torch.randn(size, *shape, generator=mine) * 100).to(dtype)
            for form in ("list", "tensor"):
                found = [scattered(group, form, source, operation) for group in both]
                if not torch.equal(*found):
                    wrong.append(f"{form} {dtype} {operation} {shape}")
    return wrong


def scattered(group: Any, form: str, source: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
    before, output = source.clone(), torch.empty_like(source[0])
    if form == "list":
        work = group.reduce_scatter([output], [list(source)], options(operation))
    else:
        work = group._reduce_scatter_base(output, source.flatten(0, 1), options(operation))
    work.wait()
    if isinstance(work, CopyingWork):
        assert work.is_completed()
        work.copy()
    assert torch.equal(source, before)
    return output


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_are_those_of_torchs_own(size: int, tmp_path: Path, seed: int) -> None:
    assert run_ranks(size, scatter_by_both, tmp_path, seed) == [[]] * size


def ask_wrongly(rank: int, size: int, path: Path) -> list[list[str]]:
    """The errors of torch's own, and of keepstep's."""
    both = groups(path, rank, size)
    work = both[1]._reduce_scatter_base(torch.ones(1), torch.ones(size), options(ReduceOp.BAND))
    with pytest.raises(RuntimeError, match="ReduceOp"):
        work.get_future().wait()
    with pytest.raises(RuntimeError, match="ReduceOp"):  # the handle is done a little later than its future
        work.wait()
    assert work.is_completed()
    return [wrong_calls(group, size) for group in both]


def wrong_calls(group: Any, size: int) -> list[str]:
    one, few, many = torch.ones(1), torch.ones(size), torch.ones(size + 1)
    band = options(ReduceOp.BAND)
    calls: list[Callable[[], dist.Work]] = [
        lambda: group.reduce_scatter([one], [[one]], options()),
        lambda: group.reduce_scatter([one] * 2, [[one] * size] * 2, options()),
        lambda: group.reduce_scatter([one], [[one] * size], band),
        lambda: group._reduce_scatter_base(one, many, options()),
        lambda: group._reduce_scatter_base(one.double(), few, options()),
        lambda: group._reduce_scatter_base(one, few, band),
    ]
    return [error_of(call) for call in calls]


def error_of(call: Callable[[], dist.Work]) -> str:
    try:
        call().wait()
    except RuntimeError as error:
        return str(error).splitlines()[0].partition("] ")[2] or str(error)
    return "none"


def test_what_torch_refuses_is_refused(tmp_path: Path) -> None:
    for theirs, ours in run_ranks(2, ask_wrongly, tmp_path):
        assert theirs == ours
        assert "none" not in theirs


class Seen(TorchDispatchMode):
    """What a mode of this thread sees, such as selective activation checkpointing's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*arguments, **(keywords or {}))


def test_no_mode_sees_the_copy() -> None:
    """Which thread copies is not known; checkpointing, which counts operations twice, would count it once."""
    output = torch.zeros(2, 2)
    work = CopyingWork([], torch.arange(4.0), output)
    with Seen() as seen:
        work.copy()
    assert (output.tolist(), seen.names) == ([[0.0, 1.0], [2.0, 3.0]], [])
