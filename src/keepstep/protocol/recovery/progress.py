"""The job's progress through its steps."""

from __future__ import annotations


class Progress:
    """The steps that the job has reached, and the generation of its last progress."""

    def __init__(self) -> None:
        self.trained_to = 0
        """The greatest step that the job is known to have reached."""
        self.resume_at = 0
        """The resume step of the current or last recovery."""
        self.has_trained = False
        """Whether all ranks were ever at a step together. Before that, a failure of a script is its own fault."""
        self.is_initialised = False
        """Whether a rank has called `keepstep.init()`. A script may never call it. Before the call, its progress is
        unknown, its ranks cannot be replaced, and a spare that ran it would interfere with the ranks."""
        self.is_fresh = True
        """Whether no live rank has trained yet: either the job never has, or all ranks were started since."""
        self.last_generation = 1
        """The newest generation in which a step was completed."""

    def reached(self, step: int) -> None:
        """Records that the job has reached a step."""
        self.trained_to = max(self.trained_to, step)

    def completed(self, step: int, generation: int) -> None:
        """Records that a step was completed in a generation."""
        self.reached(step + 1)
        self.last_generation = max(self.last_generation, generation)

    def resumes(self, step: int, generation: int) -> None:
        """Records the resume step of a recovery."""
        if step > self.resume_at:  # the last generation made progress, maybe only by finishing a step when stopped
            self.last_generation = max(self.last_generation, generation - 1)
        self.resume_at = step

    def stands(self) -> None:
        """Records that all ranks are at the resume step."""
        self.reached(self.resume_at)
        self.has_trained, self.is_fresh = True, False

    def would_begin_again(self, step: int) -> bool:
        """Returns whether fresh ranks would begin at step 0 although the job has trained before."""
        return self.is_fresh and step == 0 < self.trained_to
