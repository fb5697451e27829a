"""DDP's buckets have one layout, whatever the reducer went through. DDP needs a group: each test has its processes."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import Watcher, file_store, join, registry_of, run_ranks
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError
from keepstep.worker.parallel.ddp import DataParallel, find_ddp, refuse_hooks, settle_buckets, share_buffers
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.rollback import StepSnapshot

CAP_MIB = 0.0001
"""26 floats: some buckets with one parameter, some with several."""
Layout = list[list[int]]


class Net(torch.nn.Module):
    """Used in another order than it is declared in, with a frozen parameter and one shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(6, 3)
        self.norm = torch.nn.BatchNorm1d(6)
        self.first = torch.nn.Linear(4, 6)
        self.middle = torch.nn.Linear(6, 6)
        self.frozen = torch.nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(torch.relu(self.norm(self.first(x))) * self.frozen)
        result: torch.Tensor = self.last(self.middle(y))
        return result


NUM_TRAINED = len([parameter for parameter in Net().parameters() if parameter.requires_grad])


class Interrupted(Exception):
    """Ends a backward halfway."""


def make(settings: dict[str, Any], seed: int) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(Net(), bucket_cap_mb=CAP_MIB, **settings)


def layout(ddp: DistributedDataParallel) -> Layout:
    """The parameters of each bucket, by their number, in the order in which their gradients lie there."""
    numbers = {id(parameter): number for number, parameter in enumerate(ddp._module_parameters)}
    return [
        [numbers[id(parameter)] for parameter in bucket.parameters()]
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
    ]


def backward(ddp: DistributedDataParallel, seed: int) -> None:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    ddp(inputs).square().mean().backward()


def interrupted_backward(ddp: DistributedDataParallel, seed: int, at: int) -> None:
    """A backward that ends when the gradient of the ``at``-th trained parameter is there."""

    def stop(gradient: torch.Tensor) -> None:
        raise Interrupted

    parameter = [parameter for parameter in ddp._module_parameters if parameter.requires_grad][at]
    hook = parameter.register_hook(stop)
    try:
        backward(ddp, seed)
    except Interrupted:
        return
    finally:
        hook.remove()
    raise AssertionError(f"the backward was not interrupted at parameter {at}")


def gradients(ddp: DistributedDataParallel) -> list[bytes | None]:
    return [None if p.grad is None else p.grad.contiguous().numpy().tobytes() for p in ddp.parameters()]


def train_step(ddp: DistributedDataParallel, seed: int) -> list[bytes | None]:
    ddp.zero_grad()
    backward(ddp, seed)
    return gradients(ddp)


