"""Every message between processes.

Three kinds of program talk: worker, agent, controller. Reports travel up and are named in the past tense; orders
travel down and are named in the imperative. Each carries its generation; `RecoveryMachine.receive`, and
`WorkerMachine.receive` on the worker's side, drop one of another generation.

An order for every rank names no worker: it is the same for all nodes, and each agent passes it to its workers that hold
a rank. An answer that is equal on several ranks lists their workers, so an agent sends one answer for its node. The
wire form is in `keepstep.transports.codec`.
"""

from __future__ import annotations

from typing import TypeAlias

from keepstep.protocol.messages.base import (
    MAX_AGREED_BYTES,
    MAX_LISTED,
    MAX_NAME,
    Cause,
    FirstPhases,
    Message,
    Name,
    Seconds,
    Tag,
    Text,
)
from keepstep.protocol.messages.membership import Member, Membership, MembershipChange
from keepstep.protocol.messages.orders import (
    Abandon,
    Assign,
    ClockTold,
    Complete,
    DoubtLifted,
    Drain,
    DumpTraceback,
    EndJob,
    FenceWorker,
    Hold,
    InheritSnapshots,
    MembershipTold,
    OnceAnswered,
    PassSnapshots,
    Recover,
    ReleaseSnapshots,
    Rescue,
    Resume,
    StartWorker,
    Stop,
    StoreAnswered,
    Terminate,
    Transfer,
)
from keepstep.protocol.messages.reports import (
    AT_ONCE,
    MAX_STORE_VALUE_BYTES,
    STORE_OPERATIONS_THAT_WAIT,
    CheckpointWritten,
    ClockAsked,
    CollectiveFailed,
    DevicesClosed,
    Drained,
    GroupsReset,
    Holding,
    JobStalled,
    NodeDraining,
    NodeJoined,
    OnceRequested,
    PhasesObserved,
    PublicationStage,
    RankAwaited,
    RanksStand,
    SafePointReached,
    SnapshotsByRank,
    SnapshotsLeft,
    StageSpan,
    StateMoves,
    StateRecovered,
    StateRefused,
    StateRescued,
    StepObserved,
    StepsFinished,
    StoreRequested,
    SuspicionLifted,
    WeightsObserved,
    WorkerDone,
    WorkerEnded,
    WorkerFailed,
    WorkerFenced,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
    WorkerSuspected,
)

__all__ = [
    "AT_ONCE",
    "MAX_AGREED_BYTES",
    "MAX_LISTED",
    "MAX_NAME",
    "MAX_STORE_VALUE_BYTES",
    "STORE_OPERATIONS_THAT_WAIT",
    "Abandon",
    "AgentOrder",
    "AgentReport",
    "AnyMessage",
    "Aside",
    "Assign",
    "Cause",
    "CheckpointWritten",
    "ClockAsked",
    "ClockTold",
    "CollectiveFailed",
    "Complete",
    "DevicesClosed",
    "DoubtLifted",
    "Drain",
    "Drained",
    "DumpTraceback",
    "EndJob",
    "FenceWorker",
    "FirstPhases",
    "GroupAnswer",
    "GroupsReset",
    "Hold",
    "HolderOrder",
    "Holding",
    "InheritSnapshots",
    "JobStalled",
    "Member",
    "Membership",
    "MembershipChange",
    "MembershipTold",
    "Message",
    "NodeDraining",
    "NodeEvicted",
    "NodeJoined",
    "NodeLeft",
    "NodeReport",
    "OnceAnswered",
    "OnceRequested",
    "Packet",
    "PassSnapshots",
    "PhasesObserved",
    "PublicationStage",
    "Question",
    "RankAwaited",
    "RanksStand",
    "Recover",
    "ReleaseSnapshots",
    "Report",
    "Rescue",
    "Resume",
    "SafePointReached",
    "Seconds",
    "SnapshotsByRank",
    "SnapshotsLeft",
    "StageSpan",
    "StartWorker",
    "StateMoves",
    "StateRecovered",
    "StateRefused",
    "StateRescued",
    "StepObserved",
    "StepsFinished",
    "Stop",
    "StoreAnswered",
    "StoreRequested",
    "SuspicionLifted",
    "Tag",
    "Terminate",
    "Transfer",
    "WeightsObserved",
    "WorkerDone",
    "WorkerEnded",
    "WorkerFailed",
    "WorkerFenced",
    "WorkerJoined",
    "WorkerLost",
    "WorkerOrder",
    "WorkerReady",
    "WorkerReport",
    "WorkerStarted",
    "WorkerSuspected",
    "text",
]

