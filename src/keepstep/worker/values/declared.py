"""The values that the script declares with `Session.state`, and the rules for when the script may change them.

Also what it protects as each rank's own, `RankObjects`, for which the rules of rank-local values hold.

*Replicated* values are the same on every rank. *Rank-local* values differ between ranks, and those of a lost rank must
survive. So every rank sends its own values to all others before it enters the gradient barrier, and keeps the values of
all ranks as one table in its host state. Then the same holds as for module buffers: when a rank has left the barrier of
step i, every other rank has the table of step i+1, and any live rank can restore any other. docs/PROTOCOL.md has the
argument.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch import distributed as dist

from keepstep.errors import ConfigurationError, InternalError, RemoteProtocolError, StateMismatch, UsageError
from keepstep.worker.state.layout import gathered
from keepstep.worker.values.attributes import State, from_bytes
from keepstep.worker.values.rank_objects import RankObjects

MAX_RANK_BYTES = 64 << 10
"""Limit for one rank's local values in bytes: every rank sends them to every other rank at every step."""
MAX_TABLE_BYTES = 16 << 20
"""Limit for the local values of all ranks in bytes, which every rank holds. With more than 256 ranks it is the lower
limit."""
_MIN_CAPACITY = 120
"""Initial capacity of a row in bytes. With its length it fills two cache lines; a running mean takes 60 bytes."""
_LENGTH_BYTES = 8
"""At the beginning of a row: how long it is, and how long the changes of the rank's objects are, in 4 bytes each."""
_LOCAL = "per rank"
"""The name of what all ranks hold of each other."""
Own = tuple[dict[str, dict[str, bytes]], dict[str, bytes]]
"""A rank's own values by the label of their object, and the state of its own objects by name, both as bytes."""


class Moment(enum.Enum):
    """The phases of a script that determine which declared values it may change."""

    START = enum.auto()
    """Before the first step: the script may declare and set all values."""
    OPEN = enum.auto()
    """From when a step is yielded to its gradient barrier: the script may set all values."""
    SHARED = enum.auto()
    """From the barrier to when the next step is yielded: the rank has sent its local values, which must not change."""
    OVER = enum.auto()
    """After the last step: nothing is protected."""


