"""The current activity of a simulated rank's training thread."""

from __future__ import annotations

import enum


class Activity(enum.StrEnum):
    """The next activity of the training thread, after the current one has taken its time. See
    `SimulatedWorker.perform`."""

    BUILD = "build"
    WAIT_FOR_RANK = "wait for a rank"
    BUILD_IN_ECHO = "build in echo"
    FALL_OUT = "fall out"
    LOADED = "loaded"
    FORWARD = "forward"
    BACKWARD = "backward"
    REACH_STOP_POINT = "reach a stop point"
    CUT_OFF = "cut off"
    REDUCE = "reduce"
    COMPLETE = "complete"
    SAVE = "save"
    END = "end"
