"""The current activity of a simulated rank's training thread."""

from __future__ import annotations

import enum


class Activity(enum.StrEnum):
    """What the training thread does when it has been busy for a while; `SimulatedWorker.perform` says how."""

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
