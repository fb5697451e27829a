"""What is moved in an update: the tensors that its sources hold together, and what of them each consumer gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from keepstep.errors import ConfigurationError, StateMismatch
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.plan import Limits, Part, Plan, Reader, TensorForm, plan_transfer


class HeldPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of a tensor that one source holds."""

    form: TensorForm
    box: Box


class Want(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that a consumer wants, and the form in which it can take it."""

    names: tuple[str, ...]
    """Any of these will do: they are tied in the consumer."""
    dtype: str
    shape: tuple[int, ...]
    """Of the block where it wants one, else of the whole tensor."""
    start: tuple[int, ...] | None
    """The block's first index; None: the whole tensor."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Consumer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who takes part in an update on one device."""

    name: str
    wants: tuple[Want, ...] | None
    """None: every tensor, whole."""


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a plan depends on; the same on every device and rank of an update."""

    forms: tuple[TensorForm, ...]
    holders: tuple[tuple[Part, ...], ...]
    """By rank."""
    readers: tuple[Reader, ...]
    problems: tuple[str | None, ...]
    """By reader: why it gets nothing."""
    limits: Limits

    def plan(self) -> Plan:
        """The plan; the same on every device and rank."""
        return plan_transfer(self.forms, dict(enumerate(self.holders)), self.readers, self.limits)


def lay_out(held: Sequence[Sequence[HeldPart]], consumers: Sequence[Sequence[Consumer]], limits: Limits) -> Layout:
    """Puts together what the sources offer and what the consumers want.

    A consumer that wants what there is not, or in another form, gets nothing, and the reason; the others are served.

    Args:
        held: by rank.
        consumers: by rank of the device that they are on.
        limits: how buckets are filled.

    Raises:
        StateMismatch: two sources hold parts of one tensor and see it differently.
    """
    forms, holders = _merge(held)
    by_name = {name: index for index, form in enumerate(forms) for name in form.names}
    readers, problems = [], []
    for device, there in enumerate(consumers):
        for consumer in there:
            parts, problem = _resolve(consumer, forms, by_name)
            readers.append(Reader(device, parts if problem is None else ()))
            problems.append(problem)
    return _without_unserved(Layout(tuple(forms), holders, tuple(readers), tuple(problems), limits))


def _without_unserved(layout: Layout) -> Layout:
    """The same, where a consumer that wants a block which no device holds gets nothing."""
    try:
        layout.plan()
        return layout
    except ConfigurationError:
        readers, problems = list(layout.readers), list(layout.problems)
    for index, reader in enumerate(layout.readers):
        alone = Layout(layout.forms, layout.holders, (reader,), (None,), layout.limits)
        try:
            alone.plan()
        except ConfigurationError as error:
            readers[index], problems[index] = Reader(reader.device, ()), str(error)
    return Layout(layout.forms, layout.holders, tuple(readers), tuple(problems), layout.limits)


def serve_one(layout: Layout, device: int, consumer: Consumer) -> Layout:
    """The same tensors and holders, for one consumer alone.

    Raises:
        StateMismatch: it wants what there is not.
    """
    by_name = {name: index for index, form in enumerate(layout.forms) for name in form.names}
    parts, problem = _resolve(consumer, layout.forms, by_name)
    if problem is not None:
        raise StateMismatch(problem)
    return Layout(layout.forms, layout.holders, (Reader(device, parts),), (None,), layout.limits)


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


def _resolve(
    consumer: Consumer, forms: Sequence[TensorForm], by_name: Mapping[str, int]
) -> tuple[tuple[Part, ...], str | None]:
    """What a consumer gets, or why it gets nothing."""
    if consumer.wants is None:
        return tuple(Part(index, whole(form.shape)) for index, form in enumerate(forms)), None
    parts = []
    for want in consumer.wants:
        index = next((by_name[name] for name in want.names if name in by_name), None)
        if index is None:
            return (), f"{consumer.name} wants '{want.names[0]}', which is not published"
        form = forms[index]
        box = Box(want.start if want.start is not None else (0,) * len(want.shape), want.shape)
        fits = box.lies_in(form.shape)
        if want.dtype != form.dtype or not fits or (want.start is None and want.shape != form.shape):
            at = "" if want.start is None else f" from {list(want.start)} on"
            return (), f"{consumer.name} takes '{want.names[0]}' as {want}{at}, published is {form}"
        parts.append(Part(index, box))
    return tuple(parts), None
