"""The values that the script has declared with `Session.state`: replicated or rank-local, and when they may change.

*Replicated* values are the same on every rank. *Rank-local* ones differ from rank to rank, and a lost rank's must
survive it. So every rank sends its own to all others before it enters the gradient barrier, and each keeps all of them,
as one table, in its host state. Then the same holds as for module buffers: when a rank has left the barrier of step i,
every other one has the table of step i+1, and any live rank can restore any other. docs/PROTOCOL.md has the argument.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash
from torch import distributed as dist

from keepstep.errors import ConfigurationError, InternalError, RemoteProtocolError, StateMismatch, UsageError
from keepstep.worker.state.layout import gathered
from keepstep.worker.values.attributes import State, from_bytes

MAX_RANK_BYTES = 64 << 10
"""Of one rank's local values together; they travel to every rank at every step."""
MAX_TABLE_BYTES = 16 << 20
"""Of those of all ranks, which every rank holds: with more than 256 ranks each may have less."""
_MIN_CAPACITY = 120
"""Bytes of a row at first. With its length it fills two cache lines; a running mean takes 60."""
_LENGTH_BYTES = 8
_DIGEST_BYTES = 8


class Moment(enum.Enum):
    """Where the script is, as far as declared values are concerned."""

    START = enum.auto()
    """Before the first step: everything may be declared and set."""
    OPEN = enum.auto()
    """From when a step is handed out to its gradient barrier."""
    SHARED = enum.auto()
    """From the barrier to when the next step is handed out: rank-local values have left the rank."""
    OVER = enum.auto()
    """After the last step: nothing is protected."""


class DeclaredState:
    """All that one rank's script has declared. Used from the training thread."""

    def __init__(self, rank: Callable[[], int | None]) -> None:
        """Takes what gives this process's rank, None on a spare."""
        self.objects: dict[str, Any] = {}
        """What is protected: replicated values by their names, and the table of all ranks' local ones."""
        self._rank = rank
        self._moment = Moment.START
        self._replicated: dict[str, State] = {}
        self._local: dict[str, State] = {}
        self._table = _Table()

    def declare(self, name: str, per_rank: bool, values: dict[str, Any]) -> State:
        """A new object; see `Session.state`.

        Raises:
            UsageError: the first step was handed out already.
            ConfigurationError: nothing to declare, twice the same, or a value that cannot be carried.
        """
        arguments = [*([repr(name)] if name else []), *(["per_rank=True"] if per_rank else [])]
        label = f"session.state({', '.join(arguments)})"
        if self._moment is not Moment.START:
            raise UsageError(f"{label} after the first step: declare it before, on every rank")
        if not values:
            raise ConfigurationError(f"{label}: give it attributes with their first values, such as best=0.0")
        own = self._local if per_rank else self._replicated
        if label in own:
            raise ConfigurationError(
                f"{label} was called twice: give the second one a name, session.state('name', ...)"
            )
        own[label] = state = State(label, values, self._local_refusal if per_rank else _never)
        if per_rank:
            self.objects["session.state per rank"] = _LocalTable(self._table, self._local, self._rank)
        else:
            self.objects[label] = state
        return state

    def _local_refusal(self, attribute: str) -> str | None:
        if self._moment is not Moment.SHARED:
            return None
        return (
            f"{attribute} was changed after optimizer.step(): a rank's own values leave it with its gradients, and "
            "a later change would be lost with it; change it before the step's first optimizer.step(), or before "
            "the 'with'"
        )

    # ---- the course of a step ---------------------------------------------------------------------------------------

    def begin(self, world_size: int, *, share: bool) -> None:
        """The script stands at its first step, and with ``share`` all ranks do: each gets the first local values.

        Raises:
            ConfigurationError: this rank's local values are too large.
        """
        if share and self._local:
            self._share(world_size)
        self._moment = Moment.SHARED

    def hand_out(self) -> None:
        """A step is handed out.

        Raises:
            UsageError: a local value was changed in place since the last barrier.
        """
        self.check()
        self._moment = Moment.OPEN

    def before_barrier(self, step: int, world_size: int) -> None:
        """Gives this rank's local values to all others, and gets theirs. Now and then compares the replicated ones.

        Raises:
            ConfigurationError: this rank's local values are too large.
            UsageError: replicated values differ from rank to rank.
        """
        if self._local:
            self._share(world_size)
        if self._replicated and world_size > 1 and step & (step - 1) == 0:
            self._compare(step, world_size)
        self._moment = Moment.SHARED

    def check(self) -> None:
        """A step is complete, or the script asks for the next one.

        Raises:
            UsageError: a local value was changed in place since the barrier; assignments were refused where they stood.
        """
        for state in self._local.values():
            if self._moment is Moment.SHARED and (changed := state.changed()):
                raise UsageError(self._local_refusal(changed))

    def undone(self) -> None:
        """A step is undone, and what comes until the next one is put back as well."""
        self._moment = Moment.OPEN

    def end(self) -> None:
        """The last step is complete on all ranks."""
        self._moment = Moment.OVER

    # ---- between ranks ----------------------------------------------------------------------------------------------

    def _share(self, world_size: int) -> None:
        row = msgspec.msgpack.encode({name: state.seal() for name, state in self._local.items()})
        self._check_size(len(row), world_size)
        self._table.share(row, world_size)

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

    def _compare(self, step: int, world_size: int) -> None:
        """Compares one digest of all replicated values, and where it differs one for each attribute.

        At steps 0, 1, 2, 4, 8 and so on: a value that is wrong by design is found early, at no cost in the long run.
        """
        own = _by_attribute(self._replicated)
        digests = [xxhash.xxh3_64_digest(f"{name}:".encode() + content) for name, content in own.items()]
        rows = gathered(len(digests).to_bytes(8, "little") + xxhash.xxh3_64_digest(b"".join(digests)), world_size)
        if all(row == rows[0] for row in rows):
            return
        if any(row[:8] != rows[0][:8] for row in rows):
            numbers = [int.from_bytes(row[:8], "little") for row in rows]
            raise UsageError(f"step {step}: the ranks have declared {numbers} attributes by session.state()")
        details = gathered(b"".join(digests), world_size)  # all ranks come here, or none
        names = list(own)
        for index in range(len(digests)):
            at = slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES)
            others = [rank for rank, row in enumerate(details) if row[at] != details[0][at]]
            if others:
                raise UsageError(
                    f"step {step}: {names[index]} differs between rank 0 and ranks {others[:4]}, and a replacement "
                    "would get another rank's; reduce what it is computed from over all ranks, or declare it with "
                    "session.state(..., per_rank=True)"
                )
        raise InternalError(f"step {step}: the digests of replicated values differ, and no attribute does")


