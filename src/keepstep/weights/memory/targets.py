"""Where a consumer's new weights go: its own tensors, a second set of them, or a function of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.layout import Layout, Want
from keepstep.protocol.transfer.plan import Bucket, Part, TensorForm
from keepstep.weights.memory.blocks import Weights, named_blocks
from keepstep.weights.memory.copies import Copy, checksum_of, copy_of
from keepstep.weights.memory.pieces import Held, as_tensor

Load = Callable[[str, torch.Tensor], None]


class Target(Protocol):
    """What a subscriber loads into. Used by one thread."""

    @property
    def wants(self) -> tuple[Want, ...] | None:
        """What it asks for; None: everything, whole."""
        ...

    def prepare(self, layout: Layout, parts: tuple[Part, ...]) -> None:
        """A version of this layout is about to come, and these parts of it."""
        ...

    def load(self, bucket: Bucket, slot: torch.Tensor) -> bytes:
        """Takes one bucket out of its slot, and computes its checksum.

        The same bucket of a layout always lies in the same slot.
        """
        ...

    def finish(self) -> None:
        """Everything has come."""
        ...

    def commit(self) -> None:
        """The version counts: from now on it is what the consumer uses."""
        ...


class TensorTarget:
    """Tensors to copy into: those in use (in place), or a second set that changes places with them (atomic)."""

    def __init__(self, into: Weights, atomic: bool) -> None:
        """Takes as much memory again as ``into`` has, if it is atomic."""
        self._blocks = named_blocks(into)
        self._sets = [[block.held.tensor for block in self._blocks]]
        if atomic:
            self._sets.append([torch.empty_like(tensor) for tensor in self._sets[0]])
        self._gpus = {tensor.device for tensor in self._sets[0] if tensor.is_cuda}
        self._exchanges = atomic and isinstance(into, torch.nn.Module)
        self._filled = len(self._sets) - 1
        """The set that is written; the other one, if there is one, is in use."""
        self._layout: Layout | None = None
        self._held: list[dict[int, list[Held]]] = []
        self._copies: list[dict[int, Copy]] = []

    @property
    def wants(self) -> tuple[Want, ...]:
        """Each tensor, in its own form."""
        return tuple(block.as_want() for block in self._blocks)

    def prepare(self, layout: Layout, parts: tuple[Part, ...]) -> None:
        """See `Target`. ``parts`` are in the order of the wants."""
        for device in self._gpus:
            torch.cuda.synchronize(device)  # what still reads there was begun by those who have let the weights go
        if layout is self._layout:
            return
        self._layout = layout
        self._copies = [{} for _ in self._sets]
        self._held = [{} for _ in self._sets]
        for held, tensors in zip(self._held, self._sets, strict=True):
            for part, tensor in zip(parts, tensors, strict=True):  # several, where they are tied only at their source
                held.setdefault(part.tensor, []).append(Held(tensor, part.box))

    def load(self, bucket: Bucket, slot: torch.Tensor) -> bytes:
        """See `Target`."""
        prepared = self._copies[self._filled]
        if bucket.index not in prepared:
            prepared[bucket.index] = copy_of(slot, bucket, self._held[self._filled])
        return prepared[bucket.index].scatter()

    def finish(self) -> None:
        """See `Target`."""

    def commit(self) -> None:
        """See `Target`. The user's tensors stay the objects they are.

        Those of a module look at other memory. Of other tensors it is not known who else looks at their memory (a
        ``state_dict()`` is made of such), so theirs is written.
        """
        if self._exchanges:
            for block, tensor in zip(self._blocks, self._sets[self._filled], strict=True):
                for owner in block.owners:
                    owner.data = tensor
            self._filled = 1 - self._filled
        elif len(self._sets) > 1:
            for live, new in zip(*self._sets, strict=True):
                live.copy_(new)


class FunctionTarget:
    """A function that is given each whole tensor by its name, in the subscriber's thread.

    The tensor is memory of the transfer: it is there for the duration of the call, and only to be read. What was cut
    into several buckets is put together first, in memory that is held until the call.
    """

    wants = None

    def __init__(self, load: Load) -> None:
        self._load = load
        self._forms: tuple[TensorForm, ...] = ()
        self._parts: dict[int, torch.Tensor] = {}
        self._missing: dict[int, int] = {}

    def prepare(self, layout: Layout, parts: tuple[Part, ...]) -> None:
        """See `Target`."""
        self._forms = layout.forms
        self._parts, self._missing = {}, {}

    def load(self, bucket: Bucket, slot: torch.Tensor) -> bytes:
        """See `Target`."""
        for piece in bucket.pieces:
            form = self._forms[piece.tensor]
            block = as_tensor(slot, piece, getattr(torch, form.dtype))
            if piece.box == whole(form.shape):
                self._hand_over(form, block)
            else:
                self._put_together(piece.tensor, form, piece.box, block)
        return checksum_of(slot, bucket)

    def finish(self) -> None:
        """See `Target`. Tensors without elements travel in no bucket."""
        for form in self._forms:
            if 0 in form.shape:
                self._hand_over(form, torch.empty(form.shape, dtype=getattr(torch, form.dtype)))

    def commit(self) -> None:
        """See `Target`."""

    def _put_together(self, tensor: int, form: TensorForm, box: Box, block: torch.Tensor) -> None:
        if tensor not in self._parts:
            self._parts[tensor] = torch.empty(form.shape, dtype=block.dtype, device=block.device)
            self._missing[tensor] = whole(form.shape).num_elements
        Held(self._parts[tensor], whole(form.shape)).block(box).copy_(block)
        self._missing[tensor] -= box.num_elements
        if not self._missing[tensor]:
            self._hand_over(form, self._parts.pop(tensor))

    def _hand_over(self, form: TensorForm, tensor: torch.Tensor) -> None:
        for name in form.names:
            self._load(name, tensor)
