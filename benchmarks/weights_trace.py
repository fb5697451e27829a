"""Who was busy when in one update: shares of time, a trace for chrome://tracing or Perfetto, and a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STAGES = {"h2d": "H2D", "broadcast": "Broadcast", "reload": "Reload"}
NS_PER_MS = 1_000_000
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
    trace = chrome_trace(timeline, title)
    events = ",\n".join(json.dumps(event) for event in trace.pop("traceEvents"))  # one a line
    path.write_text(f'{json.dumps(trace)[:-1]}, "traceEvents": [\n{events}\n]}}\n', encoding="utf-8")
    picture = path.with_suffix(".svg")
    picture.write_text(draw(timeline, title), encoding="utf-8")
    return picture


def chrome_trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """A process for each device, a track for each stage; in the format that chrome://tracing and Perfetto read."""
    events: list[dict[str, Any]] = []
    for device in timeline.devices:
        events.append({"name": "process_name", "ph": "M", "pid": device, "args": {"name": f"device {device}"}})
        for track, name in enumerate(STAGES.values()):
            at = {"pid": device, "tid": track}
            events.append({"name": "thread_name", "ph": "M", **at, "args": {"name": name}})
            events.append({"name": "thread_sort_index", "ph": "M", **at, "args": {"sort_index": track}})
    for work in sorted(timeline.works, key=lambda work: work.begun_ns):
        source = timeline.source_of(work.bucket)
        events.append(
            {
                "name": f"{STAGES[work.stage]} b{work.bucket}",
                "cat": work.stage,
                "ph": "X",
                "pid": work.device,
                "tid": [*STAGES].index(work.stage),
                "ts": (work.begun_ns - timeline.begun_ns) / 1000,
                "dur": (work.ended_ns - work.begun_ns) / 1000,
                "args": {"bucket": work.bucket, "source": source},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}


# ---- the picture ----------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 1200, 176, 1180
FIRST_LANE, ROW_HEIGHT, BAR_HEIGHT = 78, 26, 22
LANE_HEIGHT = len(STAGES) * ROW_HEIGHT + 18
LETTER_WIDTH = 6.2
"""Of the labels' font, about; a label that is wider than its box is left out."""

STYLE = """
  .panel { fill: #ffffff; stroke: #d0d7de; }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .name { font-weight: 600; }
  .title { font-size: 15px; font-weight: 600; }
  .quiet { fill: #59636e; font-size: 12px; }
  .on { fill: #ffffff; font-size: 11px; text-anchor: middle; }
  .middle { text-anchor: middle; }
  .rail, .tick { stroke: #d0d7de; stroke-width: 1; }
  .h2d { fill: #0969da; } .broadcast { fill: #8250df; } .reload { fill: #1a7f37; }
  @media (prefers-color-scheme: dark) {
    .panel { fill: #0d1117; stroke: #3d444d; }
    text { fill: #f0f6fc; } .quiet { fill: #9198a1; } .on { fill: #ffffff; }
    .rail, .tick { stroke: #3d444d; }
    .h2d { fill: #1f6feb; } .broadcast { fill: #8957e5; } .reload { fill: #238636; }
  }
"""


def draw(timeline: Timeline, title: str) -> str:
    """The first buckets of an update as SVG: a lane for each device, in it a row for each stage, time to the right."""
    works = [work for work in timeline.works if work.bucket < PICTURED_BUCKETS]
    num_buckets = 1 + max(work.bucket for work in timeline.works)
    end_ns = max(work.ended_ns for work in works)
    height = FIRST_LANE + LANE_HEIGHT * len(timeline.devices) + 62
    scale = (RIGHT - LEFT) / (end_ns - timeline.begun_ns)

    def across(at_ns: int) -> float:
        return LEFT + (at_ns - timeline.begun_ns) * scale

    parts = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="panel"/>',
        _text(20, 28, title, "title"),
        *_legend(),
        *_ticks((end_ns - timeline.begun_ns) / NS_PER_MS, len(timeline.devices)),
    ]
    for lane, device in enumerate(timeline.devices):
        parts.append(_text(20, _middle(lane, 1) + 4, f"device {device}", "name"))
        for row, (stage, name) in enumerate(STAGES.items()):
            y = _middle(lane, row)
            parts += [_text(94, y + 4, name, "quiet"), f'<path class="rail" d="M {LEFT} {y} H {RIGHT}"/>']
            for work in works:
                if (work.device, work.stage) == (device, stage):
                    source = timeline.source_of(work.bucket)
                    labels = _labels(stage, work.bucket, source)
                    parts += _box(across(work.begun_ns), across(work.ended_ns), y, stage, labels)
    parts.append(
        _text(
            20,
            height - 16,
            f"The first {min(PICTURED_BUCKETS, num_buckets)} of {num_buckets} buckets, to scale, as measured. “src 1”: "
            "the bucket comes from device 1. The reload runs in the consumer's process.",
            "quiet",
        )
    )
    what = f"{title}: in each device's lane, boxes for H2D, Broadcast and Reload of each bucket, side by side in time."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="what">\n'
        f'<title id="what">{what}</title>\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _middle(lane: int, row: int) -> int:
    return FIRST_LANE + lane * LANE_HEIGHT + row * ROW_HEIGHT + ROW_HEIGHT // 2


def _text(x: float, y: float, content: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:g}" class="{kind}">{content}</text>'


def _labels(stage: str, bucket: int, source: int) -> list[str]:
    """What a box can say, the longest first."""
    match stage:
        case "broadcast":
            return [f"src {source} · b{bucket}", f"b{bucket}", f"{bucket}"]
        case _:
            return [f"{STAGES[stage]} b{bucket}", f"b{bucket}", f"{bucket}"]


def _box(begin: float, end: float, y: int, stage: str, labels: Sequence[str]) -> list[str]:
    width = max(end - begin - 0.6, 0.8)
    drawn = [
        f'<rect x="{begin:.1f}" y="{y - BAR_HEIGHT // 2}" width="{width:.1f}" height="{BAR_HEIGHT}" '
        f'rx="{min(3.0, width / 3):.1f}" class="{stage}"/>'
    ]
    for label in labels:
        if LETTER_WIDTH * len(label) + 4 <= width:
            drawn.append(_text(begin + width / 2, y + 4, label, "on"))
            break
    return drawn


def _legend() -> list[str]:
    drawn = []
    x = LEFT
    for stage, what in (
        ("h2d", "host memory to H2D buffer"),
        ("broadcast", "source's H2D buffer to IPC buffer"),
        ("reload", "IPC buffer to the consumer's weights"),
    ):
        drawn.append(f'<rect x="{x}" y="44" width="14" height="14" rx="3" class="{stage}"/>')
        drawn.append(_text(x + 20, 56, f"{STAGES[stage]}: {what}", "quiet"))
        x += 48 + round(LETTER_WIDTH * 1.1 * len(f"{STAGES[stage]}: {what}"))
    return drawn


def _ticks(length_ms: float, num_lanes: int) -> list[str]:
    step = next(
        step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 1e9) if length_ms / step <= 12
    )
    bottom = FIRST_LANE + num_lanes * LANE_HEIGHT - 6
    drawn = []
    for number in range(int(length_ms / step) + 1):
        x = LEFT + (RIGHT - LEFT) * number * step / length_ms
        drawn.append(f'<path class="tick" d="M {x:.1f} {FIRST_LANE - 4} V {bottom}"/>')
        drawn.append(_text(x, bottom + 16, f"{number * step:g} ms", "quiet middle"))
    return drawn
