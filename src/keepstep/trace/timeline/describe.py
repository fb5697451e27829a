"""The report of a run as plain data: failures, recoveries, and their durations."""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.protocol.recovery import RecoveryMachine
from keepstep.protocol.recovery.placement.quarantine import Place
from keepstep.protocol.recovery.records import Origin, RecoveryRecord

PARTS = ("detect", "stop", "decide", "reset", "restore", "resume", "gap")
"""Of a recovery, as `describe_recovery` names them; the gap is all of it."""


def describe(machine: RecoveryMachine, status: list[dict[str, object]] | None = None) -> dict[str, Any]:
    """The report as plain data; the same shape for ``--report``, ``keepstep status`` and the drill."""
    report: dict[str, Any] = {
        "stage": str(machine.stage),
        "initialised": machine.progress.is_initialised,
        "generation": machine.generation,
        "world_size": machine.settings.world_size,
        "spares": machine.roster.num_warm_spares,
        "steps": machine.progress.trained_to,
        "quarantine": {str(place): why for place, why in machine.quarantine.held.items()},
        "closed_devices": {
            str(Place(node.name, device)): reason
            for node in machine.roster.nodes.values()
            for device, reason in sorted(node.closed.items())
        },
        "standstill": machine.standstill.text,
        "digests": {str(rank): digest for rank, digest in sorted(machine.digests.items())},
        "shards": _shards(machine),
        "recoveries": [describe_recovery(record) for record in machine.records],
    }
    if machine.ended is not None:
        report |= {"exit_code": machine.ended.exit_code, "reason": machine.ended.reason}
    if status is not None:
        report["workers"] = status
    return report


def _shards(machine: RecoveryMachine) -> dict[str, int]:
    """Ranks of equal numbers hold the same part of the state; empty where all ranks hold the same."""
    membership = machine.membership
    if membership is None or len(membership.shards) == 1:
        return {}
    return {str(rank): number for rank, number in enumerate(membership.shard_numbers)}


def describe_recovery(record: RecoveryRecord) -> dict[str, Any]:
    """One recovery as plain data. Milliseconds are None for a part that was not reached."""
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
    """Which ranks went back to what they had saved, in a few words: "rank 1 from a snapshot in memory"; or nothing."""
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
    """A report as people and programs read it."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)
