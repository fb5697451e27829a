"""All surviving groups of this process: created, connected, closed and reconnected together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world as torch_world

from keepstep.errors import InternalError, PeerLost, RemoteProtocolError
from keepstep.protocol.kept_groups import GroupClaim, why_rebuilt
from keepstep.worker.backends.by_device import CPU, backends_of
from keepstep.worker.backends.communicator import LOOPBACK
from keepstep.worker.groups.group import SurvivingGroup
from keepstep.worker.groups.observer import GroupObserver
from keepstep.worker.groups.startup_operations import StartUpOperations

BACKEND = "keepstep"
_CPU = torch.device(CPU)
WORLD = "world"
CONNECT_DEADLINE = timedelta(seconds=30)
"""Members that take part in a reset have all reported in just before; a healthy connection takes milliseconds."""
DRAIN_DEADLINE_S = 30.0
"""A broken collective ends within milliseconds; this bounds the wait should that ever not hold."""

UNTRACED = (
    "keepstep.protocol",
    "keepstep.shared.tagpage",
    "keepstep.worker.backends",
    "keepstep.worker.coordination",
    "keepstep.worker.groups",
)
"""What runs when a collective is called."""

CLAIMS = "claims"
"""The name of the store in which ranks claim which groups can stay; no group is called so."""

StoreFactory = Callable[[int, str], Store]
_claims_of_a_rank = msgspec.msgpack.Decoder(dict[str, GroupClaim])


class GroupRegistry:
    """The groups of one process, in order of creation.

    A group is named by its members and by how many of the same members came before it, so survivors and a
    replacement agree on names even where torch's own counters differ.
    """

    def __init__(
        self,
        store: StoreFactory,
        observer: GroupObserver,
        host: str = LOOPBACK,
        device: torch.device = _CPU,
    ) -> None:
        """Args:
        store: where the members of a group find each other, by generation and group.
        observer: told of collectives and their errors.
        host: the address of this machine at which the other ranks reach it.
        device: this process's own, whose tensors every group carries beside those on the CPU.
        """
        self._store = store
        self._host, self._device = host, device
        self._observer = observer
        self._groups: list[tuple[SurvivingGroup, tuple[int, ...]]] = []
        self._made: Counter[tuple[int, ...]] = Counter()
        self._generation: int | None = None
        self._rank = 0
        self._built: dict[str, int] = {}
        """The generation in which the connections of each group were made."""
        self.rebuilt: dict[str, str] = {}
        """Which groups that seemed whole on this rank were rebuilt by the last `connect`, and why."""
        self._start_up: StartUpOperations | None = None
        self._default_store: Store | None = None
        """Torch has it in C++, which does not keep a Python object alive."""

    def join_world(
        self, rank: int, world_size: int, await_rank: Callable[[], int], store: Store | None = None
    ) -> SurvivingGroup:
        """Creates torch's default process group, still down; `connect` brings it up.

        Args:
            rank: this process's rank; on a spare a provisional one.
            world_size: number of ranks.
            await_rank: gives the real rank, when there is one.
            store: torch's default store; None: one of this process alone.
        """
        _leave_out_of_compilation()
        if not hasattr(dist.Backend, BACKEND.upper()):
            dist.Backend.register_backend(
                BACKEND, self._create, extended_api=True, devices=list(backends_of(self._device))
            )
            _leave_out_of_flight_recorder()
        self._default_store = store or HashStore()
        dist.init_process_group(BACKEND, store=self._default_store, rank=rank, world_size=world_size)
        self.world.await_rank = await_rank
        return self.world

    def begin_start_up(self, start_up: StartUpOperations) -> None:
        """From now on, until `end_start_up`, what the groups of this process do goes through ``start_up``."""
        self._start_up = start_up

    def end_start_up(self) -> None:
        """The first step is here: operations are what they are."""
        self._start_up = None
        for group, _members in self._groups:
            group.start_up = None

    @property
    def world(self) -> SurvivingGroup:
        """The default process group."""
        return self._groups[0][0]

    def _create(self, options: Any, _backend_options: object) -> SurvivingGroup:
        """Torch asks for the default group; it has the world group make all others."""
        world = self._make(WORLD, tuple(range(options.group_size)), options.group_rank, options.timeout)
        world.make_group = self._make_group
        return world

    def _make_group(self, members: tuple[int, ...], timeout: timedelta) -> SurvivingGroup | None:
        rank = self._rank if self._generation is not None else self.world.rank()
        if rank not in members:
            return None
        name = f"{'-'.join(map(str, members))}.{self._made[members]}"
        group = self._make(name, members, members.index(rank), timeout)
        # Functional collectives name a group by its ranks, and look for it here; torch registers a group that the
        # default group has made under its name alone.
        torch_world.tags_to_pg.setdefault("", []).append(group)
        return group

    def _make(self, name: str, members: tuple[int, ...], rank: int, timeout: timedelta) -> SurvivingGroup:
        self._made[members] += 1
        group = SurvivingGroup(name, rank, len(members), timeout, self._observer, self._host, self._device)
        if self._start_up is not None:
            group.start_up = self._start_up
            self._start_up.joined(name, rank)
        self._groups.append((group, members))
        generation = self._generation
        if generation is not None and not self.world.is_down:
            try:
                self._connect(group, generation, members.index(self._rank), lambda: self._generation != generation)
            except (RuntimeError, PeerLost) as error:
                if not self._observer.failed(name, error):
                    raise
        return group

    def connect(self, generation: int, rank: int, replaced: Set[int] = frozenset()) -> None:
        """Brings every group up in ``generation``, together with the other ranks. Nothing is under way in any of them.

        Args:
            generation: the new one.
            rank: this process's.
            replaced: ranks that are known to be held by other processes than before: their groups cannot stay.

        Raises:
            RuntimeError: another rank did not come, or `take_down` was called meanwhile.
            PeerLost: the store says that the generation is over.
            RemoteProtocolError: another rank's claims cannot be read.
        """
        self._rank = rank
        kept = self._kept(generation, replaced)
        for group, members in self._groups:
            if group.keepstep_name in kept:
                group.reopen()
            else:
                self._connect(group, generation, members.index(rank), lambda: self._observer.is_over(generation))
        self._generation = generation

    def _kept(self, generation: int, replaced: Set[int]) -> set[str]:
        """The names of the groups that stay, as all their members agree.

        Every rank makes its claims, since it cannot know who reads them. It reads those of others where it has a group
        that can stay as far as it knows: in a job of which one rank was lost not for the world group, which is rebuilt.
        """
        mine: dict[str, GroupClaim] = {}
        peers: set[int] = set()
        for group, members in self._groups:
            name = group.keepstep_name
            if name in self._built and replaced.isdisjoint(members):
                claims = group.claims(self._built[name], members.index(self._rank))
                if claims:
                    mine |= {_key(name, device_type): claim for device_type, claim in claims.items()}
                    peers.update(members)
        store = self._store(generation, CLAIMS)
        store.set_timeout(CONNECT_DEADLINE)
        store.set(str(self._rank), msgspec.msgpack.encode(mine))  # type: ignore[arg-type]  # torch's takes bytes, too
        values = store.multi_get([str(peer) for peer in sorted(peers)]) if peers else []
        said = {peer: _decoded(value) for peer, value in zip(sorted(peers), values, strict=True)}
        why: dict[str, str | None] = {}
        for group, members in self._groups:
            keys = [_key(group.keepstep_name, device.type) for device in group._device_types]
            if keys[0] in mine:
                whys = [why_rebuilt([said[member].get(key) for member in members]) for key in keys]
                why[group.keepstep_name] = next((reason for reason in whys if reason is not None), None)
        self.rebuilt = {name: reason for name, reason in why.items() if reason is not None}
        return why.keys() - self.rebuilt.keys()

    def _connect(self, group: SurvivingGroup, generation: int, rank: int, is_over: Callable[[], bool]) -> None:
        group.connect(self._store(generation, group.keepstep_name), rank, CONNECT_DEADLINE, is_over)
        self._built[group.keepstep_name] = generation

    def drain(self) -> None:
        """Waits until no broken collective writes into a tensor any more.

        Raises:
            InternalError: one did not end, though its connections are closed.
        """
        for group, _members in self._groups:
            if not group.drain(DRAIN_DEADLINE_S):
                raise InternalError(f"a collective of group {group.keepstep_name} did not end after it was broken")

    def look(self) -> None:
        """Notices which operations have ended, without waiting. The training thread calls it.

        Raises:
            RuntimeError: the error that one has ended in after the script had waited for it on a stream.
        """
        for group, _members in self._groups:
            group.look()

    def take_down(self) -> None:
        """Has no operation begin any more, and breaks every communicator in which one is under way. From any thread."""
        self._generation = None
        for group, _members in list(self._groups):
            group.take_down()


def _key(group: str, device_type: str) -> str:
    """Under which name a rank claims that the connections of a group for one type of device can stay."""
    return group if device_type == CPU else f"{group}/{device_type}"


def _decoded(claims: bytes) -> dict[str, GroupClaim]:
    try:
        return _claims_of_a_rank.decode(claims)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a rank's claims for its groups cannot be read: {error}") from error


def _leave_out_of_compilation() -> None:
    """What a group does is not for torch.compile, which may call it from what it has compiled: DDP's forward does."""
    from torch._dynamo import trace_rules  # takes a second, unless the spawner has imported it

    for name in UNTRACED:
        trace_rules.add(name)


def _leave_out_of_flight_recorder() -> None:
    """Torch's flight recorder, as of torch 2.15, hooks every group that does not record by itself.

    The hook looks for a backend in C++, which a group in Python has not, and raises.
    """
    recording_themselves: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording_themselves.add(BACKEND)
