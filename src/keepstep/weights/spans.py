"""When each stage of a transfer was busy with which bucket."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager


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
        """Notes what runs inside as ``stage`` at work on ``bucket``."""
        begun_ns = time.monotonic_ns()
        yield
        self.spans.append(Span(stage, bucket, begun_ns, time.monotonic_ns()))
