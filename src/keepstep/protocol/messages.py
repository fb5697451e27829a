"""Every message between processes.

Three kinds of program talk: worker, agent, controller. Reports travel up and are named in the past tense; orders
travel down and are named in the imperative. Each carries the generation it belongs to; one of another generation
is dropped at a single entrance (`RecoveryMachine.receive`, and `WorkerMachine.receive` on the worker's side).

An order that concerns every rank names no worker: it is the same for all nodes, and each agent hands it to those of
its workers that hold a rank. What all ranks answer alike names the workers it speaks for, so an agent sends one answer
for its node. The wire form is in `keepstep.transports.codec`.
"""

from __future__ import annotations

import enum
import sys
from typing import Annotated, TypeAlias

import msgspec

from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import Standing

Seconds = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A time or a duration. Finite: the journal is JSON, which has no other numbers, so one that is not would be written
and never be read again."""


class Cause(enum.StrEnum):
    """Why a recovery was begun."""

    EXIT = "exit"
    SIGNAL = "signal"
    EXCEPTION = "exception"
    HANG = "hang"
    STOPPED = "stopped process"
    COLLECTIVE = "collective failed"
    STUCK = "stuck collective"
    NODE = "node lost"
    CONTROLLER = "controller restarted"
    MOVED = "rank moved"
    DRAIN = "drain"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """The root of all messages."""


class Tag(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """(generation, step, phase) of one rank, as its tag page shows it."""

    generation: int
    step: int
    phase: Phase


# ---- worker -> agent -> controller: reports -----------------------------------------------------------------------


class WorkerJoined(Message, frozen=True):
    """The worker's script has called `keepstep.init()` and asks for its rank."""

    worker: int
    pid: int


class RankAwaited(Message, frozen=True):
    """A spare's script has come to a line that needs its rank: it can go no further, and can be given one."""

    worker: int


class WorkerReady(Message, frozen=True):
    """The worker stands at its first step with everything protected, and waits.

    ``reach`` holds step 0, or nothing where the start-up ran on an echoing group; ``snapshots`` are the steps of
    the checkpoints it can read, ``checkpointing`` says whether it writes any.
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
    ``would_communicate``: the update that they were synced for holds a collective, which would be cut off."""

    workers: tuple[int, ...]
    generation: int
    step: int
    phase: Phase
    reach: tuple[int, ...]
    current_step: int | None
    snapshots: tuple[int, ...]
    would_communicate: bool


class GroupsReset(Message, frozen=True):
    """The process groups of the workers are connected in this generation."""

    workers: tuple[int, ...]
    generation: int


class StateRecovered(Message, frozen=True):
    """The shards of the workers are at the resume step, checked; they wait for `Resume`."""

    workers: tuple[int, ...]
    generation: int
    received_bytes: int


class StepsFinished(Message, frozen=True):
    """The workers have completed their last step. ``digest`` is of all protected state, where it was asked for."""

    workers: tuple[int, ...]
    generation: int
    step: int
    digest: str | None


class Drained(Message, frozen=True):
    """The workers stand at the job's last step; ``is_saved``: one of them has written a checkpoint of it."""

    workers: tuple[int, ...]
    generation: int
    is_saved: bool


class WorkerFailed(Message, frozen=True):
    """An exception that nobody caught is about to end the worker. ``fatal``: a fresh process would end the same."""

    worker: int
    error: str
    traceback: str
    fatal: bool


class StateRescued(Message, frozen=True):
    """The worker has saved its shard on `Rescue`. ``path`` names the file, or ``error`` says why there is none."""

    worker: int
    path: str | None
    error: str | None


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
    nothing.
    """

    node: str
    slots: int
    domain: str
    position: int
    world_size: int


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
    """Every rank of the node waits in a collective past its deadline, and nobody can be told apart."""

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


class PhasesObserved(Message, frozen=True):
    """What the workers of a node went through of late. It is for the eye only: nothing is decided by it, it goes by the
    packets, and what is lost is not repeated.

    ``phases`` are records as `keepstep.trace.record.phaselog` lays them out, on the controller's clock; that is known
    to ``error_ns`` either way.
    """

    node: str
    error_ns: int
    phases: bytes


class ClockAsked(Message, frozen=True):
    """What time is it where the controller is? ``asked_ns`` is the node's own."""

    node: str
    asked_ns: int


# ---- controller -> agent -> worker: orders ------------------------------------------------------------------------


class StartWorker(Message, frozen=True):
    """Start a process on one of the node's devices, counted from 0; ``rank`` and ``local_rank`` are None for a spare.

    ``local_rank`` and ``local_world_size`` are torchrun's ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
    """

    worker: int
    rank: int | None
    device: int
    local_rank: int | None
    local_world_size: int
    reason: str


class FenceWorker(Message, frozen=True):
    """Kill the worker's process and confirm with `WorkerFenced` that it is gone."""

    worker: int
    reason: str


