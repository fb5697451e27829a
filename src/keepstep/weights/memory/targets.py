"""The destination of a consumer's new weights: its own tensors, a second set of them, or a function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from keepstep.errors import ConfigurationError, DtypeMismatch
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.layout import Layout, Want, index_of, regions_of
from keepstep.protocol.transfer.plan import Bucket, Part, Piece, TensorForm
from keepstep.weights.memory.blocks import NamedBlock, Weights, named_blocks
from keepstep.weights.memory.copies import Copy, checksum_of, copy_of
from keepstep.weights.memory.mapping.mapped import (
    IncomingPart,
    Mapped,
    Placed,
    ReturnedWeights,
    plain,
    view_of,
    wants_of,
)
from keepstep.weights.memory.mapping.quantized import Staged
from keepstep.weights.memory.pieces import Held, as_tensor

Load = Callable[[str, torch.Tensor], None]


class Target(Protocol):
    """The destination of a subscriber's new weights. Used by one thread."""

    @property
    def wants(self) -> tuple[Want, ...] | None:
        """The requested tensors or blocks; None requests all tensors, each as a whole."""
        ...

    def prepare(self, layout: Layout, parts: tuple[Part, ...]) -> None:
        """Prepares for a version. Called before its first bucket.

        Args:
            layout: layout of the version.
            parts: the parts of it that this consumer will receive.
        """
        ...

    def load(self, bucket: Bucket, slot: torch.Tensor) -> bytes:
        """Copies one bucket out of its slot and returns the bucket's checksum.

        The address of a slot does not change as long as `prepare` gets the same layout object.
        """
        ...

    def keep(self, bucket: Bucket, checksum: bytes) -> bool:
        """Handles an unchanged bucket, which is not sent. Returns whether this consumer really has its content."""
        ...

    def finish(self) -> None:
        """Called when all buckets have arrived."""
        ...

    def commit(self) -> None:
        """Called when the version is committed: from now on the consumer uses it."""
        ...


