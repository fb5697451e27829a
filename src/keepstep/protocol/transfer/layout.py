"""The layout of an update: the tensors that its sources hold together, and the blocks that each consumer gets."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from keepstep.errors import (
    ConfigurationError,
    DtypeMismatch,
    MissingPart,
    ShapeMismatch,
    StateMismatch,
    UnknownTensor,
)
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.names.name_map import Conversion, Convert, Quantize
from keepstep.protocol.transfer.names.recipes import Recipe, Region, names_in, resolve
from keepstep.protocol.transfer.plan import Limits, Part, Plan, Reader, TensorForm, plan_transfer

FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes between which a tensor may be cast, with their sizes in bytes. Other dtypes, including float8, are never
cast: a value out of range would silently become infinite, or another integer."""


class Misfit(enum.StrEnum):
    """The reasons why a consumer cannot be served."""

    UNKNOWN = "unknown"
    PART = "part"
    SHAPE = "shape"
    DTYPE = "dtype"
    OTHER = "layout"


MISFITS: Mapping[Misfit, type[StateMismatch]] = {
    Misfit.PART: MissingPart,
    Misfit.UNKNOWN: UnknownTensor,
    Misfit.SHAPE: ShapeMismatch,
    Misfit.DTYPE: DtypeMismatch,
    Misfit.OTHER: StateMismatch,
}
"""Misfit -> error class. A class precedes the classes from which it derives."""


class Problem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The reason why a consumer is not served."""

    misfit: Misfit
    reason: str

    @classmethod
    def of(cls, error: ConfigurationError) -> Problem:
        """Returns the problem for an error."""
        misfit = next((misfit for misfit, kind in MISFITS.items() if isinstance(error, kind)), Misfit.OTHER)
        return cls(misfit, str(error))

    @property
    def error(self) -> StateMismatch:
        """The error for this problem."""
        return MISFITS[self.misfit](self.reason)


class HeldPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of a tensor that one source holds."""

    form: TensorForm
    box: Box


