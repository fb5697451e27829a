"""An interrupted step of FSDP2 and HSDP is undone to the bit: interrupt at k, undo, compute again, compare.

Real gloo: one rank breaks its groups in its k-th collective of a step, as a recovery does, and all ranks leave the step
or compute on in echo. Every k is tried in one run: a leak of one attempt shows in the gradients of the next one.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import Watcher, file_store, join, meet, run_ranks
from torch import nn

from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.parallel.choose import layout_of
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.rollback import StepSnapshot
from keepstep.worker.step.stop_points import StopPoints

WIDTH = 6
"""With 4 and 5 features beside it: no multiple of the shards, so that shards are uneven and some are empty."""


class Block(nn.Module):
    """A residual block with an uneven shape, and a bias that not every rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 5)
        self.narrow = nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        result: torch.Tensor = x + self.narrow(torch.tanh(self.wide(self.norm(x)))) * self.scale
        return result


def sharded(variant: dict[str, Any], size: int) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if variant.get("hsdp"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": variant.get("reshard", True)}
    if variant.get("mixed"):
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks: list[nn.Module] = [Block() for _ in range(3)]
    if variant.get("checkpointing"):
        blocks = [checkpoint_wrapper(block) for block in blocks]
    model = nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 3))
    for block in blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gathered after forward or not, as torch sees fit": {"reshard": None},
    "kept gathered after forward": {"reshard": False},
    "resharded to a smaller group": {"reshard": 2, "ranks": 4},
    "mixed precision": {"mixed": True},
    "accumulation without communication": {"micro_batches": 3},
    "accumulation in mixed precision": {"micro_batches": 2, "mixed": True},
    "activation checkpointing": {"checkpointing": True},
    "HSDP": {"hsdp": True, "ranks": 4},
    "HSDP, accumulation": {"hsdp": True, "ranks": 4, "micro_batches": 2},
}


class Interrupted(Exception):
    """Leaves a step at a stop point."""


class Breaker(Watcher):
    """Takes the groups down in the k-th collective; from there on this rank leaves its step at the next stop point."""

    def __init__(self) -> None:
        super().__init__()
        self.take_down: Callable[[], None] = lambda: None
        self.break_at: int | None = None
        self.is_interrupted = False
        self.stops = True

    def entered(self, group: str, operation: Operation, peer: int) -> None:
        super().entered(group, operation, peer)
        if self.num_entered == self.break_at:
            self.is_interrupted = True
            self.take_down()

    def failed(self, group: str, error: Exception) -> bool:
        self.is_interrupted = True
        self.take_down()  # as the controller's order has every rank do
        return super().failed(group, error)

    def check(self) -> None:
        if self.is_interrupted and self.stops:
            raise Interrupted


class Rank:
    """One rank's model and what undoes a step of it."""

    def __init__(self, rank: int, size: int, path: Path, variant: dict[str, Any], seed: int) -> None:
        warnings.simplefilter("ignore")  # torch's own, when FSDP is imported
        self.rank, self.size, self.path, self.variant, self.seed = rank, size, path, variant, seed
        self.breaker = Breaker()
        self.registry, _world = join(path, rank, size, self.breaker)
        self.breaker.take_down = self._stop_all
        self.generation = 1
        torch.manual_seed(seed)
        self.model = sharded(variant, size)
        kind, options = variant.get("optimizer", ("AdamW", {}))
        trained = [p for p in self.model.parameters() if kind != "Muon" or p.ndim == 2]
        self.optimizer = getattr(torch.optim, kind)(trained, lr=0.05, **options)
        objects = {"model": self.model, "optimizer": self.optimizer}
        self.state = ProtectedState(objects, layout_of(objects))
        self.snapshot = StepSnapshot(self.state)
        StopPoints(self.state.modules, self.breaker.check, lambda _phase: None)

    def hand_out(self) -> None:
        self.snapshot.take()
        self.state.layout.hand_out()
        self.state.layout.begin_step()

    def forward_backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        count = self.variant.get("micro_batches", 1)
        draw = torch.Generator().manual_seed(self.seed + 100 * step + self.rank)
        for number in range(count):
            if count > 1:
                self.model.set_requires_gradient_sync(number == count - 1)
                self.model.set_is_last_backward(number == count - 1)
            self.model(torch.randn(5, 4, generator=draw)).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()

    def interrupted(self, step: int, at: int, stops: bool) -> None:
        """An attempt in which the groups break in the ``at``-th collective of rank 0, and its undoing."""
        self.breaker.num_entered, self.breaker.stops = 0, stops
        self.breaker.break_at = at if self.rank == 0 else None
        told = threading.Thread(target=self._await_stop)
        told.start()
        with contextlib.suppress(Interrupted):
            self.forward_backward(step)
        self.breaker.break_at = None
        self._stop_all()
        told.join()
        meet(self.path, self.size, f"end {self.generation}")
        self.undo()
        self.breaker.is_interrupted = False
        self.generation += 1
        self.registry.connect(self.generation, self.rank)

    def _stop_all(self) -> None:
        """All ranks are told of the failure, as the controller does: others may wait for this one until then."""
        self.registry.take_down()
        file_store(self.path, self.generation, "stop").set("all", b"")

    def _await_stop(self) -> None:
        file_store(self.path, self.generation, "stop").wait(["all"])
        self.registry.take_down()

    def undo(self) -> None:
        self.registry.drain()
        self.snapshot.put_back_modes()
        self.state.layout.undo(in_backward=True)
        self.snapshot.put_back()

    def contents(self) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in self.state.live_tensors()}

    def gradients(self) -> list[bytes | None]:
        found = [parameter.grad for _name, parameter in self.state.parameters()]
        return [None if grad is None else grad._local_tensor.numpy().tobytes() for grad in found]


