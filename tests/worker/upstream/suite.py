"""Torch's own tests of process groups (`DistributedTest`, in the wheel), called by name in ranks of our own.

Torch starts processes for every test, and each imports torch. Here the ranks stay, and every test gets a new world.
Torch decides by the backend's name what to run and what to expect, so the group of keepstep goes by "gloo" here.
"""

import json
import os
import signal
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
from torch.testing._internal.common_distributed import TEST_SKIPS

SIZE = 3
TIMEOUT = timedelta(seconds=20)
DEADLINE_S = 60
"""For one test; the slowest, of the barrier that is monitored, take a few seconds."""
TOO_SMALL = (TEST_SKIPS["small_worldsize"].message, "is out of range. Valid ranks are 0 to")


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


def run_tests(rank: int, size: int, path: Path, backend: str, names: list[str]) -> None:
    """Runs each in a world of its own up to the first that fails; `outcomes_in` has what came of them."""
    (path / "barrier").mkdir(exist_ok=True)
    (path / "test_dir").mkdir(exist_ok=True)
    set_environment(path, size)
    tempfile.tempdir = str(path)
    warnings.simplefilter("ignore")
    module = torchs_tests()

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        """As torch's test_distributed_spawn.py combines them."""

    for number, name in enumerate(names):
        world = path / f"{number}"
        world.mkdir(exist_ok=True)
        signal.alarm(DEADLINE_S)  # it ends this rank, and so all of them
        start_world(backend, world, rank, size)
        meet(world, size, "begun")  # a test may begin by destroying the world
        test = Tests(name)
        test.rank, test.file_name = rank, str(world / "file")
        outcome = outcome_of(test, name)
        (world / f"outcome.{rank}").write_text(json.dumps([name, outcome]), encoding="utf-8")
        meet(world, size, "tested")  # as torch's own runner does before a world is destroyed
        if dist.is_initialized():
            dist.destroy_process_group()
        signal.alarm(0)
        if any(found.startswith("failed") for found in outcomes_in(world.parent, size, number).values()):
            break  # the ranks may be at odds


def outcomes_in(path: Path, size: int, number: int | str = "*") -> dict[str, str]:
    """What came of each test that all ranks have ended: "passed", "skipped: why" or "failed: how"."""
    found: dict[str, list[str]] = {}
    for file in sorted(path.glob(f"{number}/outcome.*")):
        name, outcome = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(name, []).append(outcome)
    return {
        name: min(outcomes, key=lambda outcome: outcome.partition(":")[0])  # failed, passed, skipped
        for name, outcomes in found.items()
        if len(outcomes) == size
    }


def start_world(backend: str, path: Path, rank: int, size: int) -> None:
    if backend == "gloo":
        dist.init_process_group("gloo", store=file_store(path), rank=rank, world_size=size, timeout=TIMEOUT)
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
        reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        return f"skipped: {reasons.get(end.code, end.code)}"  # type: ignore[call-overload]  # not always a number
    except BaseException:  # whatever it was is the outcome
        return f"failed: {traceback.format_exc()[-1500:]}"
    return "passed"
