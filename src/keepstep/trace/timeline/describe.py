"""The report of a run as plain data: failures, recoveries, and their durations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from keepstep.protocol.messages import Cause
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.protocol.recovery.placement.quarantine import Place
from keepstep.protocol.recovery.records import Origin, RecoveryRecord

PARTS = ("detect", "stop", "decide", "reset", "restore", "resume", "gap")
"""Names of the parts of a recovery in `describe_recovery`. The gap is the whole time from the failure on."""


def describe(machine: RecoveryMachine, status: list[dict[str, object]] | None = None) -> dict[str, Any]:
    """Returns the report as plain data, in the same form for ``--report``, ``keepstep status`` and the drill.

    Args:
        machine: the recovery machine of the job.
        status: entries of the workers, which are added to the report if they are given.
    """
    report: dict[str, Any] = {
        "stage": str(machine.stage),
        "initialised": machine.progress.is_initialised,
        "generation": machine.generation,
        "world_size": machine.settings.world_size,
        "spares": machine.roster.num_warm_spares,
        "steps": max([machine.progress.trained_to, *_ends(machine)]),
        "quarantine": {str(place): why for place, why in machine.quarantine.held.items()},
        "closed_devices": {
            str(Place(node.name, device)) if device < node.num_devices else f"slot {device} of node {node.name}": reason
            for node in machine.roster.nodes.values()
            for device, reason in sorted(node.closed.items())
        },
        "standstill": machine.standstill.text,
        "digests": {str(rank): digest for rank, digest in sorted(machine.digests.items())},
        "shards": _shards(machine),
        "ranks_lost": ranks_lost(machine.records),
        "recovery_s": round(recovery_s(machine.records), 6),
        "recoveries": [describe_recovery(record) for record in machine.records],
    }
    if machine.ended is not None:
        report |= {"exit_code": machine.ended.exit_code, "reason": machine.ended.reason}
    if status is not None:
        report["workers"] = status
    return report


def _ends(machine: RecoveryMachine) -> list[int]:
    """Returns the completed steps of each script that has ended, which may be before the last step of its loop."""
    return [worker.completed_steps or 0 for worker in machine.roster.workers.values() if worker.done]


def ranks_lost(records: Sequence[RecoveryRecord]) -> int:
    """Returns how often a rank was lost. A rank that only moved to another node was not."""
    return sum(failure.cause != Cause.MOVED for record in records for failure in record.failures)


def recovery_s(records: Sequence[RecoveryRecord]) -> float:
    """Returns the seconds from failures until training went on. An interrupted recovery is part of the next one."""
    total_s = 0.0
    since_s: float | None = None
    for record in records:
        _, begin_s, end_s = record.parts()[-1]
        since_s = begin_s if since_s is None else since_s
        if end_s is not None and since_s is not None and not record.superseded:
            total_s += end_s - since_s
            since_s = None
    return total_s


def _shards(machine: RecoveryMachine) -> dict[str, int]:
    """Returns rank -> number of its shard; empty if all ranks hold the same shard."""
    membership = machine.membership
    if membership is None or len(membership.shards) == 1:
        return {}
    return {str(rank): number for rank, number in enumerate(membership.shard_numbers)}


def describe_recovery(record: RecoveryRecord) -> dict[str, Any]:
    """Returns one recovery as plain data. The milliseconds of a part that was not reached are None."""
    return {
        "generation": record.generation,
        "cause": record.cause,
        "detail": record.detail,
        "failed_ranks": [failure.rank for failure in record.failures],
        "phase": next((failure.phase for failure in record.failures), None),
        "step": next((failure.step for failure in record.failures), None),
        "resume_step": record.resume_step,
        "steps_recomputed": record.steps_recomputed,
        "actions": {str(rank): action for rank, action in record.actions.items()},
        "spares": {str(rank): str(warmth) for rank, warmth in record.warmth.items()},
        "origins": {str(rank): str(origin) for rank, origin in record.origins().items()},
        "received_bytes": record.received_bytes,
        "superseded": record.superseded,
        "milliseconds": record.milliseconds(),
        "first_step_ms": None if record.first_step_s is None else round(record.first_step_s * 1000, 3),
    }


def loaded_text(record: RecoveryRecord) -> str:
    """Returns which ranks loaded a snapshot or checkpoint, such as "rank 1 from a snapshot in memory"; may be empty."""
    origins = record.origins()
    parts = []
    for origin, many in ((Origin.SNAPSHOT, "snapshots in memory"), (Origin.CHECKPOINT, "checkpoints")):
        ranks = sorted(rank for rank, each in origins.items() if each is origin)
        if ranks:
            names = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
            who = "all ranks" if len(ranks) == len(origins) > 1 else f"rank{'s' if len(ranks) > 1 else ''} {names}"
            parts.append(f"{who} from {f'a {origin}' if len(ranks) == 1 else many}")
    return ", ".join(parts)


def as_json(report: dict[str, Any]) -> bytes:
    """Encodes a report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)
