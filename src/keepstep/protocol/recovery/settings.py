"""The user's settings of the controller's machine, and the exit codes of a job."""

from __future__ import annotations

import dataclasses

EXIT_FAILED = 1
EXIT_DRAINED = 1
"""torchrun's, where a signal has ended it (measured with torch 2.13)."""
EXIT_NOTHING_TO_RECOVER = 75
EXIT_TOO_FEW_RANKS = 76

GRACE_S = 30.0
"""torchrun's ``--shutdown-timeout``, and the ``terminationGracePeriodSeconds`` of Kubernetes."""
QUARANTINE_FAILURES = 2
QUARANTINE_WINDOW_S = 3600.0
"""Twice within an hour, of a node that otherwise fails once in half a year: Meta's research clusters had 2 to 7
failures in 1,000 node-days (Kokolis et al., *Revisiting Reliability in Large-Scale Machine Learning Research Clusters*,
2024)."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecoverySettings:
    """What the user may set of the controller's machine. Durations in seconds."""

    world_size: int
    num_spares: int
    ranks_per_node: int | None = None
    """None: as many as a node has room for."""
    most_per_node: int = 0
    """So many workers a node takes in where there is no other room: they share its devices, until others are free."""
    max_restarts: int | None = None
    """Processes that may be started beyond the first ones; None: no bound while the job makes progress."""
    max_recoveries_without_progress: int = 8
    """A step that fails so often in a row will fail again: the job ends instead of looping for ever."""
    nodes_may_join: bool = True
    """False where the job's only node is there from the start: no other one brings room for a rank that has none."""
    start_deadline_s: float = 1800.0
    spares_grace_s: float = 30.0
    """How long the controller waits for nodes with room for the spares, once there is room for all ranks."""
    stop_deadline_s: float = 600.0
    """A backstop: the agent of a survivor that stands still finds it long before."""
    recover_deadline_s: float = 300.0
    end_deadline_s: float = 60.0
    grace_s: float = GRACE_S
    """From the beginning of a drain until the agents kill what still runs."""
    quarantine_failures: int = QUARANTINE_FAILURES
    """The machine gives nothing to a node or device that failed so often within the window while another one has room.
    0 disables the quarantine."""
    quarantine_window_s: float = QUARANTINE_WINDOW_S
