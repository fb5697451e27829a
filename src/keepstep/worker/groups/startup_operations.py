"""Results of the ranks' start-up operations, for a replacement that runs the same script later and alone.

Until the first step, an `OperationRecorder` numbers the operations of each group and copies small results. The rank
hands them to the controller before it reports that it is ready. A replacement's groups echo while it starts, but an
`OperationReplayer` answers an operation of the same number, kind, dtypes and shapes with the result that was kept.
Large results are not kept: they are usually weights, as in DDP's constructor, which a replacement gets later.

A result that is equal on all members of a group is kept once, by its first member. Results that differ are kept by
rank. Tensors are kept as bytes; only torch and the script unpickle objects in them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.waiting.operations import Operation
from keepstep.weights.memory.bytes_of import host_bytes
from keepstep.worker.backends.communicator import Outputs
from keepstep.worker.groups import objects
from keepstep.worker.values.missing import line_of_script

EQUAL_ON_ALL = frozenset({Operation.ALL_REDUCE, Operation.BROADCAST, Operation.ALL_GATHER})
"""Operations whose result is the same on every member."""
OWN = frozenset(
    {
        Operation.REDUCE,
        Operation.GATHER,
        Operation.SCATTER,
        Operation.REDUCE_SCATTER,
        Operation.ALL_TO_ALL,
        Operation.RECV,
    }
)
"""Operations whose result is the rank's own."""
MAX_RESULT_BYTES = 1 << 20
"""Maximum size of one result: a vocabulary, a list of files, or statistics of a dataset, but not a model's weights."""
MAX_VALUE_BYTES = 4 << 20
"""Maximum size of the results of one group, or of one rank. A message of at most 16 MiB carries them, and a
connection's buffer holds 64 MiB (`keepstep.transports.rpc`)."""
WHAT_TO_DO = (
    "compute it on every rank, or write it to a file that all ranks read (USAGE.md, 'Objects exchanged while the "
    "script starts')"
)


class Result(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of the output tensors of one operation."""

    number: int
    """Number among the collectives of the group; of a recv, among those from the same peer."""
    operation: Operation
    peer: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """dtype and shape of each tensor."""
    data: bytes
    """The bytes of the tensors, one after the other."""


class Results(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Results of one group, or one rank's own in one group."""

    results: tuple[Result, ...]


class Keeper(Protocol):
    """Stores results at the controller."""

    def keep(self, name: str, value: bytes) -> bool:
        """Stores a value. Returns False if there is no room for it."""

    def kept(self, name: str) -> bytes | None:
        """Waits until all ranks have come to their first step. Returns the value stored under a name, or None."""


T = TypeVar("T")


def decode_kept(decoder: msgspec.msgpack.Decoder[T], keeper: Keeper, name: str) -> T | None:
    """Returns the decoded value stored under a name; None if there is none. Waits as `Keeper.kept` does.

    Raises:
        RemoteProtocolError: the value cannot be decoded.
    """
    value = keeper.kept(name)
    try:
        return None if value is None else decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"what was kept as {name} cannot be read: {error}") from error


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Results)


def _shared_name(group: str) -> str:
    return f"group/{group}"


def _own_name(group: str, rank: int) -> str:
    return f"own/{rank}/{group}"


def _flat(outputs: Outputs) -> list[Tensor]:
    return [tensor for each in outputs for tensor in (each if isinstance(each, (list, tuple)) else (each,))]


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _bytes_of(tensor: Tensor) -> bytes:
    return host_bytes(tensor.cpu().contiguous()).tobytes()


