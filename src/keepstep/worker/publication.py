"""Publishes a job's weights to consumers at regular steps, while it trains and while ranks are replaced."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from keepstep.errors import ConfigurationError, KeepstepError, PublisherLost
from keepstep.protocol.messages import MAX_LISTED, PublicationStage, StageSpan, WeightsObserved, text
from keepstep.weights.memory.blocks import Weights
from keepstep.weights.memory.mapping.mapped import Mapped
from keepstep.weights.publisher import Published, Publisher
from keepstep.weights.spans import MAX_REPORTED, MAX_TRACED

MAX_FAILURES = 32
"""Maximum number of failures reported per update: if a whole node is lost, they are alike."""


@dataclasses.dataclass(frozen=True, slots=True)
class Voice:
    """Sends the reports of a worker's publication.

    Attributes:
        worker: number of the worker.
        send: sends a report to the agent, from any thread.
    """

    worker: int = 0
    send: Callable[[WeightsObserved], None] = lambda news: None


class StepPublication:
    """Publishes one rank's weights at regular steps. Call it from the training thread, except for `interrupt`.

    A separate thread publishes copies, so training continues meanwhile. A version is the number of steps that its
    weights have been trained for. A version is skipped if a rank is lost meanwhile; the next one is complete.
    """

    def __init__(
        self,
        folder: Path,
        weights: Weights | Mapped,
        every: int,
        deadline_s: float,
        at_start: bool = False,
        voice: Voice = Voice(),
    ) -> None:
        """Args:
            folder, weights, every, deadline_s, at_start: see `Session.publish_weights`.
            voice: reports the begin and the end of each update, and the consumers.

        Raises:
            ConfigurationError: ``every`` is below 1.
        """
        if every < 1:
            raise ConfigurationError(f"publish_weights(every={every}): allowed are 1 and more")
        self._folder, self._weights, self._every, self._deadline_s = folder, weights, every, deadline_s
        self._at_start, self._voice = at_start, voice
        self._publisher: Publisher | None = None
        self._rank = 0
        self._under_way: Future[Published] | None = None
        self._has_told = threading.Event()
        """Set when the end of the update in progress has been reported."""
        self._shown: tuple[tuple[str, int | None], ...] = ()
        """The consumers and their versions, as last reported."""

    def stand_ready(self, rank: int, world_size: int, generation: int, num_steps: int) -> None:
        """Joins ``generation``: consumers find this rank from now on.

        Args:
            rank, world_size, generation: as in the membership.
            num_steps: number of steps that the weights have been trained for.
        """
        self._rank = rank
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
            self._publish(self._publisher, num_steps)

    def after_step(self, num_steps: int, is_interrupted: bool = False) -> None:
        """Publishes the weights, if due, after ``num_steps`` complete steps.

        Args:
            num_steps: number of complete steps.
            is_interrupted: whether this generation is over. A version that is due is then skipped, and reported as
                such.
        """
        if self._publisher is None:
            return
        if num_steps % self._every == 0:
            self.flush()
            if is_interrupted:
                self._skip(self._publisher, num_steps)
            else:
                self._publish(self._publisher, num_steps)
        elif self._publisher.consumer_versions != self._shown:
            now_s = time.monotonic()
            self._tell(self._publisher, PublicationStage.ATTACHED, None, now_s, None)

    def _publish(self, publisher: Publisher, version: int) -> None:
        begun_s = time.monotonic()
        self._has_told.clear()
        self._under_way = publisher.publish_in_background(version)
        self._tell(publisher, PublicationStage.UNDER_WAY, version, begun_s, None)

        def ended(future: Future[Published]) -> None:
            """Runs in the thread that publishes."""
            try:
                failed = future.exception() is not None
                stage = PublicationStage.BROKEN_OFF if failed else PublicationStage.COMMITTED
                self._tell(publisher, stage, version, begun_s, future)
            finally:
                self._has_told.set()

        self._under_way.add_done_callback(ended)

    def _skip(self, publisher: Publisher, version: int) -> None:
        failed: Future[Published] = Future()
        reason = f"version {version} was not published: rank {self._rank}: it was interrupted"
        failed.set_exception(PublisherLost(reason))
        self._tell(publisher, PublicationStage.BROKEN_OFF, version, time.monotonic(), failed)
        self._note(str(failed.exception()))

    def _tell(
        self,
        publisher: Publisher,
        stage: PublicationStage,
        version: int | None,
        begun_s: float,
        ended: Future[Published] | None,
    ) -> None:
        at_s, self._shown = time.monotonic(), publisher.consumer_versions
        sent_bytes, unchanged_bytes = 0, 0
        spans: tuple[StageSpan, ...] = ()
        failures: tuple[str, ...] = ()
        if ended is not None and (error := ended.exception()) is not None:
            failures = (str(error),)
        elif ended is not None:
            published = ended.result()
            sent_bytes, unchanged_bytes = published.sent_bytes, published.unchanged_bytes
            failures = tuple(map(str, published.failures))
            spans = spans_of(published, begun_s, at_s) if self._rank < MAX_TRACED else ()
        self._voice.send(
            WeightsObserved(
                self._voice.worker,
                self._rank,
                publisher.generation,
                text(self._folder),
                stage,
                version,
                begun_s,
                at_s,
                sent_bytes,
                unchanged_bytes,
                tuple((text(consumer), shown) for consumer, shown in self._shown[:MAX_LISTED]),
                tuple(map(text, failures[:MAX_FAILURES])),
                spans,
            )
        )

    def flush(self) -> None:
        """Waits until the update in progress is committed or has failed. The wait is bounded by its deadline."""
        if self._under_way is None:
            return
        try:
            for failure in self._under_way.result().failures:
                self._note(f"a consumer was left out: {failure}")
        except KeepstepError as error:
            self._note(str(error))
        self._has_told.wait()
        self._under_way = None

    def interrupt(self) -> None:
        """Breaks off the update in progress after the loss of a rank. Any thread may call it."""
        if self._publisher is not None:
            self._publisher.interrupt()

    def close(self) -> None:
        """Waits for the update in progress, and closes the publisher."""
        self.flush()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _note(self, text: str) -> None:
        print(f"keepstep: publishing weights: {text}", file=sys.stderr, flush=True)


def spans_of(published: Published, begun_s: float, ended_s: float) -> tuple[StageSpan, ...]:
    """Returns the first spans of each stage, in seconds since the update began.

    Spans of a consumer on a machine with another clock are omitted: they do not lie within the update.
    """
    spans = [span for stage in ("h2d", "broadcast") for span in published.spans.first(stage, MAX_REPORTED)]
    spans += [each for each in published.reloads if begun_s <= each.begun_ns / 1e9 <= each.ended_ns / 1e9 <= ended_s]
    return tuple(
        StageSpan(each.stage, each.bucket, each.begun_ns / 1e9 - begun_s, each.ended_ns / 1e9 - begun_s)
        for each in spans
    )
