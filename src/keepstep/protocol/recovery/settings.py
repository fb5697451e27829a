"""The user's settings of the controller's machine, and the exit codes of a job."""

from __future__ import annotations

import dataclasses

from keepstep.protocol.deadlines import DEADLINES, Deadlines

EXIT_FAILED = 1
EXIT_DRAINED = 1
"""The exit code of torchrun when a signal has ended it (measured with torch 2.13)."""
EXIT_NOTHING_TO_RECOVER = 75
EXIT_TOO_FEW_RANKS = 76

GRACE_S = 30.0
"""The default of torchrun's ``--shutdown-timeout``, and of Kubernetes' ``terminationGracePeriodSeconds``."""
QUARANTINE_FAILURES = 2
QUARANTINE_WINDOW_S = 3600.0
"""Two failures within an hour mean a fault, because a healthy node fails about once in half a year: Meta's research
clusters had 2 to 7 failures in 1,000 node-days (Kokolis et al., *Revisiting Reliability in Large-Scale Machine Learning
Research Clusters*, 2024)."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecoverySettings:
    """The user's settings of the controller's machine. Durations in seconds."""

    world_size: int
    num_spares: int
    ranks_per_node: int | None = None
    """Most ranks on a node; None: as many as the node has room for."""
    most_per_node: int = 0
    """Most workers on a node if no other device is free. They share the node's devices until others are free. 0: no
    sharing."""
    max_restarts: int | None = None
    """Most processes that may be started in addition to the first ones; None: no limit while the job makes progress."""
    max_recoveries_without_progress: int = 8
    """The job ends after more recoveries in a row without a completed step, because such a step will fail again."""
    ends_apart: bool = False
    """``--compare strict``: the job ends if replicas have trained apart; else it goes on, with a warning."""
    nodes_may_join: bool = True
    """False if the job has one node from the start, so that no other node can bring room for a rank."""
    deadlines: Deadlines = DEADLINES
    give_up_after_s: float | None = None
    """How long a rank that is not given up may be silent until the job ends; None: forever."""
    spares_grace_s: float = 30.0
    """How long the controller waits for nodes with room for the spares, once there is room for all ranks."""
    grace_s: float = GRACE_S
    """Time from the start of a drain until the agents kill the remaining processes."""
    quarantine_failures: int = QUARANTINE_FAILURES
    """A node or device that failed so often within the window gets ranks and spares only if no other one has room. 0
    disables the quarantine."""
    quarantine_window_s: float = QUARANTINE_WINDOW_S