GroupAnswer: TypeAlias = SafePointReached | GroupsReset | StateRecovered | StepsFinished | Holding | Drained
"""Answers of every rank to the same order; see `AgentMachine`."""
Question: TypeAlias = StoreRequested | OnceRequested
"""Requests whose answer the worker waits for."""
WorkerReport: TypeAlias = (
    GroupAnswer
    | Question
    | WorkerJoined
    | RankAwaited
    | WorkerReady
    | CheckpointWritten
    | CollectiveFailed
    | StateRefused
    | WorkerFailed
    | StateMoves
    | StateRescued
)
NodeReport: TypeAlias = NodeJoined | NodeDraining | DevicesClosed | JobStalled | RanksStand | StepObserved
AgentReport: TypeAlias = (
    NodeReport
    | WorkerStarted
    | WorkerSuspected
    | SuspicionLifted
    | SnapshotsLeft
    | WorkerLost
    | WorkerEnded
    | WorkerDone
    | WorkerFenced
)
HolderOrder: TypeAlias = Stop | DoubtLifted | Recover | Resume | Complete | Abandon | Rescue | Hold | Drain | Terminate
"""For every worker that holds a rank."""
WorkerOrder: TypeAlias = HolderOrder | Assign | InheritSnapshots | DumpTraceback | StoreAnswered | OnceAnswered
AgentOrder: TypeAlias = (
    StartWorker | FenceWorker | EndJob | MembershipTold | PassSnapshots | ReleaseSnapshots | WorkerOrder
)

Report: TypeAlias = WorkerReport | AgentReport


class Packet(Message, frozen=True):
    """The packet of one end of a `keepstep.protocol.reliable_channel.ReliableChannel`.

    ``incarnation`` counts the node's agents: it grows when the agent restarts, or when an evicted node joins again.
    ``first`` is the number of ``messages[0]``. ``received`` counts the messages of the other end that have arrived
    without a gap. ``misses``: a message has arrived after a gap, so the other end must send again. Without it, a small
    ``received`` does not mean a loss: the packet may have crossed the messages on the way.
    """

    node: Name
    incarnation: int
    first: int
    received: int
    messages: tuple[Report | AgentOrder, ...]
    misses: bool


class NodeEvicted(Message, frozen=True):
    """The controller has evicted the node in this incarnation, and has reassigned its ranks.

    The agent ends its workers and joins again. ``is_final``: it does not join again, and exits.
    """

    node: str
    incarnation: int
    reason: str
    is_final: bool


class NodeLeft(Message, frozen=True):
    """The node leaves in this incarnation, with all its workers. The controller answers with a final `NodeEvicted`."""

    node: Name
    incarnation: int
    reason: Text


Aside: TypeAlias = PhasesObserved | WeightsObserved | ClockAsked | ClockTold
"""Messages between agent and controller outside of packets. No decision depends on them."""

AnyMessage: TypeAlias = Report | AgentOrder | Packet | NodeEvicted | NodeLeft | Aside


def text(value: object, limit: int = 4000) -> str:
    """Returns ``str(value)``, cut to ``limit`` characters. Escapes characters that UTF-8 cannot encode."""
    return str(value)[:limit].encode("utf-8", "backslashreplace").decode()


def printable(value: str) -> str:
    """Returns a text of a node or a script as a terminal may get it: what the terminal would obey becomes an escape."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in value)
