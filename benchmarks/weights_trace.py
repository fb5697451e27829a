"""Who was busy when in one update: shares of time, a trace for chrome://tracing or Perfetto, and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from keepstep.trace.pictures.chrome import ChromeTrace, Track
from keepstep.trace.pictures.drawing import Line, Picture, Rectangle, Shape, Text, labelled_box, text_width
from keepstep.trace.pictures.timescale import Timescale
from keepstep.trace.targets import replacing, write_whole

STAGES = {"h2d": "H2D", "broadcast": "Broadcast", "reload": "Reload"}
PICTURED_BUCKETS = 12


class Work(NamedTuple):
    """One stage of one device at work on one bucket, on the monotonic clock."""

    device: int
    stage: str
    bucket: int
    begun_ns: int
    ended_ns: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One update: from its begin until the last process had its end."""

    begun_ns: int
    ended_ns: int
    works: tuple[Work, ...]

    @property
    def devices(self) -> list[int]:
        """Those that did something."""
        return sorted({work.device for work in self.works})

    def source_of(self, bucket: int) -> int:
        """The device that gathered it."""
        return next(work.device for work in self.works if (work.stage, work.bucket) == ("h2d", bucket))

    def busy_share(self, stage: str) -> float:
        """The share of the update in which a stage was busy, on average over the devices."""
        busy_ns = sum(work.ended_ns - work.begun_ns for work in self.works if work.stage == stage)
        return busy_ns / len(self.devices) / (self.ended_ns - self.begun_ns)

    def overlap(self, num_stages: int, device: int | None = None) -> float:
        """The share of the update in which at least so many of the three stages were busy.

        Args:
            num_stages: how many.
            device: on which they were busy; None: each may be busy on any.
        """
        works = [work for work in self.works if device is None or work.device == device]
        return at_once_ns(works, num_stages) / (self.ended_ns - self.begun_ns)


def at_once_ns(works: Iterable[Work], num_stages: int) -> int:
    """How long at least so many different stages were busy at the same time."""
    turns = sorted([(work.begun_ns, 1, work.stage) for work in works] + [(w.ended_ns, -1, w.stage) for w in works])
    busy = dict.fromkeys(STAGES, 0)
    total_ns, before_ns = 0, 0
    for at_ns, change, stage in turns:
        if sum(count > 0 for count in busy.values()) >= num_stages:
            total_ns += at_ns - before_ns
        busy[stage] += change
        before_ns = at_ns
    return total_ns


def write_trace(path: Path, timeline: Timeline, title: str) -> Path:
    """Writes the trace, and the picture next to it; returns the picture's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        write_chrome_trace(ChromeTrace(file, timeline.begun_ns, {"title": title}), timeline)
    picture = path.with_suffix(".svg")
    write_whole(picture, draw(timeline, title).svg().encode())
    return picture


def write_chrome_trace(trace: ChromeTrace, timeline: Timeline) -> None:
    """A process for each device, a track for each stage."""
    for device in timeline.devices:
        trace.process(device, f"device {device}")
        for number, name in enumerate(STAGES.values()):
            trace.track(Track(device, number), name)
    for work in sorted(timeline.works, key=lambda work: work.begun_ns):
        name = f"{STAGES[work.stage]} b{work.bucket}"
        track = Track(work.device, [*STAGES].index(work.stage))
        args = {"bucket": work.bucket, "source": timeline.source_of(work.bucket)}
        trace.complete(track, name, work.stage, (work.begun_ns, work.ended_ns), args)
    trace.end()


# ---- the picture ----------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 1200, 176, 1180
FIRST_LANE, ROW_HEIGHT, BAR_HEIGHT = 78, 26, 22
LANE_HEIGHT = len(STAGES) * ROW_HEIGHT + 18


def draw(timeline: Timeline, title: str) -> Picture:
    """The first buckets of an update: a lane for each device, in it a row for each stage, time to the right."""
    works = [work for work in timeline.works if work.bucket < PICTURED_BUCKETS]
    num_buckets = 1 + max(work.bucket for work in timeline.works)
    end_ns = max(work.ended_ns for work in works)
    height = FIRST_LANE + LANE_HEIGHT * len(timeline.devices) + 62
    scale = Timescale(timeline.begun_ns / 1e9, end_ns / 1e9, LEFT, RIGHT)
    what = f"{title}: in each device's lane, boxes for H2D, Broadcast and Reload of each bucket, side by side in time."
    shapes: list[Shape] = [
        Rectangle(0.5, 0.5, WIDTH - 1, height - 1, "panel", 8),
        Text(20, 28, title, "title"),
        *_legend(),
    ]
    bottom = FIRST_LANE + len(timeline.devices) * LANE_HEIGHT - 6
    for x, label in scale.ticks(timeline.begun_ns / 1e9):
        shapes += [
            Line(((x, FIRST_LANE - 4), (x, bottom)), "tick"),
            Text(x, bottom + 16, label, "small", "middle"),
        ]
    for lane, device in enumerate(timeline.devices):
        shapes.append(Text(20, _middle(lane, 1) + 4, f"device {device}", "name"))
        for row, (stage, name) in enumerate(STAGES.items()):
            y = _middle(lane, row)
            shapes += [Text(94, y + 4, name, "quiet"), Line(((LEFT, y), (RIGHT, y)), "rail")]
            for work in works:
                if (work.device, work.stage) == (device, stage):
                    begin, end = scale.at(work.begun_ns / 1e9), scale.at(work.ended_ns / 1e9)
                    box = Rectangle(begin, y - BAR_HEIGHT / 2, max(end - begin - 0.6, 0.8), BAR_HEIGHT, stage, 3)
                    shapes += labelled_box(box, _labels(stage, work.bucket, timeline.source_of(work.bucket)))
    note = (
        f"The first {min(PICTURED_BUCKETS, num_buckets)} of {num_buckets} buckets, to scale, as measured. “src 1”: "
        "the bucket comes from device 1. The reload runs in the consumer's process."
    )
    return Picture(WIDTH, height, what, [*shapes, Text(20, height - 16, note, "quiet")])


def _middle(lane: int, row: int) -> int:
    return FIRST_LANE + lane * LANE_HEIGHT + row * ROW_HEIGHT + ROW_HEIGHT // 2


def _labels(stage: str, bucket: int, source: int) -> list[str]:
    """What a box can say, the longest first."""
    match stage:
        case "broadcast":
            return [f"src {source} · b{bucket}", f"b{bucket}", f"{bucket}"]
        case _:
            return [f"{STAGES[stage]} b{bucket}", f"b{bucket}", f"{bucket}"]


def _legend() -> list[Shape]:
    drawn: list[Shape] = []
    x = float(LEFT)
    for stage, what in (
        ("h2d", "host memory to H2D buffer"),
        ("broadcast", "consumers are told where it is"),
        ("reload", "source's H2D buffer to the consumer's weights"),
    ):
        label = f"{STAGES[stage]}: {what}"
        drawn += [Rectangle(x, 44, 14, 14, stage, 3), Text(x + 20, 56, label, "quiet")]
        x += 44 + text_width(label, "quiet")
    return drawn
