"""Hooks of ``state_dict()`` that save the parameters of a sharded module in another arrangement."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep.worker.state.own import own_states_of
from keepstep.worker.state.rearranged import beside_parameters

Hook = Callable[["Fused", dict[str, Any], str], None]


class Fused(nn.Module):
    """Keeps three matrices as one, of which a rank holds a part."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.weight = nn.Parameter(distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)]))
        self.register_buffer("scale", torch.ones(()))
        self.seen, self.base = 7, torch.full((6, 4), 5.0)
        self._register_state_dict_hook(lambda module, state, prefix, _metadata: hook(module, state, prefix))


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor


def split(module: Fused, state: dict[str, Any], prefix: str) -> None:
    whole = gathered(state.pop(f"{prefix}weight"))
    for number, part in enumerate(whole.reshape(3, 2, 4)):
        state[f"{prefix}w{number}"] = part.reshape(-1, 4).contiguous().to(torch.bfloat16).cpu()
    state[f"{prefix}both"] = torch.cat([whole[:2], whole[4:]]).t()


@pytest.fixture(autouse=True)
def mesh_of_two() -> Iterator[None]:
    """A group of two ranks that does not communicate: what is gathered is no other rank's."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def beside(hook: Hook) -> dict[str, Any] | None:
    module = Fused(hook)
    before = [*module.named_parameters(), *module.named_buffers()]
    found = beside_parameters(module, lambda: module.state_dict(keep_vars=True))
    after = [*module.named_parameters(), *module.named_buffers()]
    assert all(one[0] == two[0] and one[1] is two[1] for one, two in zip(before, after, strict=True))
    return found


def test_a_module_says_nothing_beyond_its_parameters_in_another_arrangement() -> None:
    [own] = own_states_of([("model", Fused(split))])
    assert own.read() == {}
    own.load({})


def test_what_a_hook_adds_is_found() -> None:
    def adds(module: Fused, state: dict[str, Any], prefix: str) -> None:
        split(module, state, prefix)
        state |= {f"{prefix}seen": module.seen, f"{prefix}as tensor": torch.tensor(module.seen), "base": module.base}

    found = beside(adds)
    assert found is not None
    assert {name: getattr(value, "ndim", value) for name, value in found.items()} == {
        "seen": 7,
        "as tensor": 0,
        "base": 2,
    }


@pytest.mark.parametrize(
    "value",
    [
        lambda module, weight: weight - module.base,
        lambda module, weight: weight.new_tensor(module.seen),
        lambda module, weight: torch.full_like(weight, module.seen),
        lambda module, weight: torch.cat([weight, module.base]),
        lambda module, weight: {"inner": weight * module.seen},
        lambda module, weight: [weight[:2]],
        lambda module, weight: torch.tensor(module.seen, device=weight.device),
        lambda module, weight: weight.sum().item(),
        lambda module, weight: weight.storage_of_its_own(),
    ],
)
def test_what_is_not_certainly_the_parameters_alone_is_not_taken_for_them(value: Any) -> None:
    def hook(module: Fused, state: dict[str, Any], prefix: str) -> None:
        state[f"{prefix}value"] = value(module, gathered(state.pop(f"{prefix}weight")))

    assert beside(hook) is None
