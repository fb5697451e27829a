"""Reports, upwards: from workers to their agent, and from agents to the controller. Named in the past tense."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from keepstep.protocol.messages.base import Cause, Message, Seconds, Tag
from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import Standing

# ---- worker -> agent -> controller: reports -----------------------------------------------------------------------


class WorkerJoined(Message, frozen=True):
    """The worker's script has called `keepstep.init()` and asks for its rank."""

    worker: int
    pid: int


class RankAwaited(Message, frozen=True):
    """A spare's script waits at a line that needs its rank."""

    worker: int


SnapshotsByRank: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Ranks, and the steps of the snapshots of each, ascending."""


class WorkerReady(Message, frozen=True):
    """The worker waits at its first step with everything protected.

    ``reach`` contains step 0, or nothing if the start-up ran on an echoing group; ``snapshots`` are the steps of
    the checkpoints and snapshots it can read, ``checkpointing`` says whether it writes any.
    """

    worker: int
    generation: int
    reach: tuple[int, ...]
    snapshots: tuple[int, ...]
    checkpointing: bool
    shard: str


class CollectiveFailed(Message, frozen=True):
    """A collective failed on this worker: a hint that a peer is lost."""

    worker: int
    generation: int
    group: str
    error: str


class SafePointReached(Message, frozen=True):
    """The workers have stopped; the reach of their shards. ``generation`` is that of `Stop`.
    ``would_communicate``: the update for which they are synced calls a collective, which would be interrupted.
    ``second_copies``: the snapshots of other ranks that each of them keeps."""

    workers: tuple[int, ...]
    generation: int
    step: int
    phase: Phase
    reach: tuple[int, ...]
    current_step: int | None
    snapshots: tuple[int, ...]
    would_communicate: bool
    second_copies: SnapshotsByRank


class GroupsReset(Message, frozen=True):
    """The process groups of the workers are connected in this generation."""

    workers: tuple[int, ...]
    generation: int


class StateRecovered(Message, frozen=True):
    """The shards of the workers are at the resume step and verified; the workers wait for `Resume`.

    ``from_checkpoint``: a worker that rewound has loaded a checkpoint, and not its snapshot in memory.
    """

    workers: tuple[int, ...]
    generation: int
    received_bytes: int
    from_checkpoint: bool


class StepsFinished(Message, frozen=True):
    """The workers have completed their last step. ``digest`` is of all protected state, if requested."""

    workers: tuple[int, ...]
    generation: int
    step: int
    digest: str | None


class Holding(Message, frozen=True):
    """The workers wait before ``step`` until they know the step at which the job ends."""

    workers: tuple[int, ...]
    generation: int
    step: int


class Drained(Message, frozen=True):
    """The workers are at the job's last step; ``is_saved``: one of them has written a checkpoint of it."""

    workers: tuple[int, ...]
    generation: int
    is_saved: bool


class WorkerFailed(Message, frozen=True):
    """An uncaught exception of the script is about to end the worker.

    ``fatal``: a fresh process would end in the same way.
    """

    worker: int
    error: str
    traceback: str
    fatal: bool


class StateRescued(Message, frozen=True):
    """The worker has saved its shard on `Rescue`. ``path`` names the file, or ``error`` says why there is none."""

    worker: int
    path: str | None
    error: str | None


STORE_OPERATIONS_THAT_WAIT = frozenset({"job_get", "job_wait"})
"""Operations of the job's store that are answered only when their keys exist."""
MAX_STORE_VALUE_BYTES = 8 << 20
"""Limit of one value in the job's store: a message of at most 16 MiB carries it."""


class StoreRequested(Message, frozen=True):
    """One request to the rendezvous store of a generation, the start-up record, or the store of the job."""

    worker: int
    generation: int
    request: int
    operation: str
    keys: tuple[str, ...]
    value: bytes


class OnceRequested(Message, frozen=True):
    """What is to happen once in the job's life. ``operation``: claim; hold, and then done or give_up."""

    worker: int
    request: int
    operation: str
    name: str


# ---- agent -> controller: reports ---------------------------------------------------------------------------------


class NodeJoined(Message, frozen=True):
    """A node joins, with room for ``slots`` workers at a time. Nodes of one ``domain`` may fail together.

    Ranks are given out by ``position`` (torchrun's ``--node-rank``), then in the order in which nodes have joined.
    ``world_size`` is the node's setting; a node with another world size was started by mistake. 0: not set. ``closed``
    are devices, counted from 0, that the node has closed already: see `DevicesClosed`.
    """

    node: str
    slots: int
    domain: str
    position: int
    world_size: int
    closed: tuple[int, ...]


