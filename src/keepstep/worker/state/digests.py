"""A digest of each protected tensor and of each host value, by the name that a user knows it by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from keepstep.weights.memory.bytes_of import digest_of
from keepstep.worker.state import tree
from keepstep.worker.state.protected import ProtectedState

DIGEST_CHARACTERS = 16
"""64 bits: enough to tell two values of one name apart, and half of what is written at every step of a drill."""
HOLDS_NAN = "nan"
"""Begins the digest of a tensor that holds NaN."""
MAX_ITEMS = 32
"""A longer list, such as a loader's order of samples, gets a single digest."""
_SUFFIXES = {"groups": ".param_groups", "scalars": ".state"}
"""Part of `ProtectedState.host_state` -> suffix of the object's name."""


def named_digests(state: ProtectedState) -> dict[str, str]:
    """Digests of all protected state, each of `DIGEST_CHARACTERS` hexadecimal digits; see also `HOLDS_NAN`.

    Returns:
        by name: tensors as ``model.fc1.weight`` and ``optimizer/3/exp_avg``, host values as
        ``host: scheduler['last_epoch']``.
    """
    found = {name: _digest_of_tensor(tensor) for name, tensor in state.live_tensors()}
    for part, objects in state.host_state().items():
        for name, value in objects.items():
            if type(value) is dict and not value:
                continue
            for path, leaf in _leaves(name + _SUFFIXES.get(part, ""), value):
                found[f"host: {path}"] = tree.digest(leaf)[:DIGEST_CHARACTERS]
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
