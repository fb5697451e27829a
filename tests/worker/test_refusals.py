"""The table in USAGE.md of what protect() refuses: each row refuses, and protect() refuses nothing that has no row.

So it is with what else the worker refuses: each is described, or is a slip that its message explains.
"""

import enum
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.jobs import ROOT
from tests.worker import refusals
from tests.worker.ranks import file_store, run_ranks
from tests.worker.state.parts import Keeps, small
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.session import Session

Objects = dict[str, Any]
Make = Callable[[Path], Objects]


class Level(enum.IntEnum):
    LOW = 1


class DeviceMesh:
    """Of ranks that the job does not have; recognised by its name."""

    mesh = torch.tensor([5, 6])


def strided() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("columns", torch.arange(6.0).reshape(2, 3)[:, :2])
    return model


def power_sgd(_path: Path) -> Objects:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    model = DistributedDataParallel(small())
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1), powerSGD_hook)
    return {"model": model}


def zero(**attributes: Any) -> Callable[[Path], Objects]:
    """A ZeroRedundancyOptimizer with some attributes that are not its own."""

    def make(_path: Path) -> Objects:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = small()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        vars(optimizer).update(attributes)
        return {"model": model, "optimizer": optimizer}

    return make


def zero_of_shards(_path: Path) -> Objects:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = sharded(torch.nn.Linear(2, 2))
    return {"model": model, "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)}


def sharded(*layers: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: torch.nn.Module = fully_shard(torch.nn.Sequential(*layers), mesh=init_device_mesh("cpu", (1,)))
    return model


def fsdp1(_path: Path) -> Objects:
    """By the name of its class, as FSDP1 is recognised."""
    model = small()
    model.append(type("FullyShardedDataParallel", (torch.nn.Linear,), {})(2, 2))
    return {"model": model}


def other_fsdp2(parameter: object = None, **of_class: Any) -> Callable[[Path], Objects]:
    """FSDP2 as another release of torch may have it."""

    def make(_path: Path) -> Objects:
        parameter_group = SimpleNamespace(fsdp_params=[parameter])
        state = SimpleNamespace(_fsdp_param_groups=[parameter_group])
        methods = {"_get_fsdp_state": lambda _self: state}
        return {"model": type("FSDPModule", (torch.nn.Linear,), methods | of_class)(2, 2)}

    return make


def other_dtensor(_path: Path) -> Objects:
    """A DTensor as another release of torch may have it."""
    kind = type("DTensor", (torch.Tensor,), {"__deepcopy__": lambda self, _memo: self})
    return {"model": small(), "thing": Keeps({"average": torch.ones(2).as_subclass(kind)})}


def foreign_mesh(_path: Path) -> Objects:
    mesh = SimpleNamespace(get_all_groups=lambda: [object()])
    group = SimpleNamespace(fsdp_params=[], mesh_info=SimpleNamespace(mesh=mesh))
    state = SimpleNamespace(_fsdp_param_groups=[group])
    methods = {"_get_fsdp_state": lambda _self: state, "reset_iter_state": None}
    return {"model": type("FSDPModule", (torch.nn.Linear,), methods)(2, 2)}


def pipeline(kind: str, num_stages: int, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> tuple[Any, Any]:
    """All stages of a pipeline on one rank, and its schedule."""
    from torch.distributed import pipelining

    modules = torch.nn.ModuleList(wrap(torch.nn.Linear(2, 2)) for _ in range(num_stages))
    stages = [pipelining.PipelineStage(part, i, num_stages, torch.device("cpu")) for i, part in enumerate(modules)]
    schedule = pipelining.schedules.get_schedule_class(kind)(stages if num_stages > 1 else stages[0], 2)
    return modules, schedule


kept: list[object] = []
"""A script keeps its schedule."""


def pipeline_alone(_path: Path) -> Objects:
    modules, schedule = pipeline("GPipe", 1, torch.nn.Sequential)
    kept.append(schedule)
    return {"model": modules}


def zero_bubble(_path: Path) -> Objects:
    modules, schedule = pipeline("InterleavedZeroBubble", 2, DistributedDataParallel)
    return {"model": modules, "schedule": schedule}


def other_schedule(**attributes: Any) -> Callable[[Path], Objects]:
    """A schedule as another release of torch may have it."""

    def make(_path: Path) -> Objects:
        schedule = type("_PipelineSchedule", (), {})()
        vars(schedule).update({"_stage": SimpleNamespace(submod=None)} | attributes)
        return {"model": small(), "schedule": schedule}

    return make


def flat(_path: Path) -> Objects:
    """What FSDP1 leaves where a part of the model that it has wrapped is protected."""
    model = small()
    next(model.parameters())._fsdp_flattened = True
    return {"model": model}


def wrapped(_path: Path) -> Objects:
    model = small()
    HELD.append(DistributedDataParallel(model))
    return {"model": model}


HELD: list[torch.nn.Module] = []
"""What a script would keep."""


def trained(_path: Path) -> Objects:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return {"model": model}


def sparse(_path: Path) -> Objects:
    return {"model": DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))}


def ddp(**flags: bool) -> Callable[[Path], Objects]:
    return lambda _path: {"model": DistributedDataParallel(torch.nn.Linear(2, 2), **flags)}


def no_folder(path: Path) -> Objects:
    (path / "file").write_text("in the way")
    return {"model": small(), "checkpoint_dir": path / "file" / "saved"}


def no_right(path: Path) -> Objects:
    return {"model": small(), "checkpoint_dir": path / FORBIDDEN}


FORBIDDEN = "forbidden"
"""A folder in which the test's process, which may be root, is taken to have no rights."""
SECOND_CALL = "a second call"
SHARDED = "with sharded state, what [SHARDED.md](SHARDED.md#what-is-refused) lists"
OTHER_GROUP = "DDP over a group that keepstep did not create"
ROWS: dict[str, list[Make]] = {
    "no `torch.nn.Module`": [lambda _path: {"thing": Keeps({})}],
    "an object without `state_dict()` and `load_state_dict()`": [lambda _path: {"model": small(), "thing": object()}],
    "a `state_dict()` with anything but": [lambda _path: {"model": small(), "thing": Keeps({"level": Level.LOW})}],
    "a `random.SystemRandom`": [lambda _path: {"model": small(), "noise": random.SystemRandom()}],
    "a tensor whose content is not its own memory": [
        lambda _path: {"model": small(), "thing": Keeps({"average": torch.eye(2).to_sparse()})}
    ],
    "a tensor that does not fill one run of memory": [lambda _path: {"model": strided()}],
    "FSDP1": [fsdp1, flat],
    SHARDED: [
        lambda _path: {"model": sharded(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))},
        zero(_overlap_with_ddp=True),
        zero(process_group=object()),
        zero_of_shards,
        other_fsdp2(),
        other_fsdp2(reset_iter_state=None),
        other_fsdp2(reset_iter_state=None, parameter=SimpleNamespace(unsharded_accumulated_grad=None)),
        other_dtensor,
        foreign_mesh,
        pipeline_alone,
        zero_bubble,
        other_schedule(),
        other_schedule(_stage=None),
    ],
    "an optimizer of parameters that are in no protected module": [
        lambda _path: {"model": small(), "optimizer": torch.optim.SGD(torch.nn.Linear(2, 2).parameters())}
    ],
    "`LBFGS`": [lambda _path: {"model": (model := small()), "optimizer": torch.optim.LBFGS(model.parameters())}],
    "`DDP(static_graph=True)`": [ddp(static_graph=True)],
    "`DDP(find_unused_parameters=True, gradient_as_bucket_view=True)`": [
        ddp(find_unused_parameters=True, gradient_as_bucket_view=True)
    ],
    "DDP of a module with sparse gradients": [sparse],
    "a DDP that was trained before": [trained],
    OTHER_GROUP: [],
    "a module wrapped by a DDP that is not protected": [wrapped],
    "a communication hook of DDP with a state": [power_sgd],
    "a `checkpoint_dir` that is no folder, or not writable by this process": [no_folder, no_right],
    'a `snapshot_every` other than a positive number, "auto" or "off"': [
        lambda path: {"model": small(), "snapshot_every": 0}
    ],
    "a `data_mesh` that is no `DeviceMesh`": [
        lambda path: {"model": small(), "data_mesh": "data"},
        lambda path: {"model": small(), "data_mesh": DeviceMesh()},
    ],
    "a `checkpoint_every` below 1": [lambda path: {"model": small(), "checkpoint_dir": path, "checkpoint_every": 0}],
    SECOND_CALL: [],
}