class Want(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor or block that a consumer wants, and the form in which it takes it."""

    names: tuple[str, ...]
    """Names of tensors that are tied in the consumer. Any of them can be the published one."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the block, or of the whole tensor if ``start`` is None."""
    start: tuple[int, ...] | None
    """The block's first index; None: the whole tensor."""
    recipe: Recipe | None = None
    """How it is made of published tensors; None: it is the published tensor of the same name."""
    convert: Convert = Conversion.EXACT
    """How the published dtype may differ."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class CastAtSource(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that its holders cast before they send it."""

    tensor: int
    dtype: str


class Consumer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A consumer on one device that takes part in an update."""

    name: str
    wants: tuple[Want, ...] | None
    """None: every tensor, whole."""


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything on which a plan depends. It is the same on every device of an update."""

    forms: tuple[TensorForm, ...]
    """The published tensors."""
    holders: tuple[tuple[Part, ...], ...]
    """The parts that each rank holds."""
    readers: tuple[Reader, ...]
    problems: tuple[Problem | None, ...]
    """For each reader the reason why it is not served; None if it is."""
    limits: Limits
    casts: tuple[CastAtSource, ...] = ()
    """Tensors that travel in a smaller dtype, because all their readers want that one."""

    @property
    def travelling(self) -> tuple[TensorForm, ...]:
        """The forms in which the tensors travel."""
        forms = list(self.forms)
        for cast in self.casts:
            forms[cast.tensor] = msgspec.structs.replace(
                forms[cast.tensor], dtype=cast.dtype, item_bytes=FLOATS[cast.dtype]
            )
        return tuple(forms)

    def plan(self) -> Plan:
        """Returns the plan, which is the same on every device."""
        return plan_transfer(self.travelling, dict(enumerate(self.holders)), self.readers, self.limits)


def lay_out(held: Sequence[Sequence[HeldPart]], consumers: Sequence[Sequence[Consumer]], limits: Limits) -> Layout:
    """Makes the layout from the parts that sources hold and the tensors that consumers want.

    If a consumer wants an unpublished tensor, or another form of it, the layout has a problem for it, and serves only
    the others.

    Args:
        held: the parts that each rank holds.
        consumers: the consumers on the device of each rank.
        limits: the sizes of buckets.

    Raises:
        StateMismatch: two sources hold parts of one tensor in different forms, or a part is outside its tensor.
    """
    forms, holders = _merge(held)
    by_name = index_of(forms)
    readers: list[Reader] = []
    problems: list[Problem | None] = []
    served = []
    for device, there in enumerate(consumers):
        for consumer in there:
            try:
                readers.append(Reader(device, _parts_for(consumer, forms, by_name)))
                problems.append(None)
                served.append(consumer)
            except ConfigurationError as error:
                readers.append(Reader(device, ()))
                problems.append(Problem.of(error))
    casts = _casts_at_source(served, forms, by_name)
    return _without_unserved(Layout(tuple(forms), holders, tuple(readers), tuple(problems), limits, casts))


def _without_unserved(layout: Layout) -> Layout:
    """Returns the layout with a problem for each consumer that wants a block which no device holds."""
    try:
        layout.plan()
        return layout
    except ConfigurationError:
        readers, problems = list(layout.readers), list(layout.problems)
    for index, reader in enumerate(layout.readers):
        alone = msgspec.structs.replace(layout, readers=(reader,), problems=(None,))
        try:
            alone.plan()
        except ConfigurationError as error:
            readers[index], problems[index] = Reader(reader.device, ()), Problem.of(error)
    return msgspec.structs.replace(layout, readers=tuple(readers), problems=tuple(problems))


def serve_one(layout: Layout, device: int, consumer: Consumer) -> Layout:
    """Returns a layout of the same tensors and holders for one consumer alone.

    Raises:
        StateMismatch: the consumer wants an unpublished tensor, or another form of it.
    """
    by_name = index_of(layout.forms)
    reader = Reader(device, _parts_for(consumer, layout.forms, by_name))
    casts = _casts_at_source([consumer], layout.forms, by_name)
    return Layout(layout.forms, layout.holders, (reader,), (None,), layout.limits, casts)


def index_of(forms: Sequence[TensorForm]) -> Mapping[str, int]:
    """Returns name -> index of the tensor, for all names of each tensor."""
    return {name: index for index, form in enumerate(forms) for name in form.names}


def _merge(held: Sequence[Sequence[HeldPart]]) -> tuple[list[TensorForm], tuple[tuple[Part, ...], ...]]:
    forms: list[TensorForm] = []
    known: dict[str, tuple[int, int]] = {}
    holders: list[tuple[Part, ...]] = []
    for rank, parts in enumerate(held):
        own = []
        for part in parts:
            if not part.box.lies_in(part.form.shape):
                raise StateMismatch(f"rank {rank} holds '{part.form.name}' where {part.form} has nothing")
            names = [name for name in part.form.names if name in known]
            index, first = known[names[0]] if names else (len(forms), rank)
            if not names:
                forms.append(part.form)
                known |= dict.fromkeys(part.form.names, (index, rank))
            elif forms[index] != part.form:
                tied = "" if str(part.form) != str(forms[index]) else ", under other names"
                raise StateMismatch(
                    f"'{names[0]}' is {part.form} on rank {rank} and {forms[index]} on rank {first}{tied}: "
                    f"{list(part.form.names)} and {list(forms[index].names)} are tied there"
                )
            own.append(Part(index, part.box))
        holders.append(tuple(own))
    return forms, tuple(holders)


def regions_of(want: Want, forms: Sequence[TensorForm], by_name: Mapping[str, int]) -> tuple[Region, ...]:
    """Returns the blocks of published tensors of which a wanted tensor consists, in a fixed order.

    Args:
        want: what a consumer wants.
        forms: the published tensors.
        by_name: `index_of` of ``forms``.

    Raises:
        StateMismatch: the want does not fit the published tensors. The error's class says why (`MISFITS`), and its
            message names the tensors.
    """
    recipe = want.recipe
    if recipe is None:
        recipe = next((name for name in want.names if name in by_name), want.names[0])
    name = want.names[0]

    def shape_of(source: str) -> tuple[int, ...]:
        if source in by_name:
            return forms[by_name[source]].shape
        if isinstance(recipe, str):
            which = f"'{name}'" if want.recipe is None else f"'{name}' from '{source}'"
            raise UnknownTensor(f"wants {which}, which is not published")
        raise MissingPart(f"wants '{name}', of which the part '{source}' is not published")

    try:
        made = resolve(recipe, shape_of)
    except ShapeMismatch as error:
        raise ShapeMismatch(f"wants '{name}': {error}") from None
    published = forms[by_name[recipe]] if isinstance(recipe, str) else None
    what = (
        f"published is {published}"
        if published
        else f"made of {_listed(recipe, forms, by_name)} it is {list(made.shape)}"
    )
    at = "" if want.start is None else f" from {list(want.start)} on"
    takes = f"takes '{name}' as {want}{at}, {what}"
    box = Box(want.start if want.start is not None else (0,) * len(want.shape), want.shape)
    if not box.lies_in(made.shape) or (want.start is None and want.shape != made.shape):
        raise ShapeMismatch(takes)
    for source in names_in(recipe):
        if not _may_become(forms[by_name[source]].dtype, want):
            raise DtypeMismatch(takes + (", which is not cast" if want.convert is not Conversion.EXACT else ""))
    return made.block(box).regions


def _listed(recipe: Recipe, forms: Sequence[TensorForm], by_name: Mapping[str, int]) -> str:
    return ", ".join(f"'{name}' {forms[by_name[name]]}" for name in dict.fromkeys(names_in(recipe)))


def _may_become(dtype: str, want: Want) -> bool:
    if isinstance(want.convert, Quantize):
        return dtype in FLOATS
    return want.dtype == dtype or (want.convert is Conversion.CAST and {want.dtype, dtype} <= FLOATS.keys())


def _parts_for(consumer: Consumer, forms: Sequence[TensorForm], by_name: Mapping[str, int]) -> tuple[Part, ...]:
    """Returns the parts that a consumer gets: the regions of all its wants."""
    if consumer.wants is None:
        return tuple(Part(index, whole(form.shape)) for index, form in enumerate(forms))
    try:
        regions = [region for want in consumer.wants for region in regions_of(want, forms, by_name)]
    except ConfigurationError as error:
        raise MISFITS[Problem.of(error).misfit](f"{consumer.name} {error}") from None
    return tuple(Part(by_name[region.source], region.box) for region in regions)


def _casts_at_source(
    consumers: Sequence[Consumer], forms: Sequence[TensorForm], by_name: Mapping[str, int]
) -> tuple[CastAtSource, ...]:
    """Returns the tensors to cast at the source: those of which all readers want the same smaller dtype.

    The cast gives the same bits at either end. A tensor that readers want in two dtypes is not cast, because it would
    travel twice. A consumer that computes scales needs the published dtype.
    """
    wanted: dict[int, set[str]] = {}
    for consumer in consumers:
        if consumer.wants is None:
            return ()
        for want in consumer.wants:
            for source in _sources(want, by_name):
                dtype = forms[source].dtype if isinstance(want.convert, Quantize) else want.dtype
                wanted.setdefault(source, set()).add(dtype)
    return tuple(
        CastAtSource(index, dtype)
        for index, dtypes in sorted(wanted.items())
        if len(dtypes) == 1 and (dtype := next(iter(dtypes))) != forms[index].dtype
        if FLOATS[dtype] < FLOATS[forms[index].dtype]
    )


def _sources(want: Want, by_name: Mapping[str, int]) -> list[int]:
    if want.recipe is not None:
        return [by_name[name] for name in names_in(want.recipe)]
    return [next(by_name[name] for name in want.names if name in by_name)]
