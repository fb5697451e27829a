"""Torch's own tests of process groups (`DistributedTest`, in the wheel), called by name in ranks of our own.

Torch starts three processes for every test, and each imports torch. Here the ranks stay, and every test gets a world
anew. Torch decides by the backend's name what to run and what to expect, so the group of keepstep goes by "gloo" here.
"""

import os
import tempfile
import traceback
import types
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.worker.ranks import Watcher, file_store, meet, registry_of
from torch import distributed as dist
from torch.distributed import distributed_c10d

SIZE = 3
TIMEOUT = timedelta(seconds=20)


def set_environment(path: Path, size: int) -> None:
    """Torch's module reads its settings when it is imported, and its folder whenever a test needs it."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(size), "TEMP_DIR": str(path), "INIT_METHOD": f"file://{path}/i"}


def torchs_tests() -> types.ModuleType:
    """The module; `set_environment` comes before."""
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def names_of_tests() -> list[str]:
    """Every test of torch's class."""
    return sorted(name for name in dir(torchs_tests().DistributedTest._DistTestBase) if name.startswith("test_"))


def run_tests(rank: int, size: int, path: Path, backend: str, names: list[str]) -> dict[str, str]:
    """Runs each in a world of its own: "passed", "skipped: why" or "failed: how"."""
    (path / "barrier").mkdir(exist_ok=True)
    (path / "test_dir").mkdir(exist_ok=True)
    set_environment(path, size)
    tempfile.tempdir = str(path)
    warnings.simplefilter("ignore")
    module = torchs_tests()

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        """As torch's test_distributed_spawn.py combines them."""

    outcomes = {}
    for number, name in enumerate(names):
        world = path / f"{number}"
        world.mkdir(exist_ok=True)
        start_world(backend, world, rank, size)
        test = Tests(name)
        test.rank, test.file_name = rank, str(world / "file")
        outcomes[name] = outcome_of(test, name)
        meet(world, size, "tested")  # as torch's own runner does before a world is destroyed
        if dist.is_initialized():
            dist.destroy_process_group()
        if outcomes[name].startswith("failed"):
            break  # the ranks may be at odds
    return outcomes


def start_world(backend: str, path: Path, rank: int, size: int) -> None:
    if backend == "gloo":
        dist.init_process_group("gloo", store=file_store(path, size), rank=rank, world_size=size, timeout=TIMEOUT)
        return
    registry = registry_of(path, size, Watcher(echoes=False))
    distributed_c10d.Backend._plugins.pop("KEEPSTEP", None)
    if hasattr(dist.Backend, "KEEPSTEP"):
        del dist.Backend.KEEPSTEP
    world: Any = registry.join_world(rank, size, lambda: rank)
    registry.connect(1, rank)
    world.set_timeout(TIMEOUT)
    distributed_c10d._world.pg_map[world] = ("gloo", distributed_c10d._world.pg_map[world][1])


def outcome_of(test: unittest.TestCase, name: str) -> str:
    try:
        getattr(test, name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:  # how torch's multi-process tests tell that they skip
        return f"skipped: exit code {end.code}"
    except BaseException:  # whatever it was is the outcome
        return f"failed: {traceback.format_exc()[-1500:]}"
    return "passed"
