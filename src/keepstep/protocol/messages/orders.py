"""Orders, downwards: from the controller to agents, and through them to workers. Named in the imperative."""

from __future__ import annotations

import msgspec

from keepstep.protocol.messages.base import Message, Seconds
from keepstep.protocol.messages.membership import Membership, MembershipChange


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
    """This worker holds ``rank`` in this generation, and ``local_rank`` among the ranks of its node.

    Its agent fills in ``device`` for a spare that was parked and takes a device with the rank, counted from 0.
    """

    worker: int
    generation: int
    rank: int
    local_rank: int
    local_world_size: int
    device: int | None


class PassSnapshots(Message, frozen=True):
    """The worker is about to get this rank, or to send its state to the worker that gets it: give it access to the
    rank's snapshots in the memory of ``keepers``."""

    worker: int
    rank: int
    keepers: tuple[int, ...]


class InheritSnapshots(Message, frozen=True):
    """The agent tells a worker where snapshots of a rank are, and of which steps."""

    worker: int
    rank: int
    path: str
    steps: tuple[int, ...]


class ReleaseSnapshots(Message, frozen=True):
    """All ranks have snapshots again: free the memory of these dead workers."""

    workers: tuple[int, ...]


class Stop(Message, frozen=True):
    """Every generation before ``generation`` is over: close the groups, stop at a safe point, report it.

    ``synced_step`` is the step whose gradients a lost rank had complete. A rank in the backward of that step has all
    the data it needs in its own sockets, and finishes the backward before it breaks any group.
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

    A rank among the receivers of a transfer restores. Every other one computes from its own report, with
    `keepstep.protocol.resume.action`, whether it stays, advances or rewinds.
    """

    generation: int
    resume_step: int
    transfers: tuple[Transfer, ...]
    membership: Membership | MembershipChange
    """Of this generation. The controller sends an agent the changes since the last membership that it has sent; a
    worker gets the complete one."""
    from_buddies: tuple[Transfer, ...]
    """For state that no rank holds any more. The single source sends it from a snapshot in its node's memory: its own,
    or one that `PassSnapshots` has named."""
    kept_step: int | None
    """The newest step to which all ranks can go back after the loss of any one node. No rank overwrites its snapshots
    of that step before all have left a gradient barrier."""


class MembershipTold(Message, frozen=True):
    """The current membership, for a node that joins; the next `Recover` contains changes to it."""

    membership: Membership


class Resume(Message, frozen=True):
    """Every rank is at the resume step: training continues."""

    generation: int


class Complete(Message, frozen=True):
    """Every rank has completed the last step: the script's code after the loop may run."""

    generation: int


class Abandon(Message, frozen=True):
    """A peer was lost after the last step: break the communicators, let the errors reach the script."""

    reason: str


class Rescue(Message, frozen=True):
    """The job cannot continue: save the shard, report it with `StateRescued`, and end."""

    reason: str


class Hold(Message, frozen=True):
    """The job will end: complete the current step, and wait. Report at once before which step."""

    generation: int


class Drain(Message, frozen=True):
    """The job ends at ``step``: train up to it, and write a checkpoint if the job uses checkpoints."""

    generation: int
    step: int


class Terminate(Message, frozen=True):
    """The agent sends SIGTERM to every worker. A script that handles it may then leave its loop and save."""

    reason: str


class StoreAnswered(Message, frozen=True):
    """The answer to a `StoreRequested`: no ``values`` if its generation is over; ``error``: why it is refused."""

    worker: int
    request: int
    values: tuple[bytes, ...] | None
    error: str


class OnceAnswered(Message, frozen=True):
    """The answer to a claim or a hold: whether this worker has it."""

    worker: int
    request: int
    is_mine: bool


class ClockTold(Message, frozen=True):
    """The answer to `ClockAsked`: the controller's monotonic time, ``told_ns``.

    ``gather_s`` is the interval at which each node reports phases: the more nodes, the longer.
    """

    asked_ns: int
    told_ns: int
    gather_s: Seconds


class EndJob(Message, frozen=True):
    """End every process of the job and exit with ``exit_code``."""

    exit_code: int
    reason: str
