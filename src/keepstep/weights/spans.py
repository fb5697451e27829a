"""The times at which each stage of a transfer worked on each bucket."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_REPORTED = 16
"""Number of spans per stage in a report. The controller keeps the reports in memory, so a trace of a job has the first
buckets of an update."""
MAX_TRACED = 16
"""Ranks below this number report their spans."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One stage at work on one bucket. Times on the monotonic clock, which all processes of a machine share."""

    stage: str
    bucket: int
    begun_ns: int
    ended_ns: int


class Spans:
    """The spans of one process's latest update. Each stage adds its own from one thread."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def of(self, stage: str, bucket: int) -> Iterator[None]:
        """Records the duration of the block as a span of ``stage`` on ``bucket``."""
        begun_ns = time.monotonic_ns()
        yield
        self.spans.append(Span(stage, bucket, begun_ns, time.monotonic_ns()))

    def first(self, stage: str, num: int) -> list[Span]:
        """The first ``num`` spans of a stage."""
        return list(itertools.islice((span for span in self.spans if span.stage == stage), num))