def _shapes(tensors: Iterable[Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)


class _Numbering:
    """Numbers the operations of all groups in the same way in every run of the script."""

    def __init__(self) -> None:
        self._numbers: Counter[tuple[str, int]] = Counter()

    def next(self, group: str, operation: Operation, peer: int) -> int:
        # Sends and receives are each rank's own, so they must not count among what all members share.
        key = (group, peer if operation in (Operation.SEND, Operation.RECV) else -1)
        self._numbers[key] += operation is not Operation.SEND
        return self._numbers[key]


class StartUpOperations(Protocol):
    """Records or replays the operations of groups, until the first step."""

    def joined(self, group: str, group_rank: int) -> None:
        """Reports a new group, in which this process has a rank."""

    def rank_for_torch(self) -> int | None:
        """Returns the rank that torch's own code must see now instead of the real one; None: the real one."""

    def answer(self, group: str, operation: Operation, outputs: Outputs, peer: int) -> bool:
        """Numbers an operation before it begins. Returns True if ``outputs`` hold its result already."""

    def follow(self, work: dist.Work) -> dist.Work:
        """Returns the handle for the script, of the operation that `answer` was last called for."""


class OperationRecorder:
    """Records the results of a rank's operations."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbering = _Numbering()
        self._next: tuple[str, Operation, int, int, list[Tensor]] | None = None
        self._under_way: list[_KeptWork] = []
        self._kept: dict[str, list[Result]] = {}
        self._num_bytes: Counter[str] = Counter()
        self._omitted: Counter[str] = Counter()
        self._first_members: set[str] = set()

    def joined(self, group: str, group_rank: int) -> None:
        """Registers a new group. Its first member records the results that are equal on all members."""
        if group_rank == 0:
            self._first_members.add(group)

    def rank_for_torch(self) -> int | None:
        """Returns None: torch sees the real rank."""
        return None

    def answer(self, group: str, operation: Operation, outputs: Outputs, peer: int) -> bool:
        """Numbers an operation, and decides whether to record its result. Returns False."""
        number = self._numbering.next(group, operation, peer)
        tensors = _flat(outputs)
        is_mine = operation in OWN or (operation in EQUAL_ON_ALL and group in self._first_members)
        is_small = 0 < _num_bytes(tensors) <= MAX_RESULT_BYTES
        self._next = (group, operation, peer, number, tensors) if is_mine and is_small else None
        return False

    def follow(self, work: dist.Work) -> dist.Work:
        """Wraps the handle, so that the result is copied when the script learns of the operation's end."""
        if self._next is None:
            return work
        group, operation, peer, number, tensors = self._next
        name = _own_name(group, self._rank) if operation in OWN else _shared_name(group)
        kept = _KeptWork(work, tensors, lambda: self._keep(name, operation, peer, number, tensors))
        self._under_way.append(kept)
        return kept

    def _keep(self, name: str, operation: Operation, peer: int, number: int, tensors: list[Tensor]) -> None:
        num_bytes = self._num_bytes[name] + _num_bytes(tensors)
        if num_bytes > MAX_VALUE_BYTES:
            self._omitted[name] += 1
            return
        self._num_bytes[name] = num_bytes
        data = b"".join(map(_bytes_of, tensors))
        self._kept.setdefault(name, []).append(Result(number, operation, peer, _shapes(tensors), data))

    def hand_over(self, keeper: Keeper) -> None:
        """Stores all results. Prints a warning if there is no room for them; training continues.

        Raises:
            PeerLost: a rank was lost, so this start-up does not count.
        """
        for work in self._under_way:
            work.look()
        for name, results in self._kept.items():
            value = _encoder.encode(Results(tuple(results)))
            if not keeper.keep(name, value) or self._omitted[name]:
                print(
                    f"keepstep: rank {self._rank}: not all that ranks exchanged before the first step could be kept "
                    f"for a replacement ({name}: {len(value)} bytes); it goes on with values of its own, or ends if "
                    f"it cannot; {WHAT_TO_DO}",
                    file=sys.stderr,
                    flush=True,
                )


class OperationReplayer:
    """Answers a replacement's operations with the results that the ranks recorded in their own start-up."""

    def __init__(self, keeper: Keeper, await_rank: Callable[[], int], known_rank: Callable[[], int | None]) -> None:
        """Args:
        keeper: holds the recorded results.
        await_rank: returns this process's rank; waits if the rank is not known yet.
        known_rank: the same, without waiting; None if the rank is not known yet.
        """
        self._keeper = keeper
        self._known_rank = known_rank
        self._await_rank = await_rank
        self._numbering = _Numbering()
        self._known: dict[str, dict[tuple[Operation, int, int], Result]] = {}

    def joined(self, group: str, group_rank: int) -> None:
        """Does nothing."""

    def rank_for_torch(self) -> int | None:
        """Makes a replacement receive every object, even its own: its rank may have sent another one."""
        if objects.is_asked_by_receiver():
            return -1
        return 0 if self._known_rank() is None and objects.is_asked_by_log() else None

    def answer(self, group: str, operation: Operation, outputs: Outputs, peer: int) -> bool:
        """Fills ``outputs`` with the recorded result of the same operation. Returns False if there is none.

        Raises:
            PeerLost: the caller is about to unpickle an object that was not recorded.
        """
        number = self._numbering.next(group, operation, peer)
        tensors = _flat(outputs)
        num_bytes = _num_bytes(tensors)
        if operation not in EQUAL_ON_ALL | OWN or num_bytes == 0:
            return False
        result = None
        if num_bytes <= MAX_RESULT_BYTES:
            name = _shared_name(group) if operation in EQUAL_ON_ALL else _own_name(group, self._await_rank())
            result = self._results(name).get((operation, peer, number))
        if result is None or result.shapes != _shapes(tensors):
            why = "it is too large, or more than they did" if result is None else "they had another size"
            objects.refuse_unpickling(
                group,
                f"a replacement does not get what the ranks exchanged when they started ({why}), at "
                f"{line_of_script()}: load a checkpoint in session.resume(load), which a replacement does not call; "
                f"for anything else, {WHAT_TO_DO}",
            )
            return False
        _fill(tensors, result.data)
        return True

    def follow(self, work: dist.Work) -> dist.Work:
        """Returns the handle unchanged: the group echoes the operation."""
        return work

    def _results(self, name: str) -> dict[tuple[Operation, int, int], Result]:
        if name not in self._known:
            kept = decode_kept(_decoder, self._keeper, name)
            found = kept.results if kept is not None else ()
            self._known[name] = {(each.operation, each.peer, each.number): each for each in found}
        return self._known[name]


def _fill(tensors: list[Tensor], data: bytes) -> None:
    if len(data) != _num_bytes(tensors):
        raise RemoteProtocolError(f"a kept result has {len(data)} bytes and not {_num_bytes(tensors)}")
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    start = 0
    for tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        if end > start:
            tensor.detach().copy_(source[start:end].clone().view(tensor.dtype).reshape(tensor.shape))
        start = end


class _KeptWork(dist.Work):
    """The handle of an operation whose result is copied before the script can change it."""

    def __init__(self, work: dist.Work, outputs: list[Tensor], keep: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._keep: Callable[[], None] | None = keep

    def _ended(self) -> None:
        keep, self._keep = self._keep, None
        if keep is not None:
            keep()

    def look(self) -> None:
        """Copies the result if the operation has succeeded and the script has not asked for its end."""
        if self._keep is not None and self._work.is_completed() and self._work.is_success():
            self._ended()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Forwards to the operation's own handle."""
        done = self._work.wait(timeout) if timeout else self._work.wait()
        self._ended()
        return done

    def get_future(self) -> torch.futures.Future[Any]:
        """Forwards to the operation's own handle."""

        def ended(future: torch.futures.Future[Any]) -> Any:
            value = future.value()
            self._ended()
            return value

        return self._work.get_future().then(ended)

    def is_completed(self) -> bool:
        """Forwards to the operation's own handle."""
        done = self._work.is_completed()
        self.look()
        return done

    def is_success(self) -> bool:
        """Forwards to the operation's own handle."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Forwards to the operation's own handle."""
        return self._work.exception()

    def result(self) -> Any:
        """Forwards to the operation's own handle."""
        return self._work.result()

    def synchronize(self) -> None:
        """Forwards to the operation's own handle."""
        self.wait()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())
