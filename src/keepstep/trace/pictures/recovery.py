"""The picture of one recovery: a lane for each rank, with time to the right, to scale."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from keepstep.protocol.phases import Phase
from keepstep.trace.pictures.drawing import (
    LabelRow,
    Line,
    Picture,
    Polygon,
    Rectangle,
    Shape,
    Text,
    arrow,
    fitting,
    labelled_box,
    shortened,
    text_width,
)
from keepstep.trace.pictures.lanes import Board, Stretch, board
from keepstep.trace.pictures.shards import States
from keepstep.trace.pictures.timescale import Timescale, duration_text
from keepstep.trace.timeline.describe import loaded_text
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import LABELS, Scene

WIDTH, LEFT, RIGHT = 1000, 112, 984
EDGE = 18
STEPS_Y, BARRIER_Y, FIRST_LANE = 78, 100, 108
HEADING = 30
"""Height of a shard's heading, which shows the state of its parameters."""
INDENT = 10
FEW = 6
"""Up to this many lanes are drawn tall."""
LEAST = 0.7
"""Minimum width of a box in pixels, so that it is visible."""

CUT_WIDTH = 10.0
"""Width of the mark of a cut on either side."""

BOX_LABELS: dict[str, tuple[str, ...]] = {
    "forward": ("forward", "fwd", "F"),
    "backward": ("backward", "bwd", "B"),
    "optimizer": ("optimizer", "opt.", "O"),
    "stop": ("Stop + Clean", "Stop +\nClean", "Stop", "S"),
    "decide": ("Decide", "D"),
    "reset": ("Reset", "R"),
    "restore": ("Restoration + Rollback", "Restoration\n+ Rollback", "Restore"),
    "send": ("Send state", "Send\nstate", "Send"),
    "advance": ("Advance", "Adv."),
    "rewind": ("Rewind",),
    "rollback": ("Rollback", "Roll-\nback"),
    "wait": ("waits", "wait"),
    "silent": ("hangs",),
}
"""Labels of boxes. The longest that fits is shown."""
_WARM = ("warm: has built its model, and waits for a rank", "warm: waits for a rank", "warm")
_STARTING = ("starts and builds its model; the others wait for it", "starts and builds its model", "starts")
WAITED_S = 0.002
"""If the decision came later than this after all survivors had stopped, it had to wait for a spare."""
_LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    **{str(kind): label for kind, label in LABELS.items()},
    "silent": "failed, not detected yet",
}
_WHERE: dict[str, str] = {
    Phase.STARTING: "before",
    Phase.FORWARD: "in the forward of",
    Phase.BACKWARD: "in the backward of",
    Phase.SYNCED: "at the gradient barrier of",
    Phase.OPTIMIZER: "in the update of",
    Phase.UPDATED: "after",
}
_BOLT = ((2, -20), (-9, 3), (-2, 3), (-6, 20), (9, -5), (2, -5), (8, -20))


def draw_recovery(run: Run, number: int) -> Picture:
    """Draws one recovery of a run. The recovery may still be running.

    Args:
        run: the run, after its `Run.poll`.
        number: number of the recovery, from 1.
    """
    scene = run.scenes[number - 1]
    return _Drawing(board(run, scene), scene).picture()