def alone_in_echo(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Layouts and gradients by the history of the reducer; every history ends in `settle_buckets` and one step."""
    registry_of(Path(), 3, Watcher()).join_world(1, 3, lambda: 1)
    found: dict[str, Any] = {}

    def note(name: str, ddp: DistributedDataParallel) -> None:
        buffers = [buffer.clone() for buffer in ddp.buffers()]
        parameters = [parameter.detach().clone() for parameter in ddp.parameters()]
        settle_buckets(ddp)
        assert all(torch.equal(a, b) for a, b in zip(ddp.buffers(), buffers, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), parameters, strict=True))
        settled = layout(ddp)
        ddp.module.norm.reset_running_stats()  # they differ by history, and shall make no difference here
        ddp.eval()
        steps = [train_step(ddp, seed + step) for step in range(3)]
        found[name] = (settled, steps, layout(ddp))

    note("fresh", make(settings, seed))
    twice = make(settings, seed)
    settle_buckets(twice)
    note("settled twice", twice)
    trained = make(settings, seed)
    train_step(trained, seed + 100)
    note("one step unsettled", trained)
    for num_steps in (1, 2, 4):
        settled = make(settings, seed)
        settle_buckets(settled)
        for step in range(num_steps):
            train_step(settled, seed + 100 + step)
        note(f"{num_steps} steps settled", settled)
    forward_only = make(settings, seed)
    forward_only(torch.randn(5, 4))
    note("forward only", forward_only)
    for at in range(NUM_TRAINED):
        first = make(settings, seed)
        interrupted_backward(first, seed + 200, at)
        note(f"first step interrupted at {at}", first)
        later = make(settings, seed)
        settle_buckets(later)
        train_step(later, seed + 100)
        interrupted_backward(later, seed + 200, at)
        settle_buckets(later)
        interrupted_backward(later, seed + 201, at)
        note(f"twice interrupted at {at}", later)
    return found


def _alone(rank: int, size: int, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    return alone_in_echo(settings, seed)


MODES = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "no buffers": {"broadcast_buffers": False},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_history_ends_in_the_same_layout(mode: str, seed: int) -> None:
    found = run_ranks(1, _alone, MODES[mode], seed)[0]
    expected_layout, expected_steps, _after = found["fresh"]
    assert len(found) == 7 + 2 * NUM_TRAINED
    assert len(expected_layout) >= 2, "with a single bucket every layout is the same"
    assert all(any(gradient) for gradient in expected_steps[0] if gradient)
    if mode != "find unused":
        order = [number for bucket in expected_layout for number in bucket]
        assert order == sorted(order, reverse=True), "the last layer's gradients are ready first"
    for name, (settled, steps, after) in found.items():
        assert settled == expected_layout, name
        assert after == expected_layout, f"{name}: the layout changed later on"
        assert steps == expected_steps, f"{name}: other gradients"


def unsettled_layouts(rank: int, size: int, seed: int) -> tuple[Layout, Layout]:
    registry_of(Path(), 3, Watcher()).join_world(1, 3, lambda: 1)
    ddp = make({}, seed)
    first = layout(ddp)
    for step in range(2):
        train_step(ddp, seed + step)
    return first, layout(ddp)


def test_without_settling_the_layout_changes_after_the_first_step(seed: int) -> None:
    """The reason for all this, and the proof that these tests can see it."""
    first, rebuilt = run_ranks(1, unsettled_layouts, seed)[0]
    assert first != rebuilt


def what_happens_to_gradients(rank: int, size: int, settings: dict[str, Any], seed: int) -> list[Any]:
    registry_of(Path(), 3, Watcher()).join_world(1, 3, lambda: 1)
    ddp = make(settings, seed)
    settle_buckets(ddp)
    none = [p.grad is None for p in ddp.parameters()]
    train_step(ddp, seed)
    before = gradients(ddp)
    settle_buckets(ddp)
    after = gradients(ddp)
    zeros = [None if gradient is None else bytes(len(gradient)) for gradient in before]
    return [all(none), after == before, after == zeros]


def test_gradients_are_left_alone_unless_they_lie_in_the_buckets(seed: int) -> None:
    assert run_ranks(1, what_happens_to_gradients, {}, seed) == [[True, True, False]]
    assert run_ranks(1, what_happens_to_gradients, {"find_unused_parameters": True}, seed) == [[True, True, False]]
    assert run_ranks(1, what_happens_to_gradients, {"gradient_as_bucket_view": True}, seed) == [[True, False, True]]


# ---- a failure in the middle of a backward, with real gloo ----------------------------------------------------------


def train_through(rank: int, size: int, path: Path, settings: dict[str, Any], at: int | None, seed: int) -> list[bytes]:
    """Four steps; with ``at`` the groups are lost in the second, and rank 0's backward ends there."""
    registry, _world = join(path, rank, size)
    ddp = make(settings, seed)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    state = ProtectedState({"model": ddp, "optimizer": optimizer})
    snapshot = StepSnapshot(state)
    settle_buckets(ddp)
    for step in range(4):
        optimizer.zero_grad()
        number = seed + 10 * step + rank
        snapshot.take()
        if at is not None and step == 1:
            registry.take_down()
            if rank == 0:
                interrupted_backward(ddp, number, at)
            else:
                backward(ddp, number)  # to its end, in echo
            settle_buckets(ddp)
            snapshot.put_back()
            registry.connect(2, rank)
        backward(ddp, number)
        share_buffers(ddp)
        optimizer.step()
    return [value.numpy().tobytes() for value in ddp.state_dict().values()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [0, NUM_TRAINED // 2, NUM_TRAINED - 1])
def test_a_step_computed_again_gives_the_same_weights(mode: str, at: int, tmp_path: Path, seed: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = run_ranks(3, train_through, tmp_path / "a", MODES[mode], None, seed)
    assert expected[0] != run_ranks(3, train_through, tmp_path / "b", MODES[mode], None, seed + 1)[0]
    assert run_ranks(3, train_through, tmp_path, MODES[mode], at, seed) == expected


# ---- what is found, and what is refused -----------------------------------------------------------------------------


def refusals(rank: int, size: int, path: Path) -> list[Any]:
    dist.init_process_group("gloo", store=file_store(path, 7), rank=rank, world_size=size)
    foreign = DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()
    _registry, _world = join(path, rank, size)
    inner = DistributedDataParallel(torch.nn.Linear(2, 2))
    both = torch.nn.ModuleList([torch.nn.Linear(1, 1), inner])
    assert find_ddp({"model": both, "plain": torch.nn.Linear(1, 1)}) == [inner]
    wrong = {
        "a": DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=True),
        "b": foreign,
        "c": DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=True, gradient_as_bucket_view=True),
    }
    trained = wrong["d"] = DistributedDataParallel(torch.nn.Linear(2, 2))
    trained(torch.ones(1, 2)).sum().backward()
    assert find_ddp({"once": trained}) == [trained], "its layout is not settled before the next forward"
    trained(torch.ones(1, 2))
    texts = []
    for name, module in wrong.items():
        try:
            find_ddp({name: module})
        except ConfigurationError as error:
            texts.append(str(error))
    return texts


def test_what_cannot_be_protected_is_refused_by_name(tmp_path: Path) -> None:
    static, foreign, both, trained = run_ranks(1, refusals, tmp_path)[0]
    assert static.startswith("protect(a=...): DistributedDataParallel(static_graph=True) learns its graph")
    assert foreign.startswith("protect(b=...): its process group was not made by keepstep; call keepstep.init() before")
    assert both.startswith("protect(c=...): DistributedDataParallel(find_unused_parameters=True, gradient_as_bucket_vi")
    assert trained.startswith("protect(d=...): this DistributedDataParallel has trained already and keeps the bucket l")
    assert trained.endswith("call protect() before the first forward and backward")


class HookState:
    """What a hook of the user's keeps, which is the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def hooked(rank: int, size: int, path: Path) -> list[str]:
    """Why a hook is refused: without a state, with a group, with a state, and with one that is protected."""
    _registry, world = join(path, rank, size)
    state = HookState()
    found = []
    for kept, protected in ((None, ()), (world, ()), (state, (HookState(),)), (state, (state,))):
        module = DistributedDataParallel(torch.nn.Linear(2, 2))
        module.register_comm_hook(kept, default_hooks.allreduce_hook)
        try:
            refuse_hooks({"model": torch.nn.ModuleList([module])}, protected)
            found.append("")
        except ConfigurationError as error:
            found.append(str(error))
    return found


def test_hooks_that_keep_what_is_not_protected_are_refused(tmp_path: Path) -> None:
    ((no_state, group, state, protected),) = run_ranks(1, hooked, tmp_path)
    assert no_state == group == protected == ""
    assert "the communication hook allreduce_hook keeps a HookState from step to step" in state


def buffers_after_sharing(
    rank: int, size: int, path: Path, shared: bool, with_gradients: bool
) -> tuple[list[Any], list[Any]]:
    join(path, rank, size)
    ddp = make({"broadcast_buffers": shared}, 0)
    with torch.set_grad_enabled(with_gradients):
        ddp(torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)))
    before = [buffer.tolist() for buffer in ddp.buffers()]
    share_buffers(ddp)
    return before, [buffer.tolist() for buffer in ddp.buffers()]


@pytest.mark.parametrize("with_gradients", [True, False])
def test_every_rank_has_the_buffers_of_rank_0(tmp_path: Path, with_gradients: bool) -> None:
    """Also when the last forward was one without gradients, after which DDP would leave each rank its own."""
    (before, _same), (others, after) = run_ranks(2, buffers_after_sharing, tmp_path, True, with_gradients)
    assert others != before
    assert after == before


def test_a_model_that_keeps_its_own_buffers_keeps_them(tmp_path: Path) -> None:
    answers = run_ranks(2, buffers_after_sharing, tmp_path, False, True)
    assert all(before == after for before, after in answers)
    assert answers[0] != answers[1]


def reduced_after_a_forward_alone(rank: int, num_ranks: int, path: Path, *, detached: bool) -> list[bool]:
    """Whether the gradients of micro-batches are averaged, in a step after one with a forward without a backward."""
    join(path, rank, num_ranks)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    adapter = DataParallel([ddp])
    ddp(torch.randn(3, 4)).sum().backward()
    if detached:
        ddp(torch.randn(3, 4)).detach()
    adapter.hand_out()
    found = []
    for context in (ddp.no_sync(), contextlib.nullcontext()):
        ddp.zero_grad()
        with context:
            ddp(torch.full((1, 4), float(rank))).sum().backward()
        found.append(bool(torch.all(ddp.module.weight.grad == (num_ranks - 1) / 2)))
    return found


@pytest.mark.parametrize("detached", [False, True])
def test_a_forward_without_a_backward_arms_no_later_step(tmp_path: Path, detached: bool) -> None:
    function = functools.partial(reduced_after_a_forward_alone, detached=detached)
    assert run_ranks(2, function, tmp_path) == [[False, True]] * 2


def unused_twice(rank: int, num_ranks: int, path: Path) -> str:
    """What DDP says in the step after one in which a parameter had no gradient, which its settings exclude."""
    join(path, rank, num_ranks)
    ddp = DistributedDataParallel(Half())
    adapter = DataParallel([ddp])
    for _ in range(2):
        adapter.hand_out()
        try:
            ddp(torch.ones(1, 4)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


class Half(torch.nn.Module):
    """Only one of its layers is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


def test_ddp_still_says_that_a_parameter_was_not_used(tmp_path: Path) -> None:
    assert all("Expected to have finished reduction" in text for text in run_ranks(2, unused_twice, tmp_path))