def rows() -> list[str]:
    """The first column of the table."""
    text = (ROOT / "docs" / "USAGE.md").read_text()
    section = text.split("## What protect() refuses")[1].split("\nkeepstep also refuses at run time")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| (?!argument|---)", line)]
    return [line.split(" | ")[0].removeprefix("| ") for line in lines]


def test_the_table_has_these_rows() -> None:
    found = rows()
    assert len(found) == len(ROWS)
    assert all(row.startswith(name) for row, name in zip(found, ROWS, strict=True)), found


Raised = list[tuple[str, int]]


def refused(session: Session, arguments: Objects, *, first: bool = True) -> Raised:
    """Where protect() refuses; nowhere where it does not."""
    if first:
        session._state = None  # what was refused before is no first call
    try:
        session.protect(**arguments)
    except (ConfigurationError, UsageError) as error:
        return [refusals.raised_at(error.__traceback__)]
    return []


def refused_late(session: Session) -> Raised:
    """Where a model is refused that was sharded since it was protected."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    session._state = None
    model = small()
    session.protect(model=model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    try:
        next(iter(session.steps(1)))
    except ConfigurationError as error:
        return [refusals.raised_at(error.__traceback__)]
    return []


def refuse_everything(rank: int, size: int, path: Path) -> dict[str, list[Raised]]:
    """Tries all rows; returns what became of each of their cases."""
    warnings.simplefilter("ignore")  # torch's own, when it is imported
    dist.init_process_group("gloo", store=file_store(path, 7), rank=rank, world_size=size)
    foreign = DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()
    session = keepstep.init()
    access = os.access
    os.access = lambda at, mode: (path / FORBIDDEN) not in (at, Path(at) / FORBIDDEN) and access(at, mode)
    found = {name: [refused(session, make(path)) for make in makes] for name, makes in ROWS.items()}
    found[OTHER_GROUP] = [refused(session, {"model": foreign})]
    found[SHARDED] += [refused_late(session)]
    session._state = None
    session.protect(model=small())
    found[SECOND_CALL] = [refused(session, {"model": small()}, first=False)]
    return found


def test_every_row_is_refused_and_nothing_else(tmp_path: Path) -> None:
    (found,) = run_ranks(1, refuse_everything, tmp_path)
    assert found.keys() == ROWS.keys()
    assert [name for name, cases in found.items() if not cases or not all(cases)] == []
    sites = refusals.reachable_from(Session.protect)
    assert len(sites) > 15
    raised = [where for cases in found.values() for case in cases for where in case]
    hit = {site for site in sites for where in raised if site.holds(*where)}
    assert sites - hit == set(), "protect() refuses what has no row in USAGE.md, or no case here"
    assert [where for where in raised if not any(site.holds(*where) for site in sites)] == []


# ---- everything else that the worker refuses --------------------------------------------------------------------

AT_RUN_TIME: dict[str, tuple[str, ...]] = {
    "worker.backends.own_device:refuse_sharing": (
        "the job ends with an error before it starts",
        "add `--share-gpus` (NCCL 2.30 and newer)",
    ),
    "worker.backends.nccl.communicator:NcclCommunicator._refuse": (
        "a collective in a CUDA graph",
        "or on tensors of a GPU other than the process's own",
    ),
    "worker.state.protected:ProtectedState.refuse_other_than_memory": (
        "a tensor under a number or a tuple",
        "a view of a part of a tensor in it",
    ),
    "worker.state.rollback:StepSnapshot.check_gradients": ("gradients that an earlier update has",),
    "worker.loop.reading:check_replicas": ("Create their sampler as",) * 2,
    "worker.loop.epochs:Epochs._end": ("Iterate an epoch to its last step",),
    "worker.loop.loops:Loops.batches": ("a loader that is iterated itself has no `updates`",),
    "worker.loop.loops:Loops._refuse_second_loop": ("One loop covers all epochs; keepstep refuses a second one.",),
    "worker.loop.loops:Loops._loop": ("Pass the same n to `steps(n)` on all ranks",),
    "worker.loop.loops:Loops._protected_controller": ("`session.steps()` before `protect()`",),
    "worker.loop.loops:Loops._refuse_going_back": ("If a shard has no replica, keepstep refuses `session.epochs()`",),
    "worker.loop.loops:Loops.run_step": ("",),
    "worker.loop.loops:_check_start": ("",),
    "worker.loop.stream:StreamReading._refuse_empty": ("",),
    "worker.loop.stream:StreamReading._refuse": ("refuses a loader that then gives another batch",),
    "worker.loop.stream:positioned": ("Without a position keepstep refuses such a dataset",),
    "worker.backends.gloo.threads:GlooThreads.check": ("variables or threads have other names",),
    "worker.groups.objects:check_variables": ("variables or threads have other names",),
    "worker.groups.group:SurvivingGroup._issue": ("a `state_dict()` with a collective in it",),
    "worker.loop.runner:_Call.__call__": ("refuses a function that changes a tensor argument in place",),
    "worker.jobstore.store_client:StoreClient.ask": (
        "`get()` of a key that no rank has set, raise a `UsageError` there",
    ),
    "worker.once:_check": ("",),
    "worker.once:agreed": ("consists of numbers, strings, lists and dicts", "takes at most 64 KiB"),
    "worker.once:Once.__enter__": ("",),
    "worker.publication:StepPublication.__init__": ("",),
    "worker.exchange:StartUpExchange.first_step": ("Call it before the loop, on every rank",),
    "worker.groups.registry:GroupRegistry.outside_start_up": ("it creates no process group",),
    "worker.session:Session.agree": ("Call `agree()` before the steps or between two of them",),
    "worker.session:Session.resume": ("Call it before the loop", "return int(saved[-1].stem)"),
    "worker.session:Session._first_step": ("so leave `start` out",),
    "worker.state.layout:check_first_step": ("all must load the same file",),
    "worker.session:init": ("Call it before `DDP(...)` and before creating any group",),
    "worker.session:Session.publish_weights": (
        "`session.publish_weights(folder, model, every=10)`, called after `protect()`",
    ),
    "worker.session:Session._known_data_ranks": ("", ""),
    "worker.step.snapshots:Snapshots._open": ("has no memory for a [snapshot](SHARDED.md#snapshots), the job ends",),
    "worker.step_controller:StepController._script_returns": ("a step that was yielded and not entered",),
    "worker.step_controller:StepController.begin": ("",),
    "worker.step_controller:StepController._refuse_leftover_gradients": (
        "keepstep refuses a step that ends with gradients and without an update",
    ),
    "worker.step_controller:StepController._is_in_step": (
        "of a protected optimizer outside of a step",
        "or of an unprotected one inside",
    ),
    "worker.state.checkpoint:Checkpoints.inspect": ("If none is intact, the job ends",),
    "worker.state.checkpoint:Checkpoints.start_together": (
        "not writable by this process",
        "with sharded state the job ends with an error if they do not",
    ),
    "worker.state.checkpoint:Checkpoints.load": ("a checkpoint of another model",),
    "worker.state.dcp.reading:StateReader.__init__": ("a checkpoint of another model",),
    "worker.state.dcp.reading:StateReader._optimizer": ("a checkpoint of another model",),
    "worker.state.dcp.reading:StateReader._cut": ("a checkpoint of another model",),
    "worker.state.dcp.writing:_Merged._add_tensor": ("A checkpoint that cannot be written",) * 2,
    "worker.state.dcp.writing:_Merged.write": ("A checkpoint that cannot be written",),
    "worker.state.layout:check_same_layout": ("in names, shapes, dtypes or contents",) * 3,
    "worker.state.layout:check_same_start": (
        "All replicas must have their parameters on the same type of device",
        "in names, shapes, dtypes or contents",
        "in names, shapes, dtypes or contents",
    ),
    "worker.state.layout:check_restored": ("if it differs again, the job ends with 76",),
    "worker.state.own:OwnModuleState.check": ("if it has none, and `state_dict()` gives copies",),
    "worker.state.own:OwnModuleState.load": ("if it differs again, the job ends with 76",) * 2,
    "worker.state.own:OwnOptimizerState.check": ("if it has none, and `state_dict()` gives copies",),
    "worker.state.own:OwnOptimizerState.read": ("a tensor as a key of `optimizer.state` that is no parameter of it",),
    "worker.state.own:OwnOptimizerState.load": ("if it differs again, the job ends with 76",),
    "worker.state.layout:check_same_objects": ("a checkpoint of another model",) * 2,
    "worker.state.protected:ProtectedState.refuse_added_parameters": ("parameters added to an optimizer after",),
    "worker.state.protected:ProtectedState.place_optimizer_tensor": ("a checkpoint of another model",),
    "worker.state.protected:ProtectedState.place_buffers": ("a checkpoint of another model",),
    "worker.state.tree:placed_as": ("a checkpoint of another model",),
    "worker.step.update:check_call": ("with a closure", "inside `backward()`"),
    "worker.step.update:check_gradients": ("with gradients that a backward after another update has reduced",),
    "worker.step.update:check_alone": ("with collectives in it",),
    "worker.values.attributes:State.__init__": ("",),
    "worker.values.attributes:State.__setattr__": (
        "Attributes that were not declared cannot be set",
        "keepstep refuses a later change",
    ),
    "worker.values.attributes:State.__delattr__": ("",),
    "worker.values.attributes:State.load_state_dict": ("a checkpoint of another model",),
    "worker.values.attributes:to_bytes": ("tensors without a gradient graph",),
    "worker.values.declared:DeclaredState.declare": (
        "Declare it on every rank, before the first step",
        "",
        "",
        "makes a second object",
    ),
    "worker.values.declared:DeclaredState.hand_out": ("a loop without epochs is refused",),
    "worker.values.declared:DeclaredState.check": ("keepstep refuses a later change",),
    "worker.values.declared:DeclaredState._check_size": ("64 KiB of them, and all ranks together 16 MiB",),
    "worker.values.rank_objects:RankObjects.add": ("A module or an optimizer is refused there", "with `state_dict()`"),
    "worker.values.rank_objects:RankObjects._check_size": ("the objects of all ranks together 64 MiB",),
    "worker.values.rank_objects:RankObjects.put_together": ("name the same objects on every rank",),
    "worker.values.rank_objects:_Object.encoded": ("gives a dict of such values",),
    "worker.values.rank_objects:_Object.load": ("must give after `load_state_dict()` what was loaded",),
    "worker.step.barrier:check_purposes": ("an update on some of the ranks that hold the same parameters",),
    "worker.values.declared:_LocalTable._check": (
        "only the same number of ranks can resume from it",
        "a checkpoint of another model",
    ),
}
"""By function, a phrase of USAGE.md for each of its refusals, in order; empty: a slip that its message explains."""


def test_every_refusal_at_run_time_is_described() -> None:
    by_protect = {site.function for site in refusals.reachable_from(Session.protect)}
    worker = (refusals.PACKAGE / "worker").rglob("*.py")
    sites = Counter(site.function for path in worker for site in refusals.sites_in(path))
    assert {name: num for name, num in sites.items() if name not in by_protect} == {
        name: len(phrases) for name, phrases in AT_RUN_TIME.items()
    }
    text = " ".join((ROOT / "docs" / "USAGE.md").read_text("utf-8").split())
    assert [phrase for phrases in AT_RUN_TIME.values() for phrase in phrases if phrase not in text] == []


def test_a_refusal_that_is_planted_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker").mkdir()
    path = tmp_path / "worker" / "thing.py"
    path.write_text(
        "class A:\n    def f(self):\n        if 1:\n            raise UsageError(\n                'x')\n"
        "def g():\n    raise RuntimeError\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(refusals, "PACKAGE", tmp_path)
    (site,) = refusals.sites_in(path)
    assert (site.function, site.first_line, site.last_line) == ("worker.thing:A.f", 4, 5)
    assert site.holds(str(path), 4)
    assert not site.holds(str(path), 6)


def changed_since(_rank: int, _size: int) -> str:
    session = keepstep.init()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    session.protect(model=model, optimizer=torch.optim.SGD(model.parameters()))
    model[1] = torch.nn.Linear(2, 3)
    with pytest.raises(ConfigurationError) as caught:
        next(iter(session.steps(1)))
    return str(caught.value)


def test_what_is_protected_is_looked_at_again_at_the_first_step() -> None:
    assert "parameter 2 of optimizer, [2, 2], is in no module that is protected" in run_ranks(1, changed_since)[0]
