"""Echo: the result of a collective while a group is down, as if every peer held what this rank holds.

A backward pass, a DDP reducer or a model's constructor can then finish normally, without an exception in the middle.
The results are discarded at the next safe point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_all(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """allgather, gather: every place of ``outputs[k]`` becomes ``inputs[k]``."""
    for places, source in zip(outputs, inputs, strict=False):
        for place in places:
            _copy(place, source)


def lists_to_all(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """allgather_coalesced: every list of ``outputs`` becomes ``inputs``."""
    for places in outputs:
        for place, source in zip(places, inputs, strict=False):
            _copy(place, source)


def to_all_flat(output: Tensor, source: Tensor) -> None:
    """allgather into one tensor: ``output`` becomes ``source``, repeated. ``source`` may be a part of it (FSDP2)."""
    if source.numel():
        for place in output.view(-1).view(-1, source.numel()):
            _copy(place, source)


def own_of(outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], rank: int) -> None:
    """reduce_scatter, scatter: ``outputs[k]`` becomes this rank's place of ``inputs[k]``."""
    for output, places in zip(outputs, inputs, strict=False):
        _copy(output, places[rank])


def own_of_flat(output: Tensor, source: Tensor, rank: int) -> None:
    """reduce_scatter from one tensor: ``output`` becomes this rank's part of ``source``."""
    start = rank * output.numel()
    output.view(-1).copy_(source.detach().reshape(-1)[start : start + output.numel()])


def own_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], rank: int) -> None:
    """alltoall: every place of ``outputs`` becomes the part that this rank would send to itself."""
    for output in outputs:
        _copy(output, inputs[rank])


def own_to_all_flat(output: Tensor, source: Tensor) -> None:
    """alltoall on one tensor: ``output`` becomes this rank's own rows, repeated."""
    rows = output.shape[0] if output.dim() else 0
    if rows and source.shape[0] and output.shape[1:] == source.shape[1:]:
        index = torch.arange(rows, device=source.device) % source.shape[0]
        output.detach().copy_(source.detach()[index])


def _copy(output: Tensor, source: Tensor) -> None:
    """Copies if the sizes match. Uneven splits have no echo; their content is discarded anyway."""
    if output.numel() == source.numel() and output.data_ptr() != source.data_ptr():
        output.detach().view(-1).copy_(source.detach().reshape(-1))
