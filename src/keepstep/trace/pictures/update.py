"""The picture of an update of published weights: a lane for each device, with a row for each stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keepstep.trace.pictures.chrome import STAGES, Work
from keepstep.trace.pictures.drawing import Line, Picture, Rectangle, Shape, Text, labelled_box, text_width
from keepstep.trace.pictures.timescale import Timescale
from keepstep.trace.weights.publications import Publication, gigabytes

PICTURED_BUCKETS = 12
MAX_DEVICES = 16
"""Maximum number of drawn devices, those with the lowest ranks."""
WIDTH, LEFT, RIGHT = 1200, 176, 1180
FIRST_LANE, ROW_HEIGHT, BAR_HEIGHT = 78, 26, 22
LANE_HEIGHT = len(STAGES) * ROW_HEIGHT + 18


def draw_last_update(publication: Publication) -> Picture:
    """Draws the last committed update of a publication, which must have spans."""
    devices = publication.last_devices
    begun_s = min(device.committed_span_s[0] for device in devices.values())
    works = [
        Work(rank, span.stage, span.bucket, round((since_s + span.begin_s) * 1e9), round((since_s + span.end_s) * 1e9))
        for rank, device in devices.items()
        for since_s in (device.committed_span_s[0] - begun_s,)
        for span in device.spans
    ]
    what = f"Version {publication.version}: {gigabytes(publication.last_bytes)}"
    plural = "" if len(devices) == 1 else "s"
    return draw_update(works, 0, f"{what} from {len(devices)} device{plural}")


def draw_update(works: Sequence[Work], begun_ns: int, title: str) -> Picture:
    """Draws the first buckets of an update, with time to the right.

    Args:
        works: the works of all devices; at least one.
        begun_ns: time at the left edge.
        title: title of the picture.
    """
    buckets = list(dict.fromkeys(work.bucket for work in sorted(works, key=lambda work: work.begun_ns)))
    shown = set(buckets[:PICTURED_BUCKETS])
    devices = sorted({work.device for work in works})[:MAX_DEVICES]
    sources = {work.bucket: work.device for work in works if work.stage == "h2d"}
    works = [work for work in works if work.bucket in shown and work.device in devices]
    end_ns = max(work.ended_ns for work in works)
    height = FIRST_LANE + LANE_HEIGHT * len(devices) + 62
    scale = Timescale(begun_ns / 1e9, end_ns / 1e9, LEFT, RIGHT)
    what = f"{title}: in each device's lane, boxes for H2D, Broadcast and Reload of each bucket, side by side in time."
    shapes: list[Shape] = [
        Rectangle(0.5, 0.5, WIDTH - 1, height - 1, "panel", 8),
        Text(20, 28, title, "title"),
        *_legend(),
        *_axis(scale, begun_ns, FIRST_LANE + len(devices) * LANE_HEIGHT - 6),
    ]
    for lane, device in enumerate(devices):
        shapes.append(Text(20, _middle(lane, 1) + 4, f"device {device}", "name"))
        for row, (stage, name) in enumerate(STAGES.items()):
            y = _middle(lane, row)
            shapes += [Text(94, y + 4, name, "quiet"), Line(((LEFT, y), (RIGHT, y)), "rail")]
            own = (work for work in works if (work.device, work.stage) == (device, stage))
            shapes += _boxes(own, y, scale, sources)
    note = (
        f"The first {len(shown)} buckets, to scale, as measured. “src 1”: the bucket comes from device 1. "
        "The reload runs in the consumer's process."
    )
    return Picture(WIDTH, height, what, [*shapes, Text(20, height - 16, note, "quiet")])


def _boxes(works: Iterable[Work], y: int, scale: Timescale, sources: dict[int, int]) -> Iterable[Shape]:
    for work in works:
        begin, end = scale.at(work.begun_ns / 1e9), scale.at(work.ended_ns / 1e9)
        box = Rectangle(begin, y - BAR_HEIGHT / 2, max(end - begin - 0.6, 0.8), BAR_HEIGHT, work.stage, 3)
        labels = [f"b{work.bucket}", f"{work.bucket}"]
        if work.stage != "broadcast":
            labels.insert(0, f"{STAGES[work.stage]} b{work.bucket}")
        elif work.bucket in sources:
            labels.insert(0, f"src {sources[work.bucket]} · b{work.bucket}")
        yield from labelled_box(box, labels)


def _axis(scale: Timescale, begun_ns: int, bottom: int) -> Iterable[Shape]:
    for x, label in scale.ticks(begun_ns / 1e9):
        yield Line(((x, FIRST_LANE - 4), (x, bottom)), "tick")
        yield Text(x, bottom + 16, label, "small", "middle")


def _middle(lane: int, row: int) -> int:
    return FIRST_LANE + lane * LANE_HEIGHT + row * ROW_HEIGHT + ROW_HEIGHT // 2


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