class TensorTarget:
    """Copies new weights into tensors: into those in use (in place), or into a second set for a later swap (atomic).

    With a name map, each block is copied directly to its destination. Only quantized tensors are assembled first, in
    memory of the published dtype, which is held until the last part of the tensor has arrived.
    """

    def __init__(self, into: Weights | Mapped, atomic: bool, delta: bool = False) -> None:
        """Allocates the size of ``into`` once more, if ``atomic``.

        Args:
            into: the destination tensors.
            atomic: whether to assemble a version in a second set of tensors until it is committed.
            delta: whether to record checksums of the current version, so that unchanged buckets need not be sent.

        Raises:
            ConfigurationError: ``delta`` with a quantized tensor; or as `wants_of` and `named_blocks`.
        """
        weights, names = plain(into)
        self._blocks = named_blocks(weights)
        self._placed = wants_of(self._blocks, names)
        if delta and (quantized := [placed.want.names[0] for placed in self._placed if placed.scale is not None]):
            raise ConfigurationError(f"delta=True with a quantized tensor ('{quantized[0]}'), all of which has to come")
        self._sets = [[block.held.tensor for block in self._blocks]]
        if atomic:
            self._sets.append([torch.empty_like(tensor) for tensor in self._sets[0]])
        self._gpus = {tensor.device for tensor in self._sets[0] if tensor.is_cuda}
        self._exchanges = atomic and isinstance(weights, torch.nn.Module)
        self._filled = len(self._sets) - 1
        """Index of the set that is written. The other set, if there is one, is in use."""
        self._layout: Layout | None = None
        self._committed: Layout | None = None
        """Layout of the version in use."""
        self._held: list[dict[int, list[Held]]] = []
        self._copies: list[dict[tuple[int, int], Copy]] = []
        """For each set: (bucket, address of its slot) -> prepared copy."""
        self._staged: dict[int, list[Staged]] = {}
        """Index of the published tensor -> quantized tensors that need it."""
        self._checksums: list[dict[tuple[Piece, ...], bytes]] | None = [{} for _ in self._sets] if delta else None
        """For each set: pieces of a bucket -> checksum of their content in the set."""

    @property
    def wants(self) -> tuple[Want, ...]:
        """Each tensor, in its own form."""
        return tuple(placed.want for placed in self._placed)

    def prepare(self, layout: Layout, parts: tuple[Part, ...]) -> None:
        """See `Target`. ``parts`` are in the order of the wants, and of the regions of each."""
        for device in self._gpus:
            torch.cuda.synchronize(device)  # waits for kernels of former users, which may still read the tensors
        for each in {id(staged): staged for there in self._staged.values() for staged in there}.values():
            each.forget()
        if layout is self._layout:
            return
        self._forget_others(layout)
        self._layout = layout
        self._copies = [{} for _ in self._sets]
        self._held = [{} for _ in self._sets]
        self._staged = {}
        by_name, forms, coming = index_of(layout.forms), layout.travelling, iter(parts)
        for placed in self._placed:
            regions = regions_of(placed.want, layout.forms, by_name)
            places = [
                IncomingPart(region, part, getattr(torch, forms[part.tensor].dtype))
                for region, part in zip(regions, itertools.islice(coming, len(regions)), strict=True)
            ]
            if placed.scale is not None:
                self._stage(placed, places)
                continue
            for held, tensors in zip(self._held, self._sets, strict=True):
                for place in places:  # one incoming part may have several destinations
                    held.setdefault(place.part.tensor, []).append(place.held(tensors[placed.index]))

    def _forget_others(self, layout: Layout) -> None:
        """Keeps recorded checksums only of buckets that the new layout has, too: its other buckets overlap them."""
        if self._checksums is None:
            return
        is_same = self._layout is not None and self._layout.travelling == layout.travelling
        kept = {bucket.pieces for bucket in layout.plan().buckets} if is_same else set()
        self._checksums = [
            {pieces: checksum for pieces, checksum in there.items() if pieces in kept} for there in self._checksums
        ]

    def _stage(self, placed: Placed, places: Sequence[IncomingPart]) -> None:
        staged = Staged(placed, self._sets[0][placed.index], places)
        for tensor in {place.part.tensor for place in places}:
            self._staged.setdefault(tensor, []).append(staged)

    def load(self, bucket: Bucket, slot: torch.Tensor) -> bytes:
        """See `Target`."""
        held, prepared = self._held[self._filled], self._copies[self._filled]
        if self._staged and any(piece.tensor in self._staged for piece in bucket.pieces):
            return self._load_staged(bucket, slot, held)
        place = bucket.index, slot.data_ptr()
        if place not in prepared:
            prepared[place] = copy_of(slot, bucket, held)
        if self._checksums is None:
            return prepared[place].scatter()
        self._checksums[self._filled].pop(bucket.pieces, None)
        checksum = self._checksums[self._filled][bucket.pieces] = prepared[place].scatter()
        return checksum

    def keep(self, bucket: Bucket, checksum: bytes) -> bool:
        """See `Target`. Copies the bucket from the set in use, unless the set being written already has the content."""
        if self._checksums is None:
            return False
        filled, used = self._filled, (1 - self._filled if len(self._sets) > 1 else 0)
        if self._checksums[filled].get(bucket.pieces) == checksum:
            return True
        if self._checksums[used].get(bucket.pieces) != checksum:
            return False
        for piece in bucket.pieces:
            pairs = zip(self._held[used][piece.tensor], self._held[filled][piece.tensor], strict=True)
            for source, to in pairs:
                if to.box.holds(piece.box):
                    to.block(piece.box).copy_(source.block(piece.box))
        self._checksums[filled][bucket.pieces] = checksum
        return True

    def _load_staged(self, bucket: Bucket, slot: torch.Tensor, held: dict[int, list[Held]]) -> bytes:
        """Loads a bucket with parts of quantized tensors. A tensor is quantized after its last part."""
        own = {piece.tensor: list(held.get(piece.tensor, ())) for piece in bucket.pieces}
        touched = {id(each): each for piece in bucket.pieces for each in self._staged.get(piece.tensor, ())}
        for staged in touched.values():
            for tensor, places in staged.held().items():
                if tensor in own:
                    own[tensor] += places
        checksum = copy_of(slot, bucket, own).scatter()
        tensors = self._sets[self._filled]
        for staged in touched.values():
            staged.came(bucket, tensors)
        return checksum

    def as_published(self) -> ReturnedWeights:
        """The version in use, under its published names and in its published blocks.

        Raises:
            DtypeMismatch: a tensor was cast or quantized, so its published bits are lost.
        """
        layout = self._committed
        assert layout is not None
        by_name, used = index_of(layout.forms), (1 - self._filled if self._exchanges else 0)
        found = []
        for placed in self._placed:
            tensor = self._sets[used][placed.index]
            for region in regions_of(placed.want, layout.forms, by_name):
                form = layout.forms[by_name[region.source]]
                if placed.scale is not None or str(tensor.dtype) != f"torch.{form.dtype}":
                    raise DtypeMismatch(
                        f"'{form.name}' was published as {form.dtype} and is {placed.want.dtype} here, in "
                        f"'{placed.want.names[0]}': it cannot be given back bit for bit"
                    )
                found.append(NamedBlock(form.names, Held(view_of(tensor, region), region.box), form.shape, ()))
        return ReturnedWeights(tuple(found))

    def finish(self) -> None:
        """See `Target`."""

    def commit(self) -> None:
        """See `Target`. The user's tensors stay the same objects.

        A module's tensors are set to the new memory. The memory of other tensors may be shared, as in a
        ``state_dict()``, so this method copies into it.
        """
        self._committed = self._layout
        if self._exchanges:
            for block, tensor in zip(self._blocks, self._sets[self._filled], strict=True):
                for owner in block.owners:
                    owner.data = tensor
            self._filled = 1 - self._filled
        elif len(self._sets) > 1:
            for live, new in zip(*self._sets, strict=True):
                live.copy_(new)
            if self._checksums is not None:
                self._checksums[0] = dict(self._checksums[1])


class FunctionTarget:
    """Calls a function with the name of each complete tensor and the tensor, in the subscriber's thread.

    The tensor is a view of the transfer's memory: it is read-only and valid only during the call. A tensor that was
    split into several buckets is assembled first, in memory that is held until the call.
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

    def keep(self, bucket: Bucket, checksum: bytes) -> bool:
        """See `Target`. Always False: a function keeps no weights."""
        return False

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