class DeclaredState:
    """All declared values of one rank. Use it from the training thread."""

    def __init__(self, rank: Callable[[], int | None], has_echoed: Callable[[], bool]) -> None:
        """Args:
        rank: returns the rank of this process, None on a spare.
        has_echoed: returns whether an operation has returned this rank's own values in place of all ranks'.
        """
        self.objects: dict[str, Any] = {}
        """The objects to protect, by name: the replicated values, and the table of all ranks' local values."""
        self._rank = rank
        self._has_echoed = has_echoed
        self._moment = Moment.START
        self._replicated: dict[str, State] = {}
        self._local: dict[str, State] = {}
        self._resets: list[tuple[State, dict[str, Any]]] = []
        """Objects whose values begin anew with each epoch, and their first values."""
        self._rank_objects = RankObjects()
        self._table = _Table()

    def keep(self, objects: Mapping[str, Any]) -> None:
        """Protects objects of each rank's own, by name; see `Session.protect`.

        Raises:
            ConfigurationError: an object cannot be protected so.
        """
        for name, thing in objects.items():
            self._rank_objects.add(name, thing)
        self._hold_local()

    def _hold_local(self) -> None:
        if self._is_local:
            self.objects[_LOCAL] = _LocalTable(self._table, self._local, self._rank_objects, self._rank)

    @property
    def _is_local(self) -> bool:
        """Whether ranks have something of their own."""
        return bool(self._local or self._rank_objects)

    def declare(self, name: str, per_rank: bool, values: dict[str, Any], reset: str | None = None) -> State:
        """Creates an object with declared values; see `Session.state`.

        Raises:
            UsageError: the loop has already yielded the first step.
            ConfigurationError: there are no values, the name was declared before, or a value cannot be sent; or
                ``reset`` is neither None nor "epoch".
        """
        arguments = [repr(name)] if name else []
        arguments += ["per_rank=True"] if per_rank else []
        arguments += [f"reset={reset!r}"] if reset is not None else []
        label = f"session.state({', '.join(arguments)})"
        if self._moment is not Moment.START:
            raise UsageError(f"{label} after the first step: declare it before, on every rank")
        if reset not in (None, "epoch"):
            raise ConfigurationError(f"{label}: reset can only be 'epoch'; an attribute of this name is not possible")
        if not values:
            raise ConfigurationError(f"{label}: give it attributes with their first values, such as best=0.0")
        own = self._local if per_rank else self._replicated
        if label in own:
            raise ConfigurationError(
                f"{label} was called twice: give the second one a name, session.state('name', ...)"
            )
        own[label] = state = State(label, values, self._local_refusal if per_rank else _never)
        if reset is not None:
            self._resets.append((state, copy.deepcopy(values)))
        if not per_rank:
            self.objects[label] = state
        self._hold_local()
        return state

    def _local_refusal(self, attribute: str) -> str | None:
        if self._moment is not Moment.SHARED:
            return None
        return (
            f"{attribute} was changed after optimizer.step(). A rank sends its own values to the other ranks in the "
            "step's first optimizer.step(), so a later change would be lost if the rank fails: change it before that "
            "call, or before the 'with'"
        )

    # ---- the course of a step ---------------------------------------------------------------------------------------

    def begin(self, world_size: int, *, share: bool) -> None:
        """Begins the first step of this rank. With ``share``, all ranks begin together and exchange local values.

        Raises:
            ConfigurationError: this rank's local values are too large.
        """
        if share and self._is_local:
            self._share(world_size)
        self._moment = Moment.SHARED

    def hand_out(self, is_first_of_epoch: bool | None = None) -> None:
        """Call it when a step is yielded.

        Args:
            is_first_of_epoch: whether it is the first step of an epoch; None: the loop has no epochs.

        Raises:
            UsageError: the script changed a local value in place after the last barrier, or has declared values that
                begin anew with each epoch, and there are none.
        """
        self.check()
        self._moment = Moment.OPEN
        if self._resets and is_first_of_epoch is None:
            raise UsageError(
                f"{self._resets[0][0]!r} in a loop that has no epochs: use session.epochs(loader, n) or "
                "session.batches(loader, epochs=n), or set the values where they begin anew"
            )
        for state, first in self._resets if is_first_of_epoch else ():
            vars(state).update(copy.deepcopy(first))

    def own(self) -> Own:
        """The present values of this rank's own, which the other ranks get only at the barrier."""
        return {name: state.as_bytes() for name, state in self._local.items()}, self._rank_objects.own()

    def load_own(self, own: Own) -> None:
        """Restores what `own` has returned."""
        for name, values in own[0].items():
            _load(self._local[name], values)
        self._rank_objects.load_own(own[1])

    def before_barrier(self, world_size: int) -> None:
        """Exchanges the local values with all ranks.

        Raises:
            ConfigurationError: this rank's local values are too large, or the objects of all ranks together.
        """
        if self._is_local:
            self._share(world_size)
        self._moment = Moment.SHARED

    def replicated(self) -> dict[str, bytes]:
        """The values that are to be equal on all ranks, as bytes, by the attributes as the script writes them."""
        return _by_attribute(self._replicated)

    def check(self) -> None:
        """Checks that local values have not changed. Call it after a step, and when the script requests the next one.

        Raises:
            UsageError: the script changed a local value in place after the barrier. (`State` refuses assignments.)
        """
        if self._moment is not Moment.SHARED:
            return
        kept: tuple[State | RankObjects, ...] = (*self._local.values(), self._rank_objects)
        for own in kept:
            if (changed := own.changed()) is not None:
                raise UsageError(self._local_refusal(changed))

    def undone(self) -> None:
        """Call it when a step is undone: the script may change values again, and the rollback restores them."""
        self._moment = Moment.OPEN

    def end(self) -> None:
        """Call it when all ranks have completed the last step."""
        self._moment = Moment.OVER

    # ---- between ranks ----------------------------------------------------------------------------------------------

    def _share(self, world_size: int) -> None:
        row = msgspec.msgpack.encode({name: state.seal() for name, state in self._local.items()})
        self._check_size(len(row), world_size)
        rank = self._rank()
        assert rank is not None
        changes = self._table.share(row, self._rank_objects.changes(rank), world_size)
        if changes is not None and not self._has_echoed():  # of an echo they fit nothing, and the step is undone
            self._rank_objects.put_together(changes)

    def _check_size(self, num_bytes: int, world_size: int) -> None:
        allowed = min(MAX_RANK_BYTES, MAX_TABLE_BYTES // world_size)
        if num_bytes <= allowed:
            return
        sizes = {attribute: len(content) for attribute, content in _by_attribute(self._local).items()}
        largest = max(sizes, key=lambda attribute: sizes[attribute])
        raise ConfigurationError(
            f"rank {self._rank()}: its values of session.state(per_rank=True) take {num_bytes} bytes, and "
            f"{allowed} are allowed on {world_size} ranks: they travel to all ranks at every step. The largest is "
            f"{largest} with {sizes[largest]} bytes"
        )


class _Table:
    """The local values of all ranks at one step: a row of the same size for each rank."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.content = b""

    @property
    def _capacity(self) -> int:
        """Capacity of a row in bytes. It is computed from replicated data, so a replacement gets the same result."""
        return (
            max(_MIN_CAPACITY, len(self.content) // self.num_rows - _LENGTH_BYTES) if self.num_rows else _MIN_CAPACITY
        )

    def share(self, row: bytes, changes: bytes, world_size: int) -> list[bytes] | None:
        """All-gathers the rows. If a row exceeds the capacity, it increases the capacity and all-gathers again.

        Args:
            row: this rank's.
            changes: in its objects; all-gathered as well if any rank has some.
            world_size: number of ranks.

        Returns:
            the changes of all ranks; None if there are none.
        """
        capacity = self._capacity
        rows = gathered(_row(row, capacity, len(changes)), world_size)
        lengths = [_lengths_of(each) for each in rows]
        longest = max(length for length, _more in lengths)
        if longest > capacity:
            capacity = (1 << (longest + _LENGTH_BYTES - 1).bit_length()) - _LENGTH_BYTES
            rows = gathered(_row(row, capacity, len(changes)), world_size)
        most = max(more for _length, more in lengths)
        self.num_rows, self.content = world_size, b"".join(rows if not most else map(_without_changes, rows))
        if not most:
            return None
        found = gathered(changes.ljust(most, b"\0"), world_size)
        return [each[:more] for each, (_length, more) in zip(found, lengths, strict=True)]

    def row(self, rank: int) -> bytes:
        """The row of one rank."""
        size = len(self.content) // self.num_rows
        row = self.content[rank * size : (rank + 1) * size]
        return row[_LENGTH_BYTES : _LENGTH_BYTES + _lengths_of(row)[0]]


class _LocalTable:
    """The table as a protected object. Loading it also sets this rank's own values."""

    def __init__(
        self, table: _Table, states: dict[str, State], objects: RankObjects, rank: Callable[[], int | None]
    ) -> None:
        self._table = table
        self._states = states
        self._objects = objects
        self._rank = rank

    @property
    def _names(self) -> dict[str, list[str]]:
        names = {name: list(state.state_dict()) for name, state in self._states.items()}
        return names | {"protect(per_rank=...)": self._objects.names}

    def state_dict(self) -> dict[str, Any]:
        """What all ranks hold; the same on every rank."""
        return {
            "names": self._names,
            "num_rows": self._table.num_rows,
            "rows": self._table.content,
            "objects": self._objects.packed(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises:
        StateMismatch: the state has another number of ranks, or other attributes.
        """
        rank, num_rows = self._rank(), state["num_rows"]
        if rank is None or not num_rows:
            raise InternalError(f"rank {rank} is to load the local values of {num_rows} ranks")
        self._check(state, dist.get_world_size())
        self._table.num_rows, self._table.content = num_rows, state["rows"]
        try:
            row = msgspec.msgpack.decode(self._table.row(rank), type=dict[str, dict[str, bytes]])
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the local values of rank {rank} do not parse: {error}") from error
        for name, values in row.items():
            _load(self._states[name], values)
        self._objects.load(state["objects"], rank)

    def _check(self, state: dict[str, Any], world_size: int) -> None:
        if state["num_rows"] != world_size:
            raise StateMismatch(
                f"the state holds what each of {state['num_rows']} ranks has of its own (per_rank), and this "
                f"job has {world_size}: start it with as many ranks, or give another checkpoint_dir"
            )
        if state["names"] != self._names:
            raise StateMismatch(f"each rank's own is {self._names} here, and in the state {state['names']}")


def _load(state: State, values: dict[str, bytes]) -> None:
    state.load_state_dict({key: from_bytes(content, f"{state!r}.{key}") for key, content in values.items()})


def _never(_attribute: str) -> None:
    """Replicated values may be set at any time."""


def _by_attribute(states: dict[str, State]) -> dict[str, bytes]:
    """All values as bytes, by the attributes as the script writes them."""
    return {f"{label}.{name}": content for label, state in states.items() for name, content in state.as_bytes().items()}


def _row(content: bytes, capacity: int, num_changes: int) -> bytes:
    """A row as it is sent."""
    lengths = len(content) | num_changes << 32
    return lengths.to_bytes(_LENGTH_BYTES, "little") + content[:capacity].ljust(capacity, b"\0")


def _without_changes(row: bytes) -> bytes:
    """A row as it is kept: the length of the changes is no part of a state."""
    return row[: _LENGTH_BYTES // 2] + bytes(_LENGTH_BYTES // 2) + row[_LENGTH_BYTES:]


def _lengths_of(row: bytes) -> tuple[int, int]:
    """Bytes of a row's content, and of the changes of the rank's objects."""
    word = int.from_bytes(row[:_LENGTH_BYTES], "little")
    return word & 0xFFFFFFFF, word >> 32
