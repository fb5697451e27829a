"""How a job can end: for each end its exit code and the reason that log, report and tests show."""

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

NOT_PROTECTED = "no rank has called keepstep.init(), so the job is not protected: a lost rank ends it"
KILLED_AFTER_GRACE = "remaining processes were killed after the grace period"

# ---- The script's own failure ---------------------------------------------------------------------------------------


def failed(worker: Worker, error: str) -> EndJob:
    """An exception that a fresh process would meet again."""
    who = "a spare" if worker.rank is None else f"rank {worker.rank}"
    return EndJob(EXIT_FAILED, f"{who} failed: {error}")


def exited_in_start_up(rank: int | None, detail: str, *, is_initialised: bool) -> EndJob:
    """A rank ended by itself before the job had ever trained, or in any way where its script is not protected."""
    if is_initialised:
        return EndJob(EXIT_FAILED, f"rank {rank} ended before its first step: {detail}")
    return EndJob(EXIT_FAILED, f"rank {rank} ended: {detail}; {NOT_PROTECTED}")


def failed_everywhere(detail: str) -> EndJob:
    """Every rank ended with an exception."""
    return EndJob(EXIT_FAILED, detail)


def start_overdue(waiting: Sequence[int | None], limit_s: float) -> EndJob:
    """The ranks in ``waiting`` are not ready, and the time for the start-up is over."""
    return EndJob(EXIT_FAILED, f"ranks {list(waiting)} did not reach their first step within {limit_s:g} s")


def too_few_nodes(world_size: int, room: int) -> EndJob:
    """The nodes that have joined do not hold all ranks."""
    return EndJob(EXIT_FAILED, f"{world_size} ranks were asked for, and the nodes that have joined hold {room}")


def ended_early(roster: Roster) -> EndJob | None:
    """Some ranks ended their script while others still train; None where none did."""
    done = sorted(worker.rank for worker in roster.workers.values() if worker.done and worker.rank is not None)
    if not done:
        return None
    return EndJob(EXIT_FAILED, f"ranks {done} ended their script while the others still train")


def uneven_steps(why: str) -> EndJob:
    """A rank has ended its loop before others, which can complete no further step without it."""
    return EndJob(EXIT_FAILED, why)


# ---- After the last step --------------------------------------------------------------------------------------------


def scripts_through(roster: Roster, failure: str | None, last_detail: str, *, is_complete: bool) -> EndJob:
    """No script runs any more: well, unless a rank was lost after the last step, or was never replaced.

    Args:
        roster: all workers of the job.
        failure: the first loss after the last step.
        last_detail: why the last recovery was begun.
        is_complete: whether all ranks have completed the last step; a script may leave its loop before.
    """
    through = {worker.rank for worker in roster.workers.values() if worker.done}
    lost = [rank for rank in range(roster.world_size) if rank not in through]
    if failure is None and lost:
        failure = f"ranks {lost} were lost, and the others ended their script: {last_detail}"
    if failure is not None:
        return EndJob(EXIT_FAILED, failure)
    return EndJob(0, "all ranks have finished" if is_complete else left_early(roster))


def ended_without_init() -> EndJob:
    """No script runs any more, and none of them has ever called `keepstep.init()`."""
    return EndJob(0, f"all scripts have ended; {NOT_PROTECTED}")


def left_early(roster: Roster) -> str:
    """All scripts ended, and not all ranks had taken every step that `Session.steps` would have given them."""
    ends = sorted((w.rank, w.completed_steps) for w in roster.workers.values() if w.done and w.rank is not None)
    places = ", ".join(f"rank {rank} after {steps or 0} steps" for rank, steps in ends)
    return f"steps() was not iterated to its end: the script ended on {places}"


def scripts_overdue(failure: str | None) -> EndJob:
    """A rank was lost after the last step, and the others do not come to their end."""
    return EndJob(EXIT_FAILED, failure or "the scripts did not end")


# ---- It cannot go on ------------------------------------------------------------------------------------------------


def nothing_to_recover(generation: int, detail: str) -> EndJob:
    """No copy of the state is left anywhere."""
    return EndJob(
        EXIT_NOTHING_TO_RECOVER,
        f"generation {generation}: no live rank holds the state any more and there is no checkpoint "
        f"(protect(checkpoint_dir=...) writes them): {detail}",
    )


def no_checkpoint_found(trained_to: int) -> EndJob:
    """All ranks were restarted, and would begin at step 0 what had come to step ``trained_to``."""
    return EndJob(
        EXIT_NOTHING_TO_RECOVER,
        f"training had reached step {trained_to}, and the fresh ranks find no checkpoint to go on from",
    )


def drained(reason: str | None, how: str) -> EndJob:
    """The drain of the job is over."""
    return EndJob(EXIT_DRAINED, f"{reason}: {how}")


def drained_in_vain(reason: str, detail: str) -> EndJob:
    """A drain was requested, and no rank holds any state that could be saved."""
    return EndJob(EXIT_DRAINED, f"{reason}: no live rank holds the state, but the newest checkpoint does: {detail}")


def restarts_used_up(detail: str) -> EndJob:
    """No rank holds any state, and not all of them may be restarted."""
    return EndJob(EXIT_TOO_FEW_RANKS, f"--max-restarts is used up: {detail}")


def too_few_devices(world_size: int, detail: str) -> EndJob:
    """No rank holds any state, and the only node has no room for all of them any more."""
    return EndJob(EXIT_TOO_FEW_RANKS, f"the node has not enough devices left for {world_size} ranks: {detail}")


def rescued(roster: Roster, reason: str | None) -> EndJob:
    """The live ranks have saved what they hold, or have said why they could not."""
    saved = list(dict.fromkeys(worker.rescued for worker in roster.workers.values() if worker.rescued))
    errors = [f"rank {worker.rank}: {worker.rescue_error}" for worker in roster.workers.values() if worker.rescue_error]
    where = f"state saved: {', '.join(saved)}" if saved else ": ".join(["no state could be saved", *errors[:1]])
    return EndJob(EXIT_TOO_FEW_RANKS, f"the job cannot continue: {reason}; {where}")
