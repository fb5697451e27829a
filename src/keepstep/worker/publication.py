"""Publishing a job's weights to consumers every so many steps, while it trains and while ranks come and go."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path

from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.weights.memory.blocks import Weights
from keepstep.weights.memory.mapping.mapped import Mapped
from keepstep.weights.publisher import Published, Publisher


class StepPublication:
    """One rank's part. Used from the training thread, but for `interrupt`.

    Copies are published, in a thread, so training goes on meanwhile. A version is the number of steps that its weights
    have seen. One that does not come about, because a rank was lost just then, is left out; the next one is complete.
    """

    def __init__(
        self, folder: Path, weights: Weights | Mapped, every: int, deadline_s: float, at_start: bool = False
    ) -> None:
        """Args:
        folder, weights, every, deadline_s, at_start: see `Session.publish_weights`.

        Raises:
            ConfigurationError: ``every`` is below 1.
        """
        if every < 1:
            raise ConfigurationError(f"publish_weights(every={every}): allowed are 1 and more")
        self._folder, self._weights, self._every, self._deadline_s = folder, weights, every, deadline_s
        self._at_start = at_start
        self._publisher: Publisher | None = None
        self._under_way: Future[Published] | None = None

    def stand_ready(self, rank: int, world_size: int, generation: int, num_steps: int) -> None:
        """This rank takes part in ``generation``: consumers find it from now on.

        Args:
            rank, world_size, generation: those of the membership.
            num_steps: that the weights have seen.
        """
        begins = self._publisher is None or self._publisher.generation != generation
        if self._publisher is None:
            self._publisher = Publisher(
                self._folder,
                self._weights,
                rank=rank,
                world_size=world_size,
                generation=generation,
                copies=True,
                deadline_s=self._deadline_s,
            )
        elif self._publisher.generation != generation:
            self.flush()
            self._publisher.generation = generation
        if begins and self._at_start:
            self._under_way = self._publisher.publish_in_background(num_steps)

    def after_step(self, num_steps: int) -> None:
        """So many steps are complete: publishes, where it is due."""
        if num_steps % self._every or self._publisher is None:
            return
        self.flush()
        self._under_way = self._publisher.publish_in_background(num_steps)

    def flush(self) -> None:
        """Waits until what is under way has come about or not, which its deadline bounds."""
        if self._under_way is None:
            return
        try:
            for failure in self._under_way.result().failures:
                self._note(f"a consumer was left out: {failure}")
        except KeepstepError as error:
            self._note(str(error))
        self._under_way = None

    def interrupt(self) -> None:
        """A rank was lost: what is under way cannot come about. Any thread."""
        if self._publisher is not None:
            self._publisher.interrupt()

    def close(self) -> None:
        """The job is over."""
        self.flush()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _note(self, text: str) -> None:
        print(f"keepstep: publishing weights: {text}", file=sys.stderr, flush=True)
