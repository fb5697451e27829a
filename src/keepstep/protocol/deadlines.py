"""The deadlines of a job, in one table: those of the agents, and those of the controller.

A deadline for *silence* leads to a suspicion, and not to a loss: `keepstep.protocol.recovery.suspicion` decides what
becomes of it. An exit, a closed lifeline and a closed link need no deadline and act at once.

The order of the fields is the order of the durations. The agent's deadline for a phase must come before the
controller's for the stage, because the agent knows which rank makes no progress, and the controller only that one is
late.
"""

from __future__ import annotations

import dataclasses

LEASE_S = 3.0
"""The default lease of a node, ``--lease``. It is longer than `Deadlines.blind_s`, and shorter than any deadline for
silence of a rank: if a whole machine is lost, its lease is the only evidence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deadlines:
    """Durations in seconds. The defaults are generous: a false alarm costs a user more than a slow one."""

    blind_s: float = 0.5
    """If an agent has not observed its workers for longer, it was paused itself, and cannot know which of them made
    progress."""
    explain_s: float = 30.0
    """``--explain-after``: after this time without progress the agent reports where ranks wait. Longer than most
    evaluations on a single rank, and short enough for a person who watches a hanging job."""
    hang_after_s: float = 60.0
    """``--hang-after``: how long a rank may make no progress, at least, in a phase that has a deadline of its own; how
    long its process may be stopped (SIGSTOP); and how long all ranks may wait for each other."""
    recovery_s: float = 60.0
    """How long a rank may make no progress while it connects groups and moves state."""
    isolated_s: float = 60.0
    """How long nodes may be silent if only a checkpoint holds the state without them, or if at least half of them are
    silent, and more than one: then the network has probably failed, perhaps the controller's own."""
    end_s: float = 60.0
    """How long the last part of a job may take: a rescue, a fence, and the scripts' ends after the first one's. In a
    rescue, from the last part of a state that a rank has moved."""
    recover_s: float = 300.0
    """How long all ranks may take to get to the resume step, from the last part of a state that a rank has moved. Then
    they stop, and the recovery begins again."""
    long_s: float = 1800.0
    """Deadline of what keepstep knows nothing about: the start-up, the time between two steps including the update, and
    the first phase of its kind in a job. It is also how long a rank may be silent before the job goes back to a
    checkpoint without it. torch's default timeout of a collective with gloo, which the other ranks would wait in; see
    `for_timeout`."""
    start_s: float = 1800.0
    """How long nodes may take to join, and all ranks to get to their first step; and a fresh process in a recovery."""
    stop_s: float = 2400.0
    """How long survivors may take to stop. A last resort: an agent finds before that which rank does not."""
    hang_factor: float = 10.0
    """A phase may take this many times as long as its longest recent duration, if that is longer than
    `hang_after_s`."""

    def for_timeout(self, timeout_s: float) -> Deadlines:
        """Returns the deadlines of a job whose script has ranks wait for each other for up to ``timeout_s``.

        Such a wait is the script's own word for how long a rank may be busy, so `long_s` is not shorter, and what must
        come after it grows by the same factor.
        """
        factor = timeout_s / self.long_s
        if factor <= 1.0:
            return self
        names = ("long_s", "start_s", "stop_s")
        return dataclasses.replace(self, **{name: factor * getattr(self, name) for name in names})

    @property
    def together_s(self) -> float:
        """How long the controller waits after a suspicion, so that ranks that fell silent together are judged together.

        Agents read the state of their workers' processes every 0.2 s while these make no progress, so suspicions with
        one cause come that far apart.
        """
        return min(3.0, max(0.2, 0.2 * self.hang_after_s))


DEADLINES = Deadlines()
"""The defaults."""
