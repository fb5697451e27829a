"""The stages of one update over time: their shares, and a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from keepstep.trace.perfetto import STAGES, ChromeTrace, Work, write_update
from keepstep.trace.targets import replacing


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One update, from its begin until it has ended in the last process."""

    begun_ns: int
    ended_ns: int
    works: tuple[Work, ...]

    @property
    def devices(self) -> list[int]:
        """The devices that have run a stage."""
        return sorted({work.device for work in self.works})

    def busy_share(self, stage: str) -> float:
        """Returns the share of the update in which a stage was busy, on average over the devices."""
        busy_ns = sum(work.ended_ns - work.begun_ns for work in self.works if work.stage == stage)
        return busy_ns / len(self.devices) / (self.ended_ns - self.begun_ns)

    def overlap(self, num_stages: int, device: int | None = None) -> float:
        """Returns the share of the update in which at least ``num_stages`` of the three stages were busy.

        Args:
            num_stages: the least number of busy stages.
            device: the device on which they were busy; None: each on any device.
        """
        works = [work for work in self.works if device is None or work.device == device]
        return at_once_ns(works, num_stages) / (self.ended_ns - self.begun_ns)


def at_once_ns(works: Iterable[Work], num_stages: int) -> int:
    """Returns how long at least ``num_stages`` different stages were busy at the same time."""
    turns = sorted([(work.begun_ns, 1, work.stage) for work in works] + [(w.ended_ns, -1, w.stage) for w in works])
    busy = dict.fromkeys(STAGES, 0)
    total_ns, before_ns = 0, 0
    for at_ns, change, stage in turns:
        if sum(count > 0 for count in busy.values()) >= num_stages:
            total_ns += at_ns - before_ns
        busy[stage] += change
        before_ns = at_ns
    return total_ns


def write_trace(path: Path, timeline: Timeline, title: str) -> None:
    """Writes a trace with a process for each device and a track for each stage."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pids = {device: device for device in timeline.devices}
    with replacing(path) as file:
        trace = ChromeTrace(file, timeline.begun_ns, {"title": title})
        for device in pids:
            trace.process(device, f"device {device}")
        write_update(trace, pids, timeline.works, {})
        trace.end()