class _Drawing:
    """Builds one picture."""

    def __init__(self, seen: Board, scene: Scene) -> None:
        self.board, self.scene = seen, scene
        edges = {t for lane in seen.lanes for s in lane.stretches for t in (s.begin_s, s.end_s)}
        marks = [*edges, seen.zero_s, *seen.barriers, *(t for lane in seen.lanes for t in lane.failed_s)]
        states = [*seen.states, *(state for band in seen.shards for state in band.states)]
        marks += [at_s for state in states for at_s in state[:2]]
        record = scene.record
        marks += [t for t in (record.begun_s, record.stopped_s, record.decided_s, record.restored_s) if t is not None]
        self.scale = Timescale(seen.begin_s, seen.end_s, LEFT, RIGHT, marks)
        self.lane_height, self.bar = (48, 32) if len(seen.lanes) <= FEW else (28, 22)
        self.tops: list[float] = []
        """Upper edge of each lane."""
        self.headings: list[float] = []
        """Upper edge of each shard's heading."""
        self.lanes_end = self.place_lanes()
        self.spares_begin = self.lanes_end + (24 if seen.num_hidden else 8)
        self.spares_end = self.spares_begin + len(seen.takeovers) * self.lane_height
        self.band_y = self.spares_end + 14
        self.axis_y = self.band_y + (46 if seen.states else 6)
        self.legend_y = self.axis_y + (60 if self.scale.cuts else 44)

    def place_lanes(self) -> float:
        """Sets the upper edges of lanes and headings. Returns the lower edge of the last lane."""
        y, seen = float(FIRST_LANE), self.board
        for num_lanes in [band.num_ranks for band in seen.shards] or [len(seen.lanes)]:
            if seen.shards:
                self.headings.append(y)
                y += HEADING
            self.tops += [y + n * self.lane_height for n in range(num_lanes)]
            y += num_lanes * self.lane_height
        return y

    def picture(self) -> Picture:
        legend, height = self.legend()
        picture = Picture(WIDTH, height, self.sentence(), [Rectangle(0.5, 0.5, WIDTH - 1, height - 1, "panel", 8)])
        shapes = [
            *self.axis(),
            *self.lanes(),
            *self.snapshots(),
            *self.bands(),
            *self.moment(),
            *self.spares(),
            *self.barriers(),
        ]
        shapes += [*self.heading(), *self.steps(), *self.cuts(), *legend]
        # Texts come last, so that no line crosses a word.
        picture.shapes += [shape for shape in shapes if not isinstance(shape, Text)]
        picture.shapes += [shape for shape in shapes if isinstance(shape, Text)]
        picture.shapes += self.bolts()
        return picture

    # ---- words -------------------------------------------------------------------------------------------------------

    def sentence(self) -> str:
        return f"Recovery {self.scene.number}. {_detail(self.scene)}. {_outcome(self.scene, self.board.has_ended)}."

    def heading(self) -> Iterator[Shape]:
        yield Text(EDGE, 30, shortened(_detail(self.scene), "title", RIGHT - EDGE), "title")
        yield Text(EDGE, 50, shortened(_outcome(self.scene, self.board.has_ended), "quiet", RIGHT - EDGE), "quiet")

    def steps(self) -> Iterator[Shape]:
        row = LabelRow(LEFT - 8, WIDTH - 6)
        seen, begin_s, end_s = self.board, *self.board.recovery
        marks: list[tuple[float, float, tuple[str, ...]]] = [(begin_s, end_s, ("recovery",))]
        for step_begin_s, step_end_s, step, again in seen.steps:
            tail = ", again" if again else ""
            marks.append((step_begin_s, step_end_s, (f"step {step}{tail}", f"{step}{tail}", str(step))))
        for since_s, until_s, labels in marks:
            left, right = self.scale.at(since_s), self.scale.at(until_s)
            is_cut_off = since_s <= seen.begin_s and right - left < text_width(labels[0], "head")
            if right - left < 3 or is_cut_off:
                continue
            yield Line(((left + 2, STEPS_Y + 6), (right - 2, STEPS_Y + 6)), "axis")
            for label in labels:
                # A word may be a little wider than its line, but must not touch its neighbours.
                if text_width(label, "head") <= right - left + 24:
                    placed = row.place(Text((left + right) / 2, STEPS_Y, label, "head", "middle"))
                    yield from placed
                    if placed:
                        break

    # ---- lanes -------------------------------------------------------------------------------------------------------

    def middle(self, lane: int) -> float:
        return self.tops[lane] + 0.5 * self.lane_height

    def box(self, lane: int, stretch: Stretch) -> list[Shape]:
        left, right = self.scale.at(stretch.begin_s), self.scale.at(stretch.end_s)
        if right - left < LEAST:
            if stretch.kind in ("wait", "decide", "silent"):
                return []
            right = left + LEAST
        gap = 0.5 if right - left > 4 else 0.0
        lasted = duration_text(stretch.end_s - stretch.begin_s)
        hint = f"rank {self.board.lanes[lane].rank}: {stretch.hint}, {lasted}"
        top = self.middle(lane) - self.bar / 2
        labels: Sequence[str] = BOX_LABELS.get(stretch.kind, ())
        if stretch.kind == "silent":
            hangs = stretch.hint == "hangs"
            labels = (stretch.hint, *([] if hangs else ["not heard of" if stretch.hint.startswith("not") else "lost"]))
        box = Rectangle(left + gap, top, max(right - left - 2 * gap, LEAST), self.bar, stretch.kind, 4, hint)
        return labelled_box(box, labels, self.widest_part(left, right))

    def widest_part(self, left: float, right: float) -> tuple[float, float]:
        """Returns the widest part between the cuts of a stretch, for its label."""
        edges = [left, *(x for x, _ in self.scale.cuts if left < x < right), right]
        parts = [
            (begin + (CUT_WIDTH if begin != left else 0), end - (CUT_WIDTH if end != right else 0))
            for begin, end in itertools.pairwise(edges)
        ]
        return max(parts, key=lambda part: part[1] - part[0])

    def lanes(self) -> Iterator[Shape]:
        for number, lane in enumerate(self.board.lanes):
            y = self.middle(number)
            yield Text(EDGE + (INDENT if self.headings else 0), y + 4, f"rank {lane.rank}", "name")
            if lane.gone is None:
                yield Line(((LEFT, y), (RIGHT, y)), "rail")
            else:
                gone, taken = (self.scale.at(at_s) for at_s in lane.gone)
                yield Line(((LEFT, y), (gone, y)), "rail")
                yield Line(((taken, y), (RIGHT, y)), "rail")
                if taken - gone > 14:
                    yield Line(((gone + 12, y), (taken, y)), "gone")
            for stretch in lane.stretches:
                yield from self.box(number, stretch)
        if self.board.num_hidden:
            more = f"and {self.board.num_hidden:,} more rank{'s' if self.board.num_hidden > 1 else ''}"
            yield Text(EDGE, self.lanes_end + 14, more, "quiet")

    def spares(self) -> Iterator[Shape]:
        rows = {lane.rank: number for number, lane in enumerate(self.board.lanes)}
        for number, takeover in enumerate(self.board.takeovers):
            y = self.spares_begin + (number + 0.5) * self.lane_height
            x = self.scale.at(takeover.at_s)
            yield Text(EDGE, y + 4, "spare", "name")
            yield Line(((LEFT, y), (max(LEFT, x - 1), y)), "warm")
            words = _STARTING if self.has_waited else _WARM
            room = min(x, self.scale.at(self.board.zero_s)) - LEFT - 8
            if label := fitting(words, "quiet", room):
                yield Text(LEFT + 2, y - 8, label, "quiet")
            row = rows[takeover.rank]
            tip = self.middle(row) + self.bar / 2 + 1
            yield from arrow([(x, y), (x, tip)], "takes", "arrow")
            yield from self.takes(x, y, takeover.rank, takeover.worker)

    def takes(self, x: float, y: float, rank: int, worker: int) -> list[Shape]:
        """Returns the label of a spare's arrow: to its right, or to its left if there is no room."""
        labels = (f"takes rank {rank}, as worker {worker}", f"takes rank {rank}")
        if right := fitting(labels, "quiet", RIGHT - x - 9):
            return [Text(x + 9, y + 4, right, "quiet")]
        return [Text(x - 9, y + 16, fitting(labels, "quiet", x - 9 - LEFT), "quiet", "end")]

    @property
    def has_waited(self) -> bool:
        """Whether the decision had to wait for a worker that could take the rank."""
        record = self.scene.record
        if record.stopped_s is None or record.decided_s is None:
            return False
        return record.decided_s - record.stopped_s > WAITED_S

    # ---- what concerns all -------------------------------------------------------------------------------------------

    def barriers(self) -> Iterator[Shape]:
        row = LabelRow(LEFT - 40, WIDTH - 6)
        if not self.scene.record.failures:
            row.place(self.moment_label())
        for at_s in self.board.barriers:
            x = self.scale.at(at_s)
            yield Line(((x, FIRST_LANE - 3), (x, self.lanes_end + 1)), "barrier")
            yield from row.place(Text(x, BARRIER_Y, "gradient barrier", "small", "middle"))

    def moment_label(self) -> Text:
        return Text(self.scale.at(self.board.zero_s), BARRIER_Y, "no rank is lost", "small", "middle")

    def moment(self) -> Iterator[Shape]:
        x = self.scale.at(self.board.zero_s)
        yield Line(((x, FIRST_LANE - 4), (x, self.band_y + 28 if self.board.states else self.axis_y)), "moment")
        if not self.scene.record.failures:
            yield self.moment_label()

    def bolts(self) -> Iterator[Shape]:
        for number, lane in enumerate(self.board.lanes):
            y = self.middle(number)
            for at_s in lane.failed_s:
                x = self.scale.at(at_s)
                size = 1.0 if self.bar > 24 else 0.75
                yield Polygon(tuple((x + dx * size, y + dy * size) for dx, dy in _BOLT), "bolt")

    def cuts(self) -> Iterator[Shape]:
        """Draws each cut as a gap across the picture, labelled with the duration that is left out."""
        top, bottom = FIRST_LANE - 2, self.axis_y + 4
        row = LabelRow(LEFT - 8, WIDTH - 6)
        for x, missing_s in self.scale.cuts:
            num = max(2, int((bottom - top) // 8))
            ys = [top + (bottom - top) * n / num for n in range(num + 1)]
            left = [(x - 5 + (2.5 if n % 2 else -2.5), y) for n, y in enumerate(ys)]
            right = [(x + 5 + (2.5 if n % 2 else -2.5), y) for n, y in enumerate(ys)]
            yield Polygon((*left, *reversed(right)), "gap")
            yield Line(tuple(left), "cut")
            yield Line(tuple(right), "cut")
            for label in (f"{duration_text(missing_s)} left out", duration_text(missing_s)):
                if placed := row.place(Text(x, self.axis_y + 33, label, "small", "middle")):
                    yield from placed
                    break

    def bands(self) -> Iterator[Shape]:
        """Draws the state of the parameters: as one band below the lanes, or in the heading of each shard."""
        if self.board.states:
            yield Text(EDGE, self.band_y + 19, "parameters", "name")
            yield from self.band(self.board.states, self.band_y, 28, self.band_y + 41)
        for band, y in zip(self.board.shards, self.headings, strict=True):
            yield Text(EDGE, y + 18, f"shard {band.number}", "name")
            yield from self.band(band.states, y + 4, HEADING - 9, None)
            if band.gone is not None:
                left, right = (self.scale.at(at_s) for at_s in band.gone)
                box = Rectangle(
                    left, y + 4, max(right - left, LEAST), HEADING - 9, "silent", 4, f"from a {band.origin}"
                )
                labels = [f"no live copy: back from a {band.origin}", "no live copy"]
                yield from labelled_box(box, labels, self.widest_part(left, right))

    def band(self, states: States, y: float, height: float, label_y: float | None) -> Iterator[Shape]:
        """Draws one band. ``label_y`` is the height of the label "being updated"; None: no such label."""
        row = LabelRow(LEFT - 8, WIDTH - 6)
        for begin_s, end_s, step in states:
            left, right = self.scale.at(begin_s), self.scale.at(end_s)
            kind = "between" if step is None else "band"
            hint = "being updated" if step is None else f"consistent: every survivor is at step {step}"
            labels = [f"consistent at step {step}", f"at step {step}", f"{step}"] if step is not None else []
            labels[:0] = [hint] if step is not None and label_y is not None else []
            width = max(right - left - 1, LEAST)
            box = Rectangle(left + 0.5, y, width, height, kind, 4, hint)
            yield from labelled_box(box, labels, self.widest_part(left, right))
            if step is None and label_y is not None:
                yield from row.place(Text((left + right) / 2, label_y, "being updated", "small", "middle"))

    def snapshots(self) -> Iterator[Shape]:
        """Draws the snapshots below the bars of each lane: from start to completion, and when one was loaded."""
        size = 3.5 if self.bar > 24 else 2.5
        for number, lane in enumerate(self.board.lanes):
            y = self.middle(number) + self.bar / 2 + size + 0.5
            for each in lane.snapshots:
                begin_s = max(each.begin_s, self.board.begin_s)
                cut_s = min([self.scene.record.begun_s, *lane.failed_s])
                end_s = cut_s if each.end_s is None and each.begin_s < cut_s else each.end_s or self.board.end_s
                left, right = self.scale.at(begin_s), self.scale.at(max(begin_s, min(end_s, self.board.end_s)))
                if each.begin_s == begin_s:
                    yield Line(((left, y - size), (left, y + size)), "snapshot")
                yield Line(((left, y), (right, y)), "snapshot")
                if each.loaded_s is not None:
                    x = self.scale.at(each.loaded_s)
                    yield from arrow([(right, y), (x, y), (x, y - size - 3)], "loaded", "complete", 2 * size)
                if each.end_s is not None and self.board.begin_s <= each.end_s <= self.board.end_s:
                    yield _diamond(right, y, size + (1.5 if each.loaded_s is not None else 0))

    def axis(self) -> Iterator[Shape]:
        y = self.axis_y
        yield Line(((LEFT, y), (RIGHT, y)), "axis")
        row = LabelRow(LEFT - 40, WIDTH - 6)
        for x, label in self.scale.ticks(self.board.zero_s):
            yield Line(((x, FIRST_LANE - 4), (x, y)), "tick")
            yield Line(((x, y), (x, y + 4)), "axis")
            yield from row.place(Text(x, y + 18, label, "small", "middle"))
        yield Text(EDGE, y + 4, "from the failure", "small")

    def legend(self) -> tuple[list[Shape], float]:
        """Returns the legend and the height of the picture."""
        kinds = {s.kind for lane in self.board.lanes for s in lane.stretches if self.is_seen(s)}
        shapes: list[Shape] = []
        x, y = float(EDGE), float(self.legend_y)
        for kind, label in _LEGEND.items():
            if kind not in kinds:
                continue
            width = 20 + text_width(label, "small") + 14
            if x + width > RIGHT:
                x, y = EDGE, y + 20
            shapes += [Rectangle(x, y - 11, 14, 14, kind, 3), Text(x + 20, y, label, "small")]
            x += width
        if any(lane.snapshots for lane in self.board.lanes):
            label = "snapshot in memory: begun, complete; dotted: the one that was loaded"
            if x + 44 + text_width(label, "small") > RIGHT:
                x, y = EDGE, y + 20
            shapes += [Line(((x, y - 4), (x + 20, y - 4)), "snapshot"), Line(((x, y - 8), (x, y)), "snapshot")]
            shapes += [_diamond(x + 20, y - 4, 3.5), Text(x + 32, y, label, "small")]
        return shapes, y + (16 if shapes else -4)

    def is_seen(self, stretch: Stretch) -> bool:
        return self.scale.at(stretch.end_s) - self.scale.at(stretch.begin_s) >= 2


def _diamond(x: float, y: float, size: float) -> Polygon:
    return Polygon(((x - size, y), (x, y - size), (x + size, y), (x, y + size)), "complete")


def _detail(scene: Scene) -> str:
    """Describes the failure, in a sentence without a full stop."""
    lines = scene.record.detail.strip().splitlines() or ["a recovery"]
    text = lines[0].strip().rstrip(".")
    others = [f.rank for f in scene.record.failures[1:]]
    if others and not text.lower().startswith("ranks"):
        text += f"; rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:8]))} too"
    return _sentence(text)


def _outcome(scene: Scene, has_ended: bool) -> str:
    """Describes where the failure happened, and how the recovery ended."""
    record = scene.record
    failure = next((f for f in record.failures if f.step is not None), None)
    where = f"{_WHERE.get(failure.phase or '', 'in')} step {failure.step}: " if failure else ""
    where = "while it started: " if failure and (failure.step or 0) < 0 else where
    gap_ms = record.milliseconds()["gap"]
    if gap_ms is None:
        if scene.overtaken_s is not None:
            return _sentence(f"{where}another failure interrupted this recovery")
        if has_ended:
            return _sentence(f"{where}the job ended during this recovery")
        is_over = scene.record.restored_s is not None
        return _sentence(f"{where}{'the first step is being computed' if is_over else 'the recovery is in progress'}")
    again = {0: "no step is recomputed", 1: "that step is recomputed"}
    steps = record.steps_recomputed
    tail = f"; {again.get(steps, f'{steps} steps are recomputed')}" if steps is not None else ""
    loaded = f", {text}," if (text := loaded_text(record)) else ""
    return _sentence(f"{where}training continues from step {record.resume_step}{loaded} after {gap_ms:,.0f} ms{tail}")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
