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
    """A spare's script has come to a line that needs its rank: it can go no further, and can be given one."""

    worker: int


SnapshotsByRank: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Ranks, and the steps of the snapshots of each, ascending."""


class WorkerReady(Message, frozen=True):
    """The worker stands at its first step with everything protected, and waits.

    ``reach`` holds step 0, or nothing where the start-up ran on an echoing group; ``snapshots`` are the steps of
    the checkpoints and snapshots it can read, ``checkpointing`` says whether it writes any.
    """

    worker: int
    generation: int
    reach: tuple[int, ...]
    snapshots: tuple[int, ...]
    checkpointing: bool
    shard: str


class CollectiveFailed(Message, frozen=True):
    """A collective ended in an error on this worker: a hint that a peer is gone."""

    worker: int
    generation: int
    group: str
    error: str


class SafePointReached(Message, frozen=True):
    """The workers stand still and can say what their shards can be at. ``generation`` is the one named by `Stop`.
    ``would_communicate``: the update that they were synced for holds a collective, which would be cut off.
    ``second_copies``: what each of them keeps of other ranks' snapshots."""

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
    """The shards of the workers are at the resume step, checked; they wait for `Resume`.

    ``from_checkpoint``: a worker that rewound has loaded a checkpoint, and not its snapshot in memory.
    """

    workers: tuple[int, ...]
    generation: int
    received_bytes: int
    from_checkpoint: bool


class StepsFinished(Message, frozen=True):
    """The workers have completed their last step. ``digest`` is of all protected state, where it was asked for."""

    workers: tuple[int, ...]
    generation: int
    step: int
    digest: str | None


class Holding(Message, frozen=True):
    """The workers begin no step from ``step`` on before they are told where the job ends."""

    workers: tuple[int, ...]
    generation: int
    step: int


class Drained(Message, frozen=True):
    """The workers stand at the job's last step; ``is_saved``: one of them has written a checkpoint of it."""

    workers: tuple[int, ...]
    generation: int
    is_saved: bool


class WorkerFailed(Message, frozen=True):
    """An exception that the script has not caught is about to end the worker.

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
"""Those of the job's store that are answered only when their keys are there."""
MAX_STORE_VALUE_BYTES = 8 << 20
"""Of one value in the job's store: a message of at most 16 MiB carries it."""


class StoreRequested(Message, frozen=True):
    """One call on the rendezvous of a generation, the record of the start-up, or the store of the job."""

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
    """A node offers itself: room for ``slots`` workers at a time. Nodes of one ``domain`` may fail together.

    Ranks are given out by ``position`` (torchrun's ``--node-rank``), then in the order in which nodes have joined.
    ``world_size`` is what the node was told; a node of a job of another size was started by mistake. 0: it was told
    nothing. ``closed`` are devices, counted from 0, that the node has closed already: see `DevicesClosed`.
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
    """A worker's process is gone, or must be taken for gone.

    ``gone`` is True where the process no longer exists (it then needs no fence). ``since_s`` is the time of the failure
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
    ranks'. Comes before what tells that it is gone."""

    worker: int
    snapshots: SnapshotsByRank


class WorkerEnded(Message, frozen=True):
    """How the process of a worker ended that has been reported lost before that was known."""

    worker: int
    cause: Cause
    detail: str


class WorkerDone(Message, frozen=True):
    """A worker ended with exit code 0 outside of any step: its script is through.

    ``steps`` is how many its tag page shows as completed, None where it never came to its first.
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
    """All ranks of the node that have stood still for long, and where. The others have moved lately."""

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
    """The node is to leave soon. Its ranks train on until spares of other nodes take them."""

    node: str
    reason: str


class DevicesClosed(Message, frozen=True):
    """Nothing more is to run on these devices of the node, counted from 0. A rank there trains on until a warm spare
    can take it. Where it must not even do that, `WorkerLost` tells so, in front of this report."""

    node: str
    devices: tuple[int, ...]
    reason: str


class PhasesObserved(Message, frozen=True):
    """What the workers of a node went through of late. It is for the eye only: nothing is decided by it, it goes by the
    packets, and what is lost is not repeated.

    ``phases`` are records as `keepstep.trace.record.phaselog` lays them out, on the controller's clock; that is known
    to ``error_ns`` either way.
    """

    node: str
    error_ns: int
    phases: bytes


class PublicationStage(enum.StrEnum):
    """What a rank tells of the weights that it publishes."""

    ATTACHED = "attached"
    """Consumers have come or gone, or have taken another version."""
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
    """How a rank fares that publishes weights. For the eye only, as `PhasesObserved`.

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
    """What time is it where the controller is? ``asked_ns`` is the node's own."""

    node: str
    asked_ns: int
