"""All surviving groups of this process: created, connected, closed and reconnected together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world as torch_world

from keepstep.errors import InternalError, PeerLost, RemoteProtocolError, UsageError
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
"""How long a member waits for the others. All of them have just reported; a healthy connection takes milliseconds."""
DRAIN_DEADLINE_S = 30.0
"""A broken collective ends within milliseconds; this bounds the wait should that ever not hold."""

UNTRACED = (
    "keepstep.protocol",
    "keepstep.shared.tagpage",
    "keepstep.worker.backends",
    "keepstep.worker.coordination",
    "keepstep.worker.groups",
)
"""Modules that run when a collective is called."""

CLAIMS = "claims"
"""Name of the store with the ranks' claims on groups that can stay. No group has this name."""

StoreFactory = Callable[[int, str], Store]
_claims_of_a_rank = msgspec.msgpack.Decoder(dict[str, GroupClaim])


class GroupRegistry:
    """The groups of one process, in order of creation.

    The name of a group consists of its members and the number of earlier groups with the same members. So survivors and
    a replacement agree on names even if torch's own counters differ.
    """

    def __init__(
        self,
        store: StoreFactory,
        observer: GroupObserver,
        host: str = LOOPBACK,
        device: torch.device = _CPU,
    ) -> None:
        """Args:
        store: returns the store in which the members of a group find each other, by generation and group.
        observer: is notified of collectives and their errors.
        host: the address of this machine at which the other ranks reach it.
        device: this process's own device; every group carries its tensors beside those on the CPU.
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
        """Groups that seemed intact on this rank and that the last `connect` has rebuilt -> reason."""
        self._start_up: StartUpOperations | None = None
        self._default_store: Store | None = None
        """Kept alive here: torch holds it only in C++, which does not keep a Python object alive."""

    def join_world(
        self,
        rank: int,
        world_size: int,
        await_rank: Callable[[], int],
        store: Store | None = None,
        timeout: timedelta | None = None,
    ) -> SurvivingGroup:
        """Creates torch's default process group, still down; `connect` brings it up.

        Args:
            rank: this process's rank; on a spare a provisional one.
            world_size: number of ranks.
            await_rank: waits for the real rank and returns it.
            store: torch's default store; None: a store of this process alone.
            timeout: of its collectives; None: torch's default.
        """
        _leave_out_of_compilation()
        if not hasattr(dist.Backend, BACKEND.upper()):
            dist.Backend.register_backend(
                BACKEND, self._create, extended_api=True, devices=list(backends_of(self._device))
            )
            _leave_out_of_flight_recorder()
        self._default_store = store or HashStore()
        dist.init_process_group(BACKEND, store=self._default_store, rank=rank, world_size=world_size, timeout=timeout)
        self.world.await_rank = await_rank
        return self.world

    def begin_start_up(self, start_up: StartUpOperations) -> None:
        """Passes the operations of this process's groups through ``start_up``, until `end_start_up`."""
        self._start_up = start_up

    @contextmanager
    def outside_start_up(self) -> Iterator[None]:
        """A context in which operations are neither recorded nor replayed, because a replacement does not run it.

        Raises:
            UsageError: a group was created inside, which a replacement would not have.
        """
        start_up, num_groups = self._start_up, len(self._groups)
        self.end_start_up()
        try:
            yield
        finally:
            self._start_up = start_up
            for group, _members in self._groups:
                group.start_up = start_up
        if len(self._groups) > num_groups:
            raise UsageError(
                "load() of session.resume() has created a process group, which a replacement would lack, because it "
                "does not call load(): create the group before"
            )

    def end_start_up(self) -> None:
        """Ends the recording or the replay, at the first step."""
        self._start_up = None
        for group, _members in self._groups:
            group.start_up = None

    @property
    def longest_timeout_s(self) -> float:
        """The longest timeout of a group, in seconds: how long the script has its ranks wait for each other."""
        return max(group.timeout.total_seconds() for group, _members in self._groups)

    @property
    def world(self) -> SurvivingGroup:
        """The default process group."""
        return self._groups[0][0]

    def _create(self, options: Any, _backend_options: object) -> SurvivingGroup:
        """Creates the default group for torch. Torch asks the world group to create all others."""
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
        """Brings every group up in ``generation``, together with the other ranks. No operation may be in flight.

        Args:
            generation: the new generation.
            rank: this process's rank.
            replaced: ranks that are known to have another process than before: their groups cannot stay.

        Raises:
            RuntimeError: another rank did not connect, or `take_down` was called meanwhile.
            PeerLost: the store reports that the generation is over.
            RemoteProtocolError: another rank's claims cannot be decoded.
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
        """Returns the names of the groups that stay because all their members agree.

        Every rank publishes its claims, since it cannot know which ranks read them. It reads the claims of the members
        of those groups that can stay as far as it knows. After the loss of a rank the world group is not among them: it
        is rebuilt.
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
            InternalError: a collective did not end, though its connections are closed.
        """
        for group, _members in self._groups:
            if not group.drain(DRAIN_DEADLINE_S):
                raise InternalError(f"a collective of group {group.keepstep_name} did not end after it was broken")

    def look(self) -> None:
        """Finds operations that have ended, without waiting. The training thread calls it.

        Raises:
            RuntimeError: an operation has failed after the script had waited for it on a stream.
        """
        for group, _members in self._groups:
            group.look()

    def take_down(self) -> None:
        """Lets no operation begin any more, and aborts every communicator that has one in flight. From any thread."""
        self._generation = None
        for group, _members in list(self._groups):
            group.take_down()


def _key(group: str, device_type: str) -> str:
    """Key of a rank's claim on a group's connections for one type of device."""
    return group if device_type == CPU else f"{group}/{device_type}"


def _decoded(claims: bytes) -> dict[str, GroupClaim]:
    try:
        return _claims_of_a_rank.decode(claims)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a rank's claims for its groups cannot be read: {error}") from error


def _leave_out_of_compilation() -> None:
    """Excludes the code of groups from torch.compile: compiled code, such as DDP's forward, may call it."""
    from torch._dynamo import trace_rules  # takes a second, unless the spawner has imported it

    for name in UNTRACED:
        trace_rules.add(name)


def _leave_out_of_flight_recorder() -> None:
    """Excludes the groups from torch's flight recorder, which hooks groups that do not record themselves (torch 2.15).

    The hook looks for a backend in C++, which a group in Python does not have, and raises.
    """
    recording_themselves: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording_themselves.add(BACKEND)
