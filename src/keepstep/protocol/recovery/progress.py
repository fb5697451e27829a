"""The job's progress, and whether it makes any."""

from __future__ import annotations


class Progress:
    """Steps reached, and the generations in which that was."""

    def __init__(self) -> None:
        self.trained_to = 0
        """The greatest step at which the job is known to have been."""
        self.resume_at = 0
        """Where the present or the last recovery takes it."""
        self.has_trained = False
        """Whether all ranks ever stood at a step together: before that, a script that fails is at fault itself."""
        self.is_initialised = False
        """Whether a rank has called `keepstep.init()`. Until then it may be a script that never does: nothing is known
        of what it does, none of its ranks can be replaced, and a spare that ran it would meet the ranks."""
        self.is_fresh = True
        """Whether no live rank has trained yet: all were started since the job last did, if it ever did."""
        self.last_generation = 1
        """The newest in which a step was completed."""

    def reached(self, step: int) -> None:
        """The job was at this step."""
        self.trained_to = max(self.trained_to, step)

    def completed(self, step: int, generation: int) -> None:
        """A step was completed."""
        self.reached(step + 1)
        self.last_generation = max(self.last_generation, generation)

    def resumes(self, step: int, generation: int) -> None:
        """A recovery takes all ranks to a step."""
        if step > self.resume_at:  # they came that far, be it only by finishing the step when they were stopped
            self.last_generation = max(self.last_generation, generation - 1)
        self.resume_at = step

    def stands(self) -> None:
        """All ranks are at the resume step."""
        self.reached(self.resume_at)
        self.has_trained, self.is_fresh = True, False

    def would_begin_again(self, step: int) -> bool:
        """Whether fresh ranks at this step would begin at 0 what has trained before."""
        return self.is_fresh and step == 0 < self.trained_to
