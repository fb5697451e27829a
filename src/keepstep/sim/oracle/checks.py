"""The checks that a run must pass."""

from __future__ import annotations

import enum


class Check(enum.StrEnum):
    """A check of the oracle, by the violation that it reports."""

    UPDATES = "updates lost, doubled or partial"
    LOCAL = "a rank's own value lost, doubled or another rank's"
    STEPS_DIFFER = "ranks at different steps after resume"
    TWO_HOLDERS = "two holders of one rank"
    OLD_COMMIT = "commit by an old generation"
    WRONG_SOURCE = "restored from what did not reach the resume step"
    LAST_COPY = "the last copy given up for silence"
    HEALTHY_FENCED = "healthy rank fenced without cause"
    RECOMPUTED = "more than one step recomputed"
    NO_CAUSE = "recovery without a cause"
    SPARE_CHOICE = "a spare taken from the wrong place"
    STUCK = "neither progresses nor ends"
    ENDED = "ended without need"
    SNAPSHOT = "a snapshot that is not whole, or not there"
    MEMBERSHIP = "a membership that is not the job's"
    LOCAL_RANKS = "local ranks doubled or out of range"
    ONCE = "done twice, by two at a time, or not the same for all"
    START_UP = "another start-up's or rank's value, or too early"
    GROUPS = "a group that stays and may not, or only for some"
    DRAIN = "drained wrongly, or not at all"
    DEVICE = "a sick device used, or not left"
    RAISED = "a machine raised"


class ViolationError(Exception):
    """A check failed."""

    def __init__(self, check: Check, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail
