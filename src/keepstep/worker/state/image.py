"""The state of one rank at one step as a header and blocks of memory. A replacement can get it from any source.

The header contains the names, dtypes, shapes and strides of all tensors, the host state, the parameters that have a
gradient, and the modes (``train()``, ``requires_grad``). It is serialized with msgpack: nothing is unpickled.
"""

from __future__ import annotations

import msgspec
import torch

from keepstep.weights.memory.blocks import NamedBlock, local_of
from keepstep.worker.parallel.layout import Replicated
from keepstep.worker.state import tree
from keepstep.worker.state.layout import (
    TensorHeader,
    buffers_like,
    check_restored,
    check_same_layout,
    check_same_objects,
    headers_of,
)
from keepstep.worker.state.protected import Modes, ProtectedState


class StateHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description of a state's tensors, and the part of the state that is in no tensor."""

    step: int
    parameters: tuple[TensorHeader, ...]
    buffers: tuple[TensorHeader, ...]
    optimizer: tuple[TensorHeader, ...]
    host_tensors: tuple[TensorHeader, ...]
    host: bytes
    with_gradient: tuple[int, ...]
    modes: Modes

    @property
    def all_tensors(self) -> tuple[TensorHeader, ...]:
        """The headers of all tensors, in the order of the blocks."""
        return (*self.parameters, *self.buffers, *self.optimizer, *self.host_tensors)


def describe(state: ProtectedState, step: int) -> tuple[StateHeader, list[NamedBlock]]:
    """Describes the current state: its header, and this rank's live blocks in the order of the header's tensors."""
    host, host_tensors = state.host_bytes()
    host_named = [(f"host/{index}", tensor) for index, tensor in enumerate(host_tensors)]
    parts = [
        *(state.layout.blocks(named) for named in (state.parameters(), state.buffers(), state.optimizer_tensors())),
        Replicated().blocks(host_named),
    ]
    headers = [headers_of(part) for part in parts]
    marks, modes = state.gradient_marks(), state.modes()
    header = StateHeader(step, headers[0], headers[1], headers[2], headers[3], host, marks, modes)
    return header, [block for part in parts for block in part]


def targets(state: ProtectedState, header: StateHeader, source: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the tensors to write a received state to. It creates missing optimizer state and buffers.

    Args:
        state: the protected state that is to be overwritten.
        header: header of the incoming state.
        source: name of the source, for messages.

    Returns:
        all tensors, in the header's order; and the tensors of the host state among them, for `finish`.

    Raises:
        StateMismatch: the model here has other names, shapes or dtypes.
    """
    parameters = state.parameters()
    forms = [torch.empty(0) for _ in header.host_tensors]
    check_same_objects(state, tree.unpack(msgspec.msgpack.decode(header.host), forms), source)
    blocks = state.layout.blocks
    check_same_layout(headers_of(blocks(parameters)), header.parameters, source)
    buffers = buffers_like(state, header.buffers, header.modes, source)
    existing = {block.names[0]: block for block in blocks(state.optimizer_tensors())}
    own = {entry.name: entry for entry in headers_of(existing.values())}
    if set(own) - {entry.name for entry in header.optimizer}:
        state.drop_optimizer_state()
        own = {}
        existing.clear()  # memory may not suffice for both
    optimizer = []
    for entry in header.optimizer:
        if own.get(entry.name) == entry:
            optimizer.append(existing[entry.name].held.tensor)
        else:
            optimizer.append(entry.empty(state.device))
            state.place_optimizer_tensor(entry.name, optimizer[-1], as_dtensor=entry.is_dtensor)
    host_tensors = [entry.empty(state.device) for entry in header.host_tensors]
    live = [local_of(tensor) for _name, tensor in parameters]
    return [*live, *buffers, *optimizer, *host_tensors], host_tensors


def finish(state: ProtectedState, header: StateHeader, host_tensors: list[torch.Tensor]) -> None:
    """Restores the part of the state that is in no tensor. Call it after all tensors have been written.

    Raises:
        StateMismatch: afterwards the state is not the one in the header; the message names what differs.
    """
    host = tree.unpack(msgspec.msgpack.decode(header.host), host_tensors)
    state.load_host_state(host)
    state.place_gradients(header.with_gradient)
    state.place_modes(header.modes)
    check_restored(state, host, [entry.name for entry in header.optimizer])
