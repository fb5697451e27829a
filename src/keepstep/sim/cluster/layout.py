"""The job that a seed defines: nodes and their devices, ranks and shards, durations, a network, and deadlines."""

from __future__ import annotations

import dataclasses
import random

from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.recovery import RecoverySettings


@dataclasses.dataclass(frozen=True, slots=True)
class NodeLayout:
    """One machine. Its clock shows ``clock_offset_s + clock_rate * t`` at the true time t."""

    name: str
    slots: int
    domain: str
    clock_offset_s: float = 0.0
    clock_rate: float = 1.0
    num_devices: int = 0
    """Number of devices for ranks, if spares are parked in host memory without a device; 0: each slot is a device."""


@dataclasses.dataclass(frozen=True, slots=True)
class NetworkLayout:
    """The delays, losses and duplicates of the control network between the controller and the nodes."""

    min_delay_s: float = 0.0002
    max_delay_s: float = 0.001
    loss: float = 0.0
    duplication: float = 0.0
    straggling: float = 0.0
    """Share of the packets that are delayed by up to ``straggling_s`` more, so that others overtake them."""
    straggling_s: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedDurations:
    """Durations in seconds. Most are multiplied by a random factor between 0.7 and 1.3 each time."""

    forward_s: float = 0.1
    backward_s: float = 0.2
    collective_s: float = 0.002
    optimizer_s: float = 0.05
    spawn_s: float = 0.02
    build_s: float = 0.5
    connect_s: float = 0.02
    restore_s: float = 0.05
    snapshot_s: float = 0.15
    """Time to copy a rank's state into memory, during forward and backward."""
    second_copy_s: float = 0.15
    """Time to send a snapshot from a rank to its buddy on another node."""
    stop_s: float = 0.005
    """Time from the flag to the next stop point in forward or backward."""
    local_s: float = 0.0001
    """Time of a message between a worker and its agent."""
    exit_s: float = 0.01
    """Time from SIGKILL until the kernel has told the agent."""
    tick_s: float = 0.4
    """Time between two polls of an agent's workers. A real agent polls twenty times as often, and phases are as much
    shorter."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterLayout:
    """One cluster and one job on it."""

    nodes: tuple[NodeLayout, ...]
    shards: tuple[str, ...]
    """The shard of each rank."""
    settings: RecoverySettings
    network: NetworkLayout = NetworkLayout()
    durations: SimulatedDurations = SimulatedDurations()
    num_steps: int = 12
    first_batch_s: float = 0.0
    """By how much the first forward of each process is longer: it opens its data, imports and compiles."""
    checkpoint_every: int | None = None
    snapshot_every: int = 0
    """Steps from one snapshot of each rank's state to the next; 0: there are none."""
    needs_rank: bool = False
    """Whether a spare's script waits for a rank before its first step."""
    reduces_after_update: bool = False
    """Whether the script runs a collective after each update. If it is interrupted, the copy may be partially
    updated."""

    parks_spares: bool = False
    """Whether a spare's script waits for a rank in its first line, so that it builds its model while the job waits."""
    ends_early: int | None = None
    """The rank whose script leaves its loop one step before the others, because of a bug in the script."""
    asks_once: bool = False
    """Whether scripts have once-per-job actions."""
    compares: bool = False
    """Whether ranks compare what they hold after each recovery, if there are replicas."""
    num_relays: int = 0
    """Number of relays that hold the controller's connections; 0: it holds them itself."""
    exchanges: bool = False
    """Whether ranks exchange values in their start-up, which a replacement must get."""
    has_mesh: bool = False
    """Whether ranks have more groups than the world: as in HSDP, one per copy of the model and one per shard."""
    sends_in_mesh: bool = False
    """Whether the ranks that hold one copy of the model send messages to each other, as in a pipeline."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.settings.world_size

    def num_steps_of(self, rank: int | None) -> int:
        """Returns the number of steps in the loop of a rank."""
        return self.num_steps - (rank is not None and rank == self.ends_early)

    def __str__(self) -> str:
        kinds = {1: "DDP", self.world_size: "FSDP"}
        num_shards = len(set(self.shards))
        kind = kinds.get(num_shards, f"HSDP with {num_shards} shards")
        snapshots = f", a snapshot every {self.snapshot_every} steps" if self.snapshot_every else ""
        checkpoints = f"a checkpoint every {self.checkpoint_every} steps" if self.checkpoint_every else "no checkpoints"
        return (
            f"{self.world_size} ranks ({kind}), {self.settings.num_spares} spares, {len(self.nodes)} nodes, "
            f"{self.num_steps} steps, {checkpoints}{snapshots}"
        )


DEADLINES = Deadlines(
    hang_after_s=7.5,
    hang_factor=4.0,
    recovery_s=10.0,
    isolated_s=15.0,
    end_s=20.0,
    recover_s=25.0,
    long_s=30.0,
    start_s=60.0,
    stop_s=80.0,
    explain_s=2.0,
)
"""Shorter than the defaults, in the same order, so that a run that waits for one ends sooner."""
SETTINGS = RecoverySettings(1, 0, deadlines=DEADLINES, grace_s=12.0)

FEW_NODES = 8


def draw_layout(rng: random.Random) -> ClusterLayout:
    """Returns a random layout: mostly small, so that faults are likely to interact; now and then large."""
    ranks_per_node = rng.choice((1, 1, 2, 2, 3, 4, 8))
    num_rank_nodes = rng.choice((1, 1, 2, 2, 2, 3, 4)) if rng.random() < 0.97 else rng.randint(5, 64)
    world_size = ranks_per_node * num_rank_nodes
    num_spares = rng.choice((0, 1, 1, 2, 3))
    nodes = _draw_nodes(rng, num_rank_nodes, ranks_per_node, num_spares)
    settings = dataclasses.replace(
        SETTINGS,
        world_size=world_size,
        num_spares=num_spares,
        ranks_per_node=ranks_per_node,
        max_restarts=rng.choice((None, None, None, 6)),
    )
    num_shards = rng.choice([count for count in (1, 1, 1, 2, 4, world_size) if world_size % count == 0])
    shards = tuple(str(rank % num_shards) for rank in range(world_size))
    checkpoint_every = rng.choice((None, 3, 5)) if num_shards < world_size else rng.choice((3, 5))
    return ClusterLayout(
        nodes,
        shards,
        settings,
        _draw_network(rng, len(nodes)),
        _draw_durations(rng),
        num_steps=rng.choice((4, 8, 8, 12, 20)),
        checkpoint_every=checkpoint_every,
        needs_rank=rng.random() < 0.2,
        reduces_after_update=rng.random() < 0.2,
        parks_spares=num_spares == 1,
        asks_once=True,
        exchanges=True,
    )


def draw_snapshots(rng: random.Random, layout: ClusterLayout) -> ClusterLayout:
    """Adds snapshots to most of the sharded jobs without replicas, and to some of those with replicas."""
    num_shards = len(set(layout.shards))
    if num_shards == 1 or rng.random() < (0.3 if num_shards == layout.world_size else 0.6):
        return layout
    snapshot_s, second_copy_s = rng.choice((0.01, 0.15, 0.15, 0.6)), rng.choice((0.02, 0.15, 1.0))
    durations = dataclasses.replace(layout.durations, snapshot_s=snapshot_s, second_copy_s=second_copy_s)
    checkpoint_every = layout.checkpoint_every if rng.random() < 0.3 else None
    every = rng.choice((1, 1, 2, 3))
    return dataclasses.replace(layout, snapshot_every=every, durations=durations, checkpoint_every=checkpoint_every)


def draw_devices(rng: random.Random, layout: ClusterLayout) -> ClusterLayout:
    """Lets parked spares be without a device, in half of the jobs that have them: they take one with their rank."""
    if not (layout.parks_spares and layout.needs_rank) or rng.random() < 0.5:
        return layout
    most = layout.settings.ranks_per_node or layout.world_size
    nodes = (dataclasses.replace(node, num_devices=min(node.slots, most)) for node in layout.nodes)
    return dataclasses.replace(layout, nodes=tuple(nodes))


def draw_mesh(rng: random.Random, layout: ClusterLayout) -> ClusterLayout:
    """Adds the groups of HSDP to a job with several shards and several replicas of each."""
    if len(set(layout.shards)) in (1, layout.world_size):
        return layout
    return dataclasses.replace(layout, has_mesh=True, sends_in_mesh=rng.random() < 0.5)


def _draw_nodes(
    rng: random.Random, num_rank_nodes: int, ranks_per_node: int, num_spares: int
) -> tuple[NodeLayout, ...]:
    """Returns random nodes. The spares' slots are on nodes of their own, or on those of the ranks."""
    apart = rng.random() < 0.6
    per_spare_node = max(1, min(num_spares, ranks_per_node))
    num_spare_nodes = -(-num_spares // per_spare_node) if apart else rng.choice((0, 0, 1))
    extra = 0 if apart else -(-num_spares // num_rank_nodes)
    domains = rng.choice((1, 2, 3, 64))
    nodes = []
    for number in range(num_rank_nodes + num_spare_nodes):
        slots = ranks_per_node + extra if number < num_rank_nodes else per_spare_node
        skew_s, rate = rng.uniform(-5.0, 5.0), rng.uniform(0.999, 1.001)
        nodes.append(NodeLayout(f"node-{number}", slots, f"rack-{number % domains}", skew_s, rate))
    return tuple(nodes)


def _draw_durations(rng: random.Random) -> SimulatedDurations:
    """Returns random durations. In half of the jobs some part of a step takes unusually long, so that faults hit it."""
    if rng.random() < 0.5:
        return SimulatedDurations()
    return SimulatedDurations(
        forward_s=rng.choice((0.01, 0.1, 0.5)),
        backward_s=rng.choice((0.02, 0.2, 0.5)),
        collective_s=rng.choice((0.002, 0.05, 0.2)),
        optimizer_s=rng.choice((0.001, 0.05, 0.3)),
        connect_s=rng.choice((0.02, 0.3)),
        restore_s=rng.choice((0.05, 0.5)),
        stop_s=rng.choice((0.005, 0.1)),
        local_s=rng.choice((0.0001, 0.005)),
        exit_s=rng.choice((0.01, 0.2)),
    )


def _draw_network(rng: random.Random, num_nodes: int) -> NetworkLayout:
    """Returns a random network.

    Only in small jobs a tenth of the packets may be lost. The controller evicts a node whose heartbeats are all lost
    for the length of a lease, and with sixty nodes that would happen every quarter of a minute.
    """
    if rng.random() < 0.5:
        return NetworkLayout()
    return NetworkLayout(
        min_delay_s=rng.choice((0.0002, 0.005)),
        max_delay_s=rng.choice((0.001, 0.02, 0.1)) + 0.005,
        loss=rng.choice((0.0, 0.02, 0.1 if num_nodes <= FEW_NODES else 0.02)),
        duplication=rng.choice((0.0, 0.05)),
        straggling=rng.choice((0.0, 0.05)),
    )