class _Table:
    """The local values of all ranks as of one step: a row for each, of one size."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.content = b""

    @property
    def _capacity(self) -> int:
        """Of a row, from what all ranks hold alike: a replacement comes to the same."""
        return (
            max(_MIN_CAPACITY, len(self.content) // self.num_rows - _LENGTH_BYTES) if self.num_rows else _MIN_CAPACITY
        )

    def share(self, row: bytes, world_size: int) -> None:
        """Gives a row and gets all of them; in a second go where one does not fit into what sufficed before."""
        capacity = self._capacity
        rows = gathered(_row(row, capacity), world_size)
        longest = max(int.from_bytes(each[:_LENGTH_BYTES], "little") for each in rows)
        if longest > capacity:
            capacity = (1 << (longest + _LENGTH_BYTES - 1).bit_length()) - _LENGTH_BYTES
            rows = gathered(_row(row, capacity), world_size)
        self.num_rows, self.content = world_size, b"".join(rows)

    def row(self, rank: int) -> bytes:
        """One rank's."""
        size = len(self.content) // self.num_rows
        row = self.content[rank * size : (rank + 1) * size]
        return row[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(row[:_LENGTH_BYTES], "little")]


class _LocalTable:
    """The table as a protected object: what is loaded sets this rank's own values."""

    def __init__(self, table: _Table, states: dict[str, State], rank: Callable[[], int | None]) -> None:
        self._table = table
        self._states = states
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        names = {name: list(state.state_dict()) for name, state in self._states.items()}
        return {"names": names, "num_rows": self._table.num_rows, "rows": self._table.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises:
        StateMismatch: it is of another job's ranks or of other values.
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
            own = self._states[name]
            own.load_state_dict({key: from_bytes(content, f"{name}.{key}") for key, content in values.items()})

    def _check(self, state: dict[str, Any], world_size: int) -> None:
        if state["num_rows"] != world_size:
            raise StateMismatch(
                f"the state holds the values of session.state(per_rank=True) of {state['num_rows']} ranks, and this "
                f"job has {world_size}: start it with as many ranks, or give another checkpoint_dir"
            )
        names = {name: list(each.state_dict()) for name, each in self._states.items()}
        if state["names"] != names:
            raise StateMismatch(f"session.state(per_rank=True) has {names} here, and the state {state['names']}")


def _never(_attribute: str) -> None:
    """Replicated values may be set at any time."""


def _by_attribute(states: dict[str, State]) -> dict[str, bytes]:
    """All values as bytes, by the attributes as the script writes them."""
    return {f"{label}.{name}": content for label, state in states.items() for name, content in state.as_bytes().items()}


def _row(content: bytes, capacity: int) -> bytes:
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content[:capacity].ljust(capacity, b"\0")
