"""The table in USAGE.md of what protect() refuses: each row refuses, and nothing else is said to."""

import enum
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.jobs import ROOT
from tests.worker.ranks import file_store, join, run_ranks
from tests.worker.state.parts import Keeps, small
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.parallel.ddp import find_ddp
from keepstep.worker.state.protected import ProtectedState

Objects = dict[str, Any]


class Level(enum.IntEnum):
    LOW = 1


def strided() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("columns", torch.arange(6.0).reshape(2, 3)[:, :2])
    return model


def zero(_path: Path) -> Objects:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = small()
    return {"model": model, "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)}


def fsdp(_path: Path) -> Objects:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    return {"model": model}


def trained(_path: Path) -> Objects:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return {"model": model}


def ddp(**flags: bool) -> Callable[[Path], Objects]:
    return lambda _path: {"model": DistributedDataParallel(torch.nn.Linear(2, 2), **flags)}


ROWS: dict[str, Callable[[Path], Objects]] = {
    "no `torch.nn.Module`": lambda _path: {"thing": Keeps({})},
    "an object without `state_dict()` and `load_state_dict()`": lambda _path: {"model": small(), "thing": object()},
    "a `state_dict()` with anything but": lambda _path: {"model": small(), "thing": Keeps({"level": Level.LOW})},
    "a tensor that does not fill one run of memory": lambda _path: {"model": strided()},
    "`ZeroRedundancyOptimizer`": zero,
    "FSDP": fsdp,
    "`LBFGS`": lambda _path: {"model": small(), "optimizer": torch.optim.LBFGS(small().parameters())},
    "`DDP(static_graph=True)`": ddp(static_graph=True),
    "`DDP(find_unused_parameters=True, gradient_as_bucket_view=True)`": ddp(
        find_unused_parameters=True, gradient_as_bucket_view=True
    ),
    "a DDP that was trained before": trained,
}
OTHER_GROUP = "DDP over a group that keepstep did not make"
SECOND_CALL = "a second call"


def rows() -> list[str]:
    """The first column of the table."""
    text = (ROOT / "docs" / "USAGE.md").read_text()
    section = text.split("## What protect() refuses")[1].split("\nAnd at run time")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| (?!given|---)", line)]
    return [line.split(" | ")[0].removeprefix("| ") for line in lines]


def test_the_table_has_these_rows() -> None:
    found = rows()
    names = [*ROWS, OTHER_GROUP, SECOND_CALL]
    assert len(found) == len(names)
    assert all(row.startswith(name) for row, name in zip(found, names, strict=True)), found


def is_refused(objects: Objects) -> bool:
    try:
        find_ddp(ProtectedState(objects).modules)
    except ConfigurationError:
        return True
    return False


def let_through(rank: int, size: int, path: Path) -> list[str]:
    warnings.simplefilter("ignore")  # torch's own, when it is imported
    dist.init_process_group("gloo", store=file_store(path, size, 7), rank=rank, world_size=size)
    found = [OTHER_GROUP] if not is_refused({"model": DistributedDataParallel(torch.nn.Linear(2, 2))}) else []
    dist.destroy_process_group()
    join(path, rank, size)
    return found + [name for name, make in ROWS.items() if not is_refused(make(path))]


def test_every_row_is_refused(tmp_path: Path) -> None:
    assert run_ranks(1, let_through, tmp_path) == [[]]


def second_call(rank: int, size: int) -> None:
    import keepstep

    session = keepstep.init()
    session.protect(model=small())
    with pytest.raises(UsageError, match="called twice"):
        session.protect(model=small())


def test_a_second_call_is_refused() -> None:
    run_ranks(1, second_call)
