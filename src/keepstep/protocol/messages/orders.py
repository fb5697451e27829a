"""Orders: from the controller to agents, and through them to workers. Their names are in the imperative."""

from __future__ import annotations

import msgspec

from keepstep.protocol.messages.base import AgreedValue, FirstPhases, Message, Seconds
from keepstep.protocol.messages.membership import Membership, MembershipChange


class StartWorker(Message, frozen=True):
    """Start a worker's process on one of the node's devices, counted from 0.

    ``local_rank`` and ``local_world_size`` are torchrun's ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``. ``rank`` and
    ``local_rank`` are None for a spare.
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
    """The worker holds ``rank`` from this generation on, and ``local_rank`` among the ranks of its node.

    ``device`` is None, except for a parked spare: its agent fills in the device that the spare takes with the rank.
    ``first_phases`` are for the agent: by them it sets the deadlines for the worker's own first phases.
    """

    worker: int
    generation: int
    rank: int
    local_rank: int
    local_world_size: int
    device: int | None
    first_phases: FirstPhases


class PassSnapshots(Message, frozen=True):
    """Give the worker access to a rank's snapshots in the memory of the workers ``keepers``.

    The worker is about to take this rank, or to send the rank's state to the worker that takes it.
    """

    worker: int
    rank: int
    keepers: tuple[int, ...]


class InheritSnapshots(Message, frozen=True):
    """The agent tells a worker the path of a rank's snapshots, and their steps."""

    worker: int
    rank: int
    path: str
    steps: tuple[int, ...]


class DumpTraceback(Message, frozen=True):
    """The agent asks a worker for the stack of its training thread; see `keepstep.shared.tracebacks`."""


class ReleaseSnapshots(Message, frozen=True):
    """All ranks have snapshots again: free the snapshots of these dead workers."""

    workers: tuple[int, ...]


class Stop(Message, frozen=True):
    """All generations before ``generation`` are over: break the communicators, stop at a safe point, and report it.

    ``synced_step`` is the last step whose gradients a lost rank had complete. A rank in the backward of that step has
    all the data it needs in its own sockets, and finishes the backward before it breaks any group. If that is the end
    of an epoch, the lost rank has made its deferred calls there.
    """

    generation: int
    reason: str
    synced_step: int | None


class Transfer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A transfer of state within one replica group: from ranks that hold the resume step to ranks that need it."""

    sources: tuple[int, ...]
    receivers: tuple[int, ...]


class Recover(Message, frozen=True):
    """Go to the resume step in this generation.

    A rank among the receivers of a transfer restores. Every other rank computes with `keepstep.protocol.resume.action`,
    from its own report, whether it stays, advances or rewinds.
    """

    generation: int
    resume_step: int
    transfers: tuple[Transfer, ...]
    membership: Membership | MembershipChange
    """The membership of this generation. The controller may send only the change since the last membership that it has
    sent; the agent passes the complete membership to its workers."""
    from_buddies: tuple[Transfer, ...]
    """Transfers of state that no rank holds any more. The single source sends it from a snapshot in its node's memory:
    a second copy that it keeps, or one that `PassSnapshots` has named."""
    kept_step: int | None
    """The newest step to which all ranks can go back after the loss of any one node. No rank overwrites its snapshots
    of that step before all ranks have left a gradient barrier."""


class DoubtLifted(Message, frozen=True):
    """The copies that these workers hold in doubt are equal, and no other is left of their shard: they are the state.

    A worker that is named counts its copy as whole from now on.
    """

    generation: int
    workers: tuple[int, ...]


class MembershipTold(Message, frozen=True):
    """The current membership, for a node that joins. The next `Recover` may contain only the change to it."""

    membership: Membership


class Resume(Message, frozen=True):
    """Every rank is at the resume step: training continues."""

    generation: int


class Complete(Message, frozen=True):
    """Every rank has completed the last step: the script's code after the loop may run."""

    generation: int


class Abandon(Message, frozen=True):
    """A rank was lost after the last step: break the communicators, and let the errors reach the script."""

    reason: str


class Rescue(Message, frozen=True):
    """The job cannot continue: save the shard, report it with `StateRescued`, and end.

    ``in_doubt``: no whole copy is left of some shard. A worker that holds one in doubt saves that, and what is saved
    must not be taken for a checkpoint.
    """

    reason: str
    in_doubt: bool


class Hold(Message, frozen=True):
    """The job will end: complete the current step, then wait. Report at once the step before which the rank waits."""

    generation: int


class Drain(Message, frozen=True):
    """The job ends at ``step``: train up to it, and write a checkpoint if the job uses checkpoints."""

    generation: int
    step: int


class Terminate(Message, frozen=True):
    """The agent sends SIGTERM to every worker. A script that handles it may then leave its loop and save."""

    reason: str


class StoreAnswered(Message, frozen=True):
    """The answer to a `StoreRequested`.

    ``values`` is None if the request's generation is over. ``error`` says why a request was refused; else it is empty.
    """

    worker: int
    request: int
    values: tuple[bytes, ...] | None
    error: str


class OnceAnswered(Message, frozen=True):
    """The answer to a claim or a hold in `OnceRequested`: whether this worker has got it. The answer to agree: whether
    its proposal was the first one, and the ``value`` of that."""

    worker: int
    request: int
    is_mine: bool
    value: AgreedValue


class ClockTold(Message, frozen=True):
    """The answer to `ClockAsked`: the controller's monotonic time ``told_ns``.

    ``gather_s`` is the interval at which each node reports phases. It grows with the number of nodes.
    """

    asked_ns: int
    told_ns: int
    gather_s: Seconds


class EndJob(Message, frozen=True):
    """End every process of the job and exit with ``exit_code``."""

    exit_code: int
    reason: str