class WorkerStarted(Message, frozen=True):
    """The agent has started a worker's process."""

    worker: int
    pid: int


class WorkerLost(Message, frozen=True):
    """A worker's process is gone or unresponsive.

    ``gone`` is True if the process no longer exists (it then needs no fence). ``since_s`` is the time of the failure
    itself on the controller's monotonic clock, as well as either is known, for the report.
    """

    worker: int
    cause: Cause
    detail: str
    gone: bool
    tag: Tag | None
    since_s: Seconds


class SnapshotsLeft(Message, frozen=True):
    """A worker is gone and has left snapshots in memory that its agent holds: its own, and second copies of other
    ranks'. Sent before the report that it is gone."""

    worker: int
    snapshots: SnapshotsByRank


class WorkerEnded(Message, frozen=True):
    """The exit status of a process that was reported lost before it was known."""

    worker: int
    cause: Cause
    detail: str


class WorkerDone(Message, frozen=True):
    """A worker ended with exit code 0 outside of any step: its script has finished.

    ``steps`` is the number of completed steps on its tag page, None if it never reached its first.
    """

    worker: int
    steps: int | None


class WorkerFenced(Message, frozen=True):
    """The agent confirms that a worker's process no longer exists."""

    worker: int


class JobStalled(Message, frozen=True):
    """Every rank of the node waits in a collective past its deadline: the agent cannot tell which one is to blame."""

    node: str
    generation: int
    detail: str


class RanksStand(Message, frozen=True):
    """All ranks of the node that have made no progress for long, and their positions. The others have progressed
    recently."""

    node: str
    generation: int
    standing: tuple[Standing, ...]


class StepObserved(Message, frozen=True):
    """A node's ranks have completed their first step in a generation, as their tag pages show.

    ``at_s`` is the time at which the last of them did, on the controller's monotonic clock as well as it is known,
    ``step_s`` what the slowest took.
    """

    node: str
    generation: int
    step: int
    at_s: Seconds
    step_s: Seconds


class NodeDraining(Message, frozen=True):
    """The node will leave soon. Its ranks continue until spares on other nodes take them."""

    node: str
    reason: str


class DevicesClosed(Message, frozen=True):
    """No process may run on these devices of the node any more, counted from 0. A rank there continues until a warm
    spare can take it. If it must stop at once, `WorkerLost` is sent before this report."""

    node: str
    devices: tuple[int, ...]
    reason: str


class PhasesObserved(Message, frozen=True):
    """Recent phases of a node's workers, for display only: no decision depends on it, it travels outside of packets,
    and lost ones are not repeated.

    ``phases`` are records as `keepstep.trace.record.phaselog` lays them out, on the controller's clock; that is known
    to ``error_ns`` either way.
    """

    node: str
    error_ns: int
    phases: bytes


class PublicationStage(enum.StrEnum):
    """Kinds of reports on published weights."""

    ATTACHED = "attached"
    """Consumers have attached or left, or have switched to another version."""
    UNDER_WAY = "under way"
    COMMITTED = "committed"
    BROKEN_OFF = "broken off"


class StageSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stage of the pipeline at work on one bucket, in seconds since the update began on its device."""

    stage: str
    bucket: int
    begin_s: Seconds
    end_s: Seconds


class WeightsObserved(Message, frozen=True):
    """The state of a rank that publishes weights. For display only, like `PhasesObserved`.

    ``at_s`` is the time of it and ``begun_s`` that at which the update began: on the worker's clock, which the agent
    puts on the controller's. ``version`` is the one under way or just ended; None for consumers alone. The bytes are
    those of which this rank is the source. ``consumers`` are those of this rank with the version that each has;
    ``failures`` name culprits; ``spans`` are the first of an update that has ended.
    """

    worker: int
    rank: int
    generation: int
    folder: str
    stage: PublicationStage
    version: int | None
    begun_s: Seconds
    at_s: Seconds
    sent_bytes: int
    unchanged_bytes: int
    consumers: tuple[tuple[str, int | None], ...]
    failures: tuple[str, ...]
    spans: tuple[StageSpan, ...]


class ClockAsked(Message, frozen=True):
    """Asks for the controller's time. ``asked_ns`` is the node's own."""

    node: str
    asked_ns: int
