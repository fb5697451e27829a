"""Reports: from workers to their agent, and from agents to the controller. Their names are in the past tense."""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from keepstep.protocol.messages.base import (
    MAX_LISTED,
    AgreedValue,
    Cause,
    Devices,
    FirstPhases,
    Message,
    Name,
    Numbers,
    Seconds,
    Tag,
    Text,
    Traceback,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import Standing

# ---- worker -> agent -> controller: reports -----------------------------------------------------------------------


class WorkerJoined(Message, frozen=True):
    """The worker's script has called `keepstep.init()` and asks for its rank."""

    worker: int
    pid: int


class RankAwaited(Message, frozen=True):
    """A spare's script waits at a line that needs the rank."""

    worker: int


SnapshotsByRank: TypeAlias = Annotated[tuple[tuple[int, Numbers], ...], msgspec.Meta(max_length=MAX_LISTED)]
"""(rank, steps of its snapshots) pairs, both ascending."""


class WorkerReady(Message, frozen=True):
    """The worker waits at its first step, and its script has protected all state.

    ``reach`` is empty if the start-up ran on an echoing group; else it contains the script's first step. ``snapshots``
    are the steps of the checkpoints and snapshots that the worker can read. ``checkpointing``: keepstep writes
    checkpoints. ``resumes``: fresh ranks load the script's own newest checkpoint, or begin at the first step if there
    is none. ``timeout_s``: the longest timeout of its groups, for which the script has others wait for a busy rank.
    """

    worker: int
    generation: int
    reach: Numbers
    snapshots: Numbers
    checkpointing: bool
    resumes: bool
    shard: Name
    timeout_s: Seconds


class CheckpointWritten(Message, frozen=True):
    """The checkpoint of a step is complete: fresh processes can go on from there."""

    worker: int
    step: int


class CollectiveFailed(Message, frozen=True):
    """A collective failed on this worker. This is a hint that a peer is lost."""

    worker: int
    generation: int
    group: Text
    error: Text


class StateRefused(Message, frozen=True):
    """The worker has loaded the state, and what its objects then say of theirs is something else.

    ``is_apart``: it has loaded nothing, differs from its replicas for another reason, and goes on.
    """

    worker: int
    generation: int
    error: Text
    is_apart: bool


class SafePointReached(Message, frozen=True):
    """The workers have stopped at a safe point.

    ``generation`` is that of `Stop`. ``reach`` is the reach of their shards, and ``snapshots`` the steps that each can
    load. ``would_repeat``: they are synced, and would rather compute the step again than complete it.
    ``second_copies`` are the snapshots of other ranks that each of them keeps. ``doubt``: a digest of the shard if they
    have completed the step and nothing is wrong with it but that the script has decided something by a value that a
    failure has cut off; ``reach`` is empty then, until `DoubtLifted`. ``flaw``: why their copies do not count; None if
    they do, or if they have never had any state.
    """

    workers: Numbers
    generation: int
    step: int
    phase: Phase
    reach: Numbers
    current_step: int | None
    snapshots: Numbers
    would_repeat: bool
    second_copies: SnapshotsByRank
    doubt: Name | None
    flaw: Text | None


class GroupsReset(Message, frozen=True):
    """The process groups of the workers are connected in this generation."""

    workers: Numbers
    generation: int


class StateRecovered(Message, frozen=True):
    """The shards of the workers are at the resume step and verified; the workers wait for `Resume`.

    ``from_checkpoint``: the workers have loaded a checkpoint, and not a snapshot in memory.
    """

    workers: Numbers
    generation: int
    received_bytes: int
    from_checkpoint: bool


class StepsFinished(Message, frozen=True):
    """The workers have completed their last step. ``digest`` is a digest of all protected state, if requested."""

    workers: Numbers
    generation: int
    step: int
    digest: Text | None


class Holding(Message, frozen=True):
    """The answer to `Hold`: the workers wait before ``step`` until they know the step at which the job ends."""

    workers: Numbers
    generation: int
    step: int


class Drained(Message, frozen=True):
    """The workers have done their part of a `Drain`. ``is_saved``: one of them has written a checkpoint."""

    workers: Numbers
    generation: int
    is_saved: bool


class WorkerFailed(Message, frozen=True):
    """An uncaught exception of the script is about to end the worker.

    ``fatal``: a fresh process would end in the same way.
    """

    worker: int
    error: Text
    traceback: Traceback
    fatal: bool


class StateMoves(Message, frozen=True):
    """The worker saves, loads, sends or receives a state, and has moved bytes since its last report."""

    worker: int


class StateRescued(Message, frozen=True):
    """The answer to `Rescue`. ``path`` is the file of the saved shard, or ``error`` says why there is none."""

    worker: int
    path: Text | None
    error: Text | None


STORE_OPERATIONS_THAT_WAIT = frozenset({"job_get", "job_wait"})
"""Operations of the job's store that are answered only when their keys exist."""
AT_ONCE = b"at once"
"""The value of such an operation that must not wait: if a key is missing, the answer is an error."""
MAX_STORE_VALUE_BYTES = 8 << 20
"""Limit of one value in the job's store. A message has at most 16 MiB, and must hold the value."""


class StoreRequested(Message, frozen=True):
    """One request to the rendezvous store of a generation, the start-up record, or the store of the job."""

    worker: int
    generation: int
    request: int
    operation: str
    keys: tuple[str, ...]
    value: bytes


class OnceRequested(Message, frozen=True):
    """A request about what happens once in the job's life; see `keepstep.protocol.recovery.scripts.once`.

    ``operation`` is claim, hold, done, give_up or agree. A worker that got a hold ends it with done or give_up.
    ``value`` is what a worker proposes in agree; else it is empty.
    """

    worker: int
    request: int
    operation: Name
    name: Text
    value: AgreedValue


# ---- agent -> controller: reports ---------------------------------------------------------------------------------


class NodeJoined(Message, frozen=True):
    """A node joins, with room for ``slots`` workers at a time. Nodes of one ``domain`` may fail together.

    The controller orders nodes by ``position`` (torchrun's ``--node-rank``), then by the time at which they joined, and
    assigns ranks in this order. ``world_size`` is the node's setting, 0 if it is not set; the controller refuses a node
    with another world size than the job. ``closed`` are the devices, counted from 0, that the node has closed already:
    see `DevicesClosed`. ``num_devices``: the first so many slots are devices, such as GPUs; 0: the workers use none.
    """

    node: Name
    slots: int
    domain: Name
    position: int
    world_size: int
    closed: Devices
    num_devices: int


class WorkerStarted(Message, frozen=True):
    """The agent has started a worker's process."""

    worker: int
    pid: int


class WorkerSuspected(Message, frozen=True):
    """A worker has made no progress past its deadline, or its process is stopped. It may still go on.

    ``cause`` is `Cause.HANG` or `Cause.STOPPED`. ``since_s`` is the time of its last progress, on the controller's
    monotonic clock. ``snapshots`` are those in its memory, which its node would keep if the process were killed.
    """

    worker: int
    cause: Cause
    detail: Text
    tag: Tag | None
    since_s: Seconds
    snapshots: SnapshotsByRank


class SuspicionLifted(Message, frozen=True):
    """A suspected worker goes on, or waits for others."""

    worker: int


class WorkerLost(Message, frozen=True):
    """A worker's process is gone, or must not go on.

    ``gone`` is True if the process no longer exists; then it needs no fence. ``since_s`` is the estimated time of the
    failure itself, on the controller's monotonic clock. The recovery's report shows it.
    """

    worker: int
    cause: Cause
    detail: Text
    gone: bool
    tag: Tag | None
    since_s: Seconds


class SnapshotsLeft(Message, frozen=True):
    """A worker is gone, and its agent holds the memory with its snapshots: its own, and second copies of other ranks.

    The agent sends this before the report that the worker is gone.
    """

    worker: int
    snapshots: SnapshotsByRank


class WorkerEnded(Message, frozen=True):
    """The exit status of a process that the agent reported lost before it knew the status."""

    worker: int
    cause: Cause
    detail: Text


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
    """Every rank of the node waits in a collective past its deadline, so the agent cannot tell which one hangs."""

    node: Name
    generation: int
    detail: Text


class RanksStand(Message, frozen=True):
    """The ranks of the node that have made no progress for long, and where each waits. All others made progress."""

    node: Name
    generation: int
    standing: Annotated[tuple[Standing, ...], msgspec.Meta(max_length=MAX_LISTED)]


class StepObserved(Message, frozen=True):
    """All ranks of a node have completed their first step in a generation, as their tag pages show.

    ``at_s`` is the estimated time at which the last rank completed it, on the controller's monotonic clock. ``step_s``
    is the duration of the step on the slowest rank. ``first_phases`` are the longest that the node knows of.
    """

    node: Name
    generation: int
    step: int
    at_s: Seconds
    step_s: Seconds
    first_phases: FirstPhases


class NodeDraining(Message, frozen=True):
    """The node will leave soon. Its ranks continue until spares on other nodes take their place."""

    node: Name
    reason: Text


class DevicesClosed(Message, frozen=True):
    """The node closes these devices, counted from 0: the controller starts no process there any more.

    A rank there continues until a warm spare can take it. If it must stop at once, the agent sends `WorkerLost` first.
    """

    node: Name
    devices: Devices
    reason: Text


class PhasesObserved(Message, frozen=True):
    """Recent phases of a node's workers, for display only.

    No decision depends on them. The agent sends them outside of packets, and does not repeat a lost message. ``phases``
    are records in the layout of `keepstep.trace.record.phaselog`, with times on the controller's clock. The node knows
    that clock to within ``error_ns`` either way.
    """

    node: Name
    error_ns: int
    phases: bytes


class PublicationStage(enum.StrEnum):
    """Kinds of reports on published weights."""

    ATTACHED = "attached"
    """Consumers have attached, have left, or have switched to another version."""
    UNDER_WAY = "under way"
    COMMITTED = "committed"
    BROKEN_OFF = "broken off"


class StageSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The time that one pipeline stage worked on one bucket, in seconds since the update began on its device."""

    stage: Name
    bucket: int
    begin_s: Seconds
    end_s: Seconds


class WeightsObserved(Message, frozen=True):
    """The state of a rank that publishes weights. For display only, like `PhasesObserved`.

    ``at_s`` is the time of the report, and ``begun_s`` the time at which the update began. The worker sends both on its
    own clock, and the agent converts them to the controller's. ``version`` is the version under way or just ended, or
    None if the report is only about consumers. The byte counts cover the data of which this rank is the source.
    ``consumers`` are (consumer of this rank, its version); ``failures`` name the processes at fault; ``spans`` are the
    first spans of an update that has ended.
    """

    worker: int
    rank: int
    generation: int
    folder: Text
    stage: PublicationStage
    version: int | None
    begun_s: Seconds
    at_s: Seconds
    sent_bytes: int
    unchanged_bytes: int
    consumers: Annotated[tuple[tuple[Text, int | None], ...], msgspec.Meta(max_length=MAX_LISTED)]
    failures: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_LISTED)]
    spans: Annotated[tuple[StageSpan, ...], msgspec.Meta(max_length=MAX_LISTED)]


class ClockAsked(Message, frozen=True):
    """The node asks for the controller's time. ``asked_ns`` is the node's own time."""

    node: Name
    asked_ns: int