class Assign(Message, frozen=True):
    """This worker holds ``rank`` in this generation, and ``local_rank`` among the ranks of its node."""

    worker: int
    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class Stop(Message, frozen=True):
    """Every generation before ``generation`` is over: break the communicators, drain to a safe point, report it.

    ``synced_step`` is the step whose gradients a lost rank had complete. A rank that is in the backward of that step
    has all it needs in its own sockets, and ends the backward before it breaks anything.
    """

    generation: int
    reason: str
    synced_step: int | None


class Transfer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State that moves within one replica group: ranks that hold it at the resume step, and ranks that need it."""

    sources: tuple[int, ...]
    receivers: tuple[int, ...]


class Recover(Message, frozen=True):
    """Get to the resume step in this generation.

    A rank that is among the receivers of a transfer restores. Every other one knows from what it reported, by
    `keepstep.protocol.resume.action`, whether it stays, advances or rewinds.
    """

    generation: int
    resume_step: int
    transfers: tuple[Transfer, ...]


class Resume(Message, frozen=True):
    """Every rank stands at the resume step: training goes on."""

    generation: int


class Complete(Message, frozen=True):
    """Every rank has completed the last step: the script's code after the loop may run."""

    generation: int


class Abandon(Message, frozen=True):
    """A peer was lost after the last step: break the communicators, let the errors reach the script."""

    reason: str


class Rescue(Message, frozen=True):
    """The job cannot go on: save the shard, report it with `StateRescued`, and end."""

    reason: str


class Drain(Message, frozen=True):
    """All ranks stand at ``step``, where the job ends: rank 0 writes a checkpoint, if the job has them."""

    generation: int
    step: int


class Terminate(Message, frozen=True):
    """The agent sends SIGTERM to every worker. A script that handles it may then leave its loop and save."""

    reason: str


class StoreAnswered(Message, frozen=True):
    """The answer to a `StoreRequested`: no ``values`` where its generation is over; ``error``: why it is refused."""

    worker: int
    request: int
    values: tuple[bytes, ...] | None
    error: str = ""


class OnceAnswered(Message, frozen=True):
    """The answer to a claim or a hold: whether it is this worker that does it."""

    worker: int
    request: int
    is_mine: bool


class ClockTold(Message, frozen=True):
    """The answer to `ClockAsked`: the controller's monotonic time, ``told_ns``.

    ``gather_s`` is how often it wants to hear of phases from each node: the more nodes, the less often.
    """

    asked_ns: int
    told_ns: int
    gather_s: Seconds


class EndJob(Message, frozen=True):
    """End every process of the job and leave with ``exit_code``."""

    exit_code: int
    reason: str


GroupAnswer: TypeAlias = SafePointReached | GroupsReset | StateRecovered | StepsFinished | Drained
"""What every rank answers to the same order; see `AgentMachine`."""
Question: TypeAlias = StoreRequested | OnceRequested
"""What a worker asks and waits for."""
WorkerReport: TypeAlias = (
    GroupAnswer | Question | WorkerJoined | RankAwaited | WorkerReady | CollectiveFailed | WorkerFailed | StateRescued
)
NodeReport: TypeAlias = NodeJoined | NodeDraining | JobStalled | RanksStand | StepObserved
AgentReport: TypeAlias = NodeReport | WorkerStarted | WorkerLost | WorkerEnded | WorkerDone | WorkerFenced
HolderOrder: TypeAlias = Stop | Recover | Resume | Complete | Abandon | Rescue | Drain | Terminate
"""For every worker that holds a rank."""
WorkerOrder: TypeAlias = HolderOrder | Assign | StoreAnswered | OnceAnswered
AgentOrder: TypeAlias = StartWorker | FenceWorker | EndJob | WorkerOrder

Report: TypeAlias = WorkerReport | AgentReport


class Packet(Message, frozen=True):
    """What one end of a `keepstep.protocol.conversation.Conversation` transmits.

    ``life`` tells one life of a node's agent from the next: a new agent, or one whose node was given up, begins anew.
    ``first`` is the number of ``messages[0]``; ``received`` is how many of the other end's have arrived without a gap.
    ``misses``: something has arrived beyond a gap. Without that a small ``received`` says nothing: it may have met
    the messages on the way.
    """

    node: str
    life: int
    first: int
    received: int
    messages: tuple[Report | AgentOrder, ...]
    misses: bool


class NodeEvicted(Message, frozen=True):
    """The node was given up in this life: its ranks belong to others. End its workers and offer it anew.

    ``is_final``: do not offer it again, and end.
    """

    node: str
    life: int
    reason: str
    is_final: bool


class NodeLeft(Message, frozen=True):
    """The node takes its leave in this life, with everything on it. The answer is a `NodeEvicted` that is final."""

    node: str
    life: int
    reason: str


Aside: TypeAlias = PhasesObserved | ClockAsked | ClockTold
"""What agent and controller say outside of any packet, and nothing is decided by."""

AnyMessage: TypeAlias = Report | AgentOrder | Packet | NodeEvicted | NodeLeft | Aside


def text(value: object, limit: int = 4000) -> str:
    """What ``str`` makes of a value, cut to ``limit`` characters and free of what UTF-8 cannot carry."""
    return str(value)[:limit].encode("utf-8", "backslashreplace").decode()
