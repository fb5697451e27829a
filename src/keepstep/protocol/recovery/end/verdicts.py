"""The ways in which a job can end, each with its exit code and the reason for log, report and tests."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.protocol.messages import EndJob
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.recovery.settings import (
    EXIT_DRAINED,
    EXIT_FAILED,
    EXIT_NOTHING_TO_RECOVER,
    EXIT_TOO_FEW_RANKS,
)
from keepstep.protocol.wording import who

NOT_PROTECTED = "no rank has called keepstep.init(), so the job is not protected: a lost rank ends it"
PREPARE_BEFORE = "What takes so long has to be prepared before the job"
KILLED_AFTER_GRACE = "remaining processes were killed after the grace period"

# ---- The script's own failure ---------------------------------------------------------------------------------------


def failed(worker: Worker, error: str) -> EndJob:
    """A script failed with an exception that a fresh process would raise again."""
    who = "a spare" if worker.rank is None else f"rank {worker.rank}"
    return EndJob(EXIT_FAILED, f"{who} failed: {error}")


def exited_in_start_up(rank: int | None, detail: str, *, is_initialised: bool) -> EndJob:
    """A rank ended before the job had ever trained, or its script has never called `keepstep.init()`."""
    if is_initialised:
        return EndJob(EXIT_FAILED, f"rank {rank} ended before its first step: {detail}")
    return EndJob(EXIT_FAILED, f"rank {rank} ended: {detail}; {NOT_PROTECTED}")


def failed_everywhere(detail: str) -> EndJob:
    """Every rank ended with an exception."""
    return EndJob(EXIT_FAILED, detail)


def start_overdue(waiting: Sequence[int | None], limit_s: float) -> EndJob:
    """The ranks in ``waiting`` were not ready within the time for the start-up."""
    late = who(rank for rank in waiting if rank is not None)
    what = f"{late} did not reach the first step within {limit_s:g} s of the first keepstep.init()"
    return EndJob(EXIT_FAILED, f"{what}. {PREPARE_BEFORE}")


def too_few_nodes(world_size: int, room: int) -> EndJob:
    """The nodes that have joined have no room for all ranks."""
    return EndJob(EXIT_FAILED, f"{world_size} ranks were asked for, and the nodes that have joined hold {room}")


def ended_early(roster: Roster) -> EndJob | None:
    """Some ranks ended their script while others still train. Returns None if none did."""
    done = sorted(worker.rank for worker in roster.workers.values() if worker.done and worker.rank is not None)
    if not done:
        return None
    return EndJob(EXIT_FAILED, f"ranks {done} ended their script while the others still train")


def uneven_steps(why: str) -> EndJob:
    """A rank has ended its loop before others, which can complete no more steps without it."""
    return EndJob(EXIT_FAILED, why)


# ---- After the last step --------------------------------------------------------------------------------------------


def scripts_through(roster: Roster, failure: str | None, last_detail: str, *, is_complete: bool) -> EndJob:
    """All scripts have ended. The exit code is 0, unless a rank was lost after the last step, or was never replaced.

    Args:
        roster: all workers of the job.
        failure: the first loss after the last step; None if there was none.
        last_detail: why the last recovery began.
        is_complete: whether all ranks have completed the last step. A script may leave its loop before.
    """
    through = {worker.rank for worker in roster.workers.values() if worker.done}
    lost = [rank for rank in range(roster.world_size) if rank not in through]
    if failure is None and lost:
        failure = f"ranks {lost} were lost, and the others ended their script: {last_detail}"
    if failure is not None:
        return EndJob(EXIT_FAILED, failure)
    return EndJob(0, "all ranks have finished" if is_complete else left_early(roster))


def ended_without_init() -> EndJob:
    """All scripts have ended, and none of them has ever called `keepstep.init()`."""
    return EndJob(0, f"all scripts have ended; {NOT_PROTECTED}")


def left_early(roster: Roster) -> str:
    """Returns the reason if all scripts ended before `Session.steps` was iterated to its end."""
    ends = sorted((w.rank, w.completed_steps) for w in roster.workers.values() if w.done and w.rank is not None)
    places = ", ".join(f"rank {rank} after {steps or 0} steps" for rank, steps in ends)
    return f"steps() was not iterated to its end: the script ended on {places}"


def scripts_overdue(failure: str | None) -> EndJob:
    """A rank was lost after the last step, and the other scripts did not end in time."""
    return EndJob(EXIT_FAILED, failure or "the scripts did not end")


# ---- The job cannot continue ----------------------------------------------------------------------------------------


def nothing_to_recover(generation: int, copies: str) -> EndJob:
    """No copy of the state is left anywhere. ``copies``: what has become of each."""
    return EndJob(
        EXIT_NOTHING_TO_RECOVER,
        f"generation {generation}: no live rank holds the state any more and there is no checkpoint "
        f"(protect(checkpoint_dir=...) writes them): {copies}",
    )


def no_checkpoint_found(trained_to: int) -> EndJob:
    """All ranks were restarted and found no checkpoint, although training had reached step ``trained_to``."""
    return EndJob(
        EXIT_NOTHING_TO_RECOVER,
        f"training had reached step {trained_to}, and the fresh ranks find no checkpoint to go on from",
    )


def drained(reason: str | None, how: str) -> EndJob:
    """The drain of the job is over."""
    return EndJob(EXIT_DRAINED, f"{reason}: {how}")


def drained_in_vain(reason: str, copies: str, *, has_checkpoint: bool) -> EndJob:
    """A drain was requested, but no rank holds any state to save. ``copies``: what has become of each."""
    where = "but the newest checkpoint does" if has_checkpoint else "and there is no checkpoint"
    return EndJob(EXIT_DRAINED, f"{reason}: no live rank holds the state, {where}: {copies}")


def restarts_used_up(detail: str) -> EndJob:
    """No rank holds any state, and the process budget does not allow to restart all ranks."""
    return EndJob(EXIT_TOO_FEW_RANKS, f"--max-restarts is used up: {detail}")


def too_few_devices(world_size: int, detail: str) -> EndJob:
    """No rank holds any state, and the only node has no room for all ranks any more."""
    return EndJob(EXIT_TOO_FEW_RANKS, f"the node has not enough devices left for {world_size} ranks: {detail}")


def rescued(roster: Roster, reason: str | None) -> EndJob:
    """The live ranks have saved their state, or have reported why they could not."""
    saved = list(dict.fromkeys(worker.rescued for worker in roster.workers.values() if worker.rescued))
    errors = [f"rank {worker.rank}: {worker.rescue_error}" for worker in roster.workers.values() if worker.rescue_error]
    where = f"state saved: {', '.join(saved)}" if saved else ": ".join(["no state could be saved", *errors[:1]])
    return EndJob(EXIT_TOO_FEW_RANKS, f"the job cannot continue: {reason}; {where}")