def undone_at_every_collective(rank: int, size: int, path: Path, variant: dict[str, Any], seed: int) -> list[str]:
    (path / "interrupted").mkdir(exist_ok=True)
    me = Rank(rank, size, path / "interrupted", variant, seed)
    me.hand_out()
    me.forward_backward(0)
    me.update()
    me.hand_out()
    before = me.contents()
    me.breaker.num_entered = 0
    me.forward_backward(1)
    expected, num_collectives = me.gradients(), me.breaker.num_entered
    counts = [b for name, b in me.contents().items() if name.endswith("count")]
    me.undo()
    has_shards = any(expected) or rank == 3  # of four ranks the last one has no part of anything
    wrong = [] if has_shards and num_collectives > 5 else [f"nothing to see: {num_collectives} collectives"]
    for at in range(1, num_collectives + 1):
        me.interrupted(1, at, stops=at % 2 == 0)
        if me.contents() != before:
            wrong.append(f"at {at}: what an interrupted step may not change")
        me.state.layout.begin_step()
        me.forward_backward(1)
        if me.gradients() != expected:
            wrong.append(f"at {at} of {num_collectives}: gradients")
        if [b for name, b in me.contents().items() if name.endswith("count")] != counts:
            wrong.append(f"at {at}: buffers")
        me.undo()  # of a whole step
    return wrong


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_interrupted_in_any_collective_gives_the_same_gradients(name: str, tmp_path: Path, seed: int) -> None:
    variant = VARIANTS[name]
    for wrong in run_ranks(variant.get("ranks", 2), undone_at_every_collective, tmp_path, variant, seed):
        assert wrong == []


def the_first_step_undone(rank: int, size: int, path: Path, seed: int) -> None:
    """What the first forward of all has decided holds in its repetition: all ranks gather as often, and a new one."""
    me = Rank(rank, size, path, {"reshard": None}, seed)
    found = []
    for _attempt in range(2):
        me.hand_out()
        me.breaker.num_entered = 0
        me.forward_backward(0)
        found.append((me.gradients(), me.breaker.num_entered))
        me.undo()
    assert found[0] == found[1]


def test_the_first_step_may_be_interrupted(tmp_path: Path, seed: int) -> None:
    run_ranks(2, the_first_step_undone, tmp_path, seed)


# ---- what else a step begins and ends with --------------------------------------------------------------------------


def flags(model: Any) -> list[Any]:
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    return [group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward, state._state_ctx.is_last_backward]


def left_by_an_evaluation(rank: int, size: int, path: Path, seed: int) -> None:
    """Between two steps a rank evaluates, which leaves modules gathered; in a step it sets what holds for a part."""
    me = Rank(rank, size, path, {"reshard": False}, seed)
    me.hand_out()
    me.forward_backward(0)
    me.update()
    for come_to_rest in (me.state.check, me.hand_out):  # at the first step, and at each
        with torch.no_grad():
            me.model(torch.randn(5, 4))
        assert not any(hasattr(parameter, "_local_tensor") for parameter in me.model[0].parameters()), "nothing to see"
        come_to_rest()
        assert all(hasattr(parameter, "_local_tensor") for parameter in me.model.parameters())
    expected = flags(me.model)
    me.model.set_requires_gradient_sync(False)
    me.model.set_is_last_backward(False)
    me.model.set_reshard_after_backward(False)
    assert not any(flags(me.model))
    me.undo()
    assert flags(me.model) == expected == [True] * 4


def test_modules_begin_a_step_sharded_and_what_a_step_sets_is_put_back(tmp_path: Path, seed: int) -> None:
    run_ranks(2, left_by_an_evaluation, tmp_path, seed)


def optimizer_state_recreated(rank: int, size: int, path: Path, seed: int) -> str:
    me = Rank(rank, size, path, {"hsdp": True}, seed)
    me.hand_out()
    me.forward_backward(0)
    me.update()
    were = dict(me.state.optimizer_tensors())
    content = {name: tensor.clone() for name, tensor in me.state.live_tensors()}
    me.state.drop_optimizer_state()
    for name, tensor in were.items():
        me.state.place_optimizer_tensor(name, content[name], as_dtensor=hasattr(tensor, "_local_tensor"))
    for name, tensor in me.state.optimizer_tensors():
        assert type(tensor) is type(were[name])
        if hasattr(tensor, "_local_tensor"):
            assert tensor._spec == were[name]._spec
            assert tensor._local_tensor is not were[name]._local_tensor
    me.hand_out()
    me.forward_backward(1)
    me.update()
    return me.state.shard()


def test_replicas_have_one_shard_and_make_optimizer_state_from_local_tensors(tmp_path: Path, seed: int) -> None:
    """As on a replacement."""
    shards = run_ranks(4, optimizer_state_recreated, tmp_path, seed)
    assert shards[0] == shards[2] != shards[1] == shards[3]
