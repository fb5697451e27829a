"""The content of a checkpoint: the state under names and offsets that do not depend on the number of ranks.

Tensors are blocks of whole tensors. Optimizer state and all else that belongs to a parameter has the name of the
parameter and not its index: under pipelining an index means a different parameter on each stage. The host state is
usually the same on every rank. If it is not, each shard has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
import xxhash

from keepstep.weights.memory.blocks import NamedBlock
from keepstep.weights.memory.bytes_of import host_bytes
from keepstep.worker.parallel.layout import Replicated
from keepstep.worker.parallel.zero import writes_buffers
from keepstep.worker.state import tree
from keepstep.worker.state.layout import TensorHeader, headers_of
from keepstep.worker.state.protected import Modes, Named, ProtectedState, parameters_here, parameters_of


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """Which part of a checkpoint a rank writes.

    Attributes:
        rank: that writes it.
        shards: of the whole job. With one, the part is the checkpoint.
    """

    rank: int = 0
    shards: tuple[str, ...] = ()

    @property
    def is_all(self) -> bool:
        """Whether the part is the whole checkpoint."""
        return len(self.shards) <= 1


class Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Serialized host values. Their tensors are stored as tensors of the checkpoint."""

    plain: bytes
    """As `tree.pack` makes it, in msgpack."""
    tensors: tuple[str, ...]
    """Their names."""

    def unpacked(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Deserializes the values. Raises RemoteProtocolError if the bytes are invalid."""
        return tree.unpack(msgspec.msgpack.decode(self.plain), [tensors[name] for name in self.tensors])


class HostState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`ProtectedState.shared_values`, and whose they are."""

    shards: tuple[str, ...]
    packed: Packed


class Content(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A checkpoint, or one rank's part of it, without the tensors' bytes."""

    tensors: tuple[TensorHeader, ...]
    """Of a part: all blocks in it. Of a checkpoint: one block of each tensor."""
    hosts: tuple[HostState, ...]
    scalars: dict[str, Packed]
    """Optimizer state that is in no tensor, by ``optimizer/parameter``."""
    with_gradient: tuple[str, ...]
    modes: Modes
    buffers: tuple[str, ...]
    """Names of those tensors that are buffers, without ``model/``."""

    def host_of(self, shard: str) -> HostState | None:
        """The host state of a shard; None if the shard has none of its own and the shards differ."""
        found = [host for host in self.hosts if shard in host.shards]
        return found[0] if found else (self.hosts[0] if len(self.hosts) == 1 else None)


def describe(state: ProtectedState, share: Share) -> tuple[Content, dict[str, torch.Tensor]]:
    """This rank's part of a checkpoint: its content, and its tensors by name. The tensors are the live ones."""
    names = SavedNames(state)
    others: Named = []
    host = _pack(state.shared_values(), f"host/{share.rank}", others)
    scalars = {name: _pack(values, f"scalars/{name}", others) for name, values in names.scalars()}
    own = [block for block in names.live_blocks() if block.names[0] not in names.left_to_others]
    blocks = [*own, *Replicated().blocks(others)]
    parameters = [name for name, _parameter in state.parameters()]
    content = Content(
        headers_of(blocks),
        (HostState((state.shard(),), host),),
        scalars,
        tuple(names.of(parameters[index]) for index in state.gradient_marks()),
        names.modes(state.modes()),
        tuple(names.of(name) for name, _buffer in state.buffers()),
    )
    return content, {block.names[0]: block.held.tensor for block in blocks}


def _pack(value: Any, name: str, others: Named) -> Packed:
    """Serializes a value. Appends its tensors to ``others``, those that fill one run of memory by reference."""
    plain, tensors = tree.encoded(value)
    named = [(f"{name}/{index}", tensor) for index, tensor in enumerate(tensors)]
    others += named
    return Packed(plain, tuple(name for name, _tensor in named))


def digest_of_tensor(tensor: torch.Tensor) -> bytes:
    """A digest of a tensor's content, to compare two ranks' tensors of the same name."""
    return xxhash.xxh3_128_digest(host_bytes(tensor))


class SavedNames:
    """The names of one rank's state in a checkpoint, and what they stand for."""

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        by_place = {id(parameter): name for name, parameter in state.parameters()}
        self.indices: dict[str, str] = {}
        """``optimizer/parameter`` -> ``optimizer/index`` as in `ProtectedState.optimizer_tensors`, for the parameters
        whose optimizer state this rank holds."""
        self.parameters: dict[str, torch.Tensor] = {}
        """The same for all parameters."""
        self.left_to_others: set[str] = set()
        """Names in the checkpoint of tensors that this rank does not write under ZeRO: parameters that another rank
        updates, and buffers. Each rank has its own buffers, and DDP continues with those of its first rank."""
        for optimizer, thing in state.optimizers.items():
            self.parameters |= {f"{optimizer}/{self.of(by_place[id(p)])}": p for p in parameters_of(thing)}
            here = parameters_here(thing)
            self.indices |= {f"{optimizer}/{self.of(by_place[id(p)])}": f"{optimizer}/{index}" for index, p in here}
            owned = {id(parameter) for _index, parameter in here}
            others = (by_place[id(each)] for each in parameters_of(thing) if id(each) not in owned)
            self.left_to_others |= {f"model/{self.of(name)}" for name in others}
            if not writes_buffers(thing):
                self.left_to_others |= {f"model/{self.of(name)}" for name, _buffer in state.buffers()}
        self._by_index = {index: name for name, index in self.indices.items()}

    def of(self, name: str) -> str:
        """The name in the checkpoint of a module, parameter or buffer. It distinguishes parts with the same name."""
        return f"{self._state.label}: {name}" if self._state.label else name

    def live_blocks(self) -> list[NamedBlock]:
        """This rank's blocks of modules and optimizers, with their names in the checkpoint."""
        named = [(f"model/{self.of(name)}", t) for name, t in (*self._state.parameters(), *self._state.buffers())]
        for name, tensor in self._state.optimizer_tensors():
            optimizer, index, key = name.split("/", 2)
            named.append((f"optimizer/{self._by_index[f'{optimizer}/{index}']}/{key}", tensor))
        return self._state.layout.blocks(named)

    def scalars(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Optimizer state that is in no tensor, by ``optimizer/parameter``."""
        for optimizer, by_index in self._state.optimizer_values().items():
            for index, values in by_index.items():
                yield self._by_index[f"{optimizer}/{index}"], values

    def scalars_here(self, content: Content, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[int, Any]]:
        """The saved `scalars` of this rank's parameters, in the form for `ProtectedState.load_host_state`."""
        found: dict[str, dict[int, Any]] = {name: {} for name in self._state.optimizers}
        for name, packed in content.scalars.items():
            if name in self.indices:
                optimizer, index = self.indices[name].rsplit("/", 1)
                found[optimizer][int(index)] = packed.unpacked(tensors)
        return found

    def gradients_here(self, with_gradient: Iterable[str]) -> tuple[int, ...]:
        """The indices of this rank's parameters whose names are in ``with_gradient``."""
        marked = set(with_gradient)
        return tuple(i for i, (name, _p) in enumerate(self._state.parameters()) if self.of(name) in marked)

    def modes(self, own: Modes) -> Modes:
        """Translates modes from this rank's names to those in the checkpoint."""
        evaluating, frozen = frozenset(map(self.of, own.evaluating)), frozenset(map(self.of, own.frozen))
        written = None if own.written is None else frozenset(map(self.of, own.written))
        without_tensor, transient = frozenset(map(self.of, own.without_tensor)), frozenset(map(self.of, own.transient))
        return Modes(evaluating, frozen, written, without_tensor, transient)

    def modes_here(self, modes: Modes) -> Modes:
        """Translates modes from the names in the checkpoint to those of this rank."""
        own = {self.of(name): name for name in [n for n, _part in self._state.parts()]}
        trained = {self.of(name): name for name, _parameter in self._state.parameters()}
        return Modes(
            frozenset(own[name] for name in modes.evaluating if name in own),
            frozenset(trained[name] for name in modes.frozen if name in trained),
            None if modes.written is None else frozenset(trained[name] for name in modes.written if name in trained),
            frozenset(self.buffers_here(modes.without_tensor).values()),
            frozenset(self.buffers_here(modes.transient).values()),
        )

    def buffers_here(self, names: Iterable[str]) -> dict[str, str]:
        """Names of buffers in the checkpoint -> this rank's, for those in modules that this rank has."""
        parts = {self.of(path.removesuffix(".")) for path, _part in self._state.parts()}
        label = len(self.of(""))
        return {name: name[label:] for name in names if name.rpartition(".")[0] in parts}
