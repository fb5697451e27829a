"""A digest of each protected tensor and of each host value, by the name that a user knows it by."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from keepstep.weights.memory.bytes_of import digest_of
from keepstep.worker.state import tree
from keepstep.worker.state.protected import ProtectedState

DIGEST_CHARACTERS = 16
"""64 bits: enough to tell two values of one name apart, and half of what is written at every step of a drill."""
HOLDS_NAN = "nan"
"""Begins the digest of a tensor that holds NaN."""
_NUM_SIGNS = 4096
MAX_ITEMS = 32
"""A longer list, such as a loader's order of samples, gets a single digest."""
_SUFFIXES = {"groups": ".param_groups", "scalars": ".state"}
"""Part of `ProtectedState.host_state` -> suffix of the object's name."""


class Sketch(NamedTuple):
    """What tells of two tensors, apart from each other, by about how much they differ.

    A sum with random signs is about as large as the norm, and so is the difference of two such sums, with the same
    signs, compared to the norm of the difference (the "tug of war" of Alon, Matias and Szegedy, 1996).
    """

    projection: float
    """The sum of all elements, each with a sign that only its place determines."""
    norm: float
    """The Euclidean norm."""
    resolution: float
    """Of the dtype: the difference between 1 and the next larger number."""


class Seen(NamedTuple):
    """A value in a record."""

    digest: str
    """`DIGEST_CHARACTERS` hexadecimal digits; see also `HOLDS_NAN`."""
    sketch: Sketch | None
    """Of a tensor of finite floating-point numbers."""


def named_digests(state: ProtectedState) -> dict[str, Seen]:
    """Digests of all protected state.

    Returns:
        by name: tensors as ``model.fc1.weight`` and ``optimizer/3/exp_avg``, host values as
        ``host: scheduler['last_epoch']``.
    """
    found = {name: Seen(_digest_of_tensor(tensor), _sketch(tensor)) for name, tensor in state.live_tensors()}
    for part, objects in state.host_state().items():
        for name, value in objects.items():
            if type(value) is dict and not value:
                continue
            for path, leaf in _leaves(name + _SUFFIXES.get(part, ""), value):
                found[f"host: {path}"] = Seen(tree.digest(leaf)[:DIGEST_CHARACTERS], None)
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values in nested dicts and short lists, each with its place as Python would write it."""
    if type(value) in (dict, OrderedDict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item)
    elif type(value) in (list, tuple) and 0 < len(value) <= MAX_ITEMS:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, value


def _digest_of_tensor(tensor: torch.Tensor) -> str:
    digest = digest_of([("", tensor)], b"")[:DIGEST_CHARACTERS]
    return HOLDS_NAN + digest[len(HOLDS_NAN) :] if bool(tensor.isnan().any()) else digest


@functools.cache
def _signs() -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    return torch.randint(2, (_NUM_SIGNS,), generator=chance, device="cpu").double() * 2 - 1


def _sketch(tensor: torch.Tensor) -> Sketch | None:
    if not tensor.is_floating_point() or not tensor.numel() or not bool(tensor.isfinite().all()):
        return None
    flat = tensor.detach().cpu().double().reshape(-1)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % _NUM_SIGNS)).view(-1, _NUM_SIGNS)
    return Sketch(float(rows.sum(0) @ _signs()), float(flat.norm()), torch.finfo(tensor.dtype).eps)
