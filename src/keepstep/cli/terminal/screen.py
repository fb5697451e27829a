"""One frame of `keepstep top`."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from keepstep.cli.terminal.places import DONE, LOST, Places, ScreenPlace
from keepstep.protocol.messages import printable
from keepstep.protocol.recovery import Stage
from keepstep.trace.timeline.describe import loaded_text
from keepstep.trace.timeline.events import ControlEvent
from keepstep.trace.timeline.run import News, Run
from keepstep.trace.timeline.scene import LABELS, Scene, SceneSpan, SpanKind
from keepstep.trace.timeline.stragglers import NAMES
from keepstep.trace.weights.publications import describe_publication, publication_text

# The colours of the dashboard, as close as a terminal has them.
PHASE_STYLES = {
    "starting": "cyan",
    "forward": "blue",
    "backward": "green",
    "synced": "bright_black",
    "optimizer": "dark_orange",
    "between steps": "bright_black",
    LOST: "bold white on red",
    DONE: "bright_black",
}
SPAN_STYLES = {
    SpanKind.STOP: "white",
    SpanKind.DECIDE: "yellow",
    SpanKind.RESET: "cyan",
    SpanKind.RESTORE: "magenta",
    SpanKind.SEND: "bright_magenta",
    SpanKind.ADVANCE: "dark_orange",
    SpanKind.REWIND: "bright_blue",
    SpanKind.ROLLBACK: "bright_cyan",
    SpanKind.WAIT: "bright_black",
}
STATE_STYLES = PHASE_STYLES | {str(kind): style for kind, style in SPAN_STYLES.items()}
STAGE_STYLES = {
    Stage.STARTING: "cyan",
    Stage.TRAINING: "bold green",
    Stage.STOPPING: "bold red",
    Stage.RECOVERING: "bold yellow",
    Stage.RESCUING: "bold red",
}
LEVEL_STYLES = {"info": "default", "warning": "yellow", "error": "red"}
MAX_RECOVERY_ROWS = 6
MIN_EVENTS = 5
BARS = " ▁▂▃▄▅▆▇█"
RATE_COLUMNS = 24
_OWN = tuple(NAMES.values())[:3]
"""Names of the phases whose own times are shown."""
BAR = "own time"
SHARD = "shard"
COLUMNS = ("rank", SHARD, "phase", "step", *_OWN, BAR, "pid", "node", "")
FIXED_COLUMNS = 94
"""Total width of a rank's columns without the bar and the node."""
MIN_BAR_COLUMNS = 8
FOLDED_WIDE = 125
"""Minimum width at which the line of a node also shows the slowest times of its ranks."""
Row = list[RenderableType]


class OwnBar:
    """Draws the own times of a rank as a stacked bar, on the same scale for all ranks."""

    def __init__(self, slowest_ms: float, num_columns: int) -> None:
        self._slowest_ms = slowest_ms
        self.num_columns = num_columns if num_columns >= MIN_BAR_COLUMNS else 0

    def draw(self, medians: np.ndarray) -> Text:
        """Draws the bar of one rank from its median times in milliseconds."""
        bar, begin = Text(), 0
        for name, end_ms in zip(_OWN, np.nancumsum(medians[: len(_OWN)]).tolist(), strict=True):
            end = round(end_ms / self._slowest_ms * self.num_columns) if self._slowest_ms else 0
            bar.append("█" * (end - begin), style=PHASE_STYLES[name])
            begin = end
        return bar


class Lanes:
    """Draws what each rank did in a recovery over time, from the failure on."""

    def __init__(
        self, scene: Scene, spans: Sequence[SceneSpan], lost: dict[int, float], until_s: float, num_columns: int
    ) -> None:
        self._spans = spans
        self._lost = lost
        self._restored_s = scene.record.restored_s
        self._until_s = until_s
        self._column_s = (until_s - scene.since_s) / num_columns
        self._times_s = [scene.since_s + (column + 0.5) * self._column_s for column in range(num_columns)]

    def draw(self, rank: int) -> Text:
        """Draws the lane of one rank."""
        own, lane = [span for span in self._spans if span.rank == rank], Text()
        for at_s in self._times_s:
            # The span with the largest part of the column wins, so a span shorter than a column can still be seen.
            now = max(own, key=lambda span: self._overlap_s(span, at_s), default=None)
            if now is not None and self._overlap_s(now, at_s) > 0:
                lane.append("█", style=SPAN_STYLES[now.kind])
            elif self._restored_s is not None and at_s >= self._restored_s:
                lane.append("░", style="bright_black")
            elif at_s >= self._lost.get(rank, self._until_s):
                lane.append("×", style="red")
            else:
                lane.append("·", style="bright_black")
        return lane

    def _overlap_s(self, span: SceneSpan, at_s: float) -> float:
        """Returns the overlap in seconds of a span with the column around a time."""
        end_s = self._until_s if span.end_s is None else span.end_s
        return min(end_s, at_s + self._column_s / 2) - max(span.begin_s, at_s - self._column_s / 2)

    def legend(self) -> Text:
        """Returns a legend of the colours in use."""
        legend = Text(" " * 12)
        if self._lost:
            legend.append("× ", style="red").append("lost  ", style="bright_black")
        for kind in SpanKind:
            if any(span.kind is kind for span in self._spans):
                legend.append("█ ", style=SPAN_STYLES[kind]).append(f"{LABELS[kind]}  ", style="bright_black")
        return legend.append("░ first step" if self._restored_s is not None else "", style="bright_black")


class Screen:
    """Draws a run, and keeps itself up to date with the run's news."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._places = Places(run)

    def take(self, news: News) -> None:
        """Processes the news of a poll."""
        self._places.take(news)

    def draw(self, width: int, height: int) -> RenderableType:
        """Draws one frame.

        Args:
            width: columns of the terminal.
            height: lines of the terminal.
        """
        places = self._places.all()
        header = self._header(width, places)
        room = height - len(header)
        num_recovery = min(len(places), MAX_RECOVERY_ROWS if height >= 30 else 2)
        recovery = self._recovery(width, num_recovery) if self._run.scenes else []
        room -= len(recovery)
        room_for_ranks = max(4, room - MIN_EVENTS - 1)
        ranks, num_rank_lines = self._ranks(width, room_for_ranks, places)
        room -= num_rank_lines
        return Group(*header, ranks, *recovery, *self._events(width, max(0, room)))

    # ---- the header -------------------------------------------------------------------------------------------------

    def _header(self, width: int, places: Sequence[ScreenPlace]) -> list[RenderableType]:
        run, job = self._run, self._run.job
        title = Text("keepstep top", style="bold")
        title.append(f"  {' '.join(run.info.command)}", style="default")
        right = Text(
            f"{_clock(run.now_s - run.info.started_ns / 1e9)}  run {run.info.run}  q quits", style="bright_black"
        )
        spares = job.roster.num_ready_spares
        wanted = job.settings.num_spares
        num_lost = sum(len(scene.record.failures) for scene in run.scenes)
        items = [self._stage(), _item("generation", job.generation), _item("step", run.pace.step)]
        rate, goodput = run.pace.steps_per_s(round(run.now_s * 1e9)), run.goodput
        items.append(_item("steps/s", "-" if rate is None else f"{rate:.3g}"))
        items.append(Text(self._rate_bars().lstrip(), style="green"))
        items.append(_item("goodput", "-" if goodput is None else f"{goodput:.1%}"))
        is_short = spares < wanted and job.stage in (Stage.TRAINING, Stage.STOPPING, Stage.RECOVERING)
        items.append(_item("spares", f"{spares} of {wanted}", "yellow" if is_short else "bold"))
        if run.snapshots.num_taken:
            newest = run.snapshots.newest(job.settings.world_size)
            items.append(_item("newest snapshot", "-" if newest is None else f"step {newest}"))
            if num_undoubled := len(run.snapshots.undoubled):
                items.append(_item("ranks without a second copy", num_undoubled, "bold yellow"))
        items += [_item("recoveries", len(run.scenes)), _item("lost ranks", num_lost)]
        if num_stragglers := sum(bool(place.stragglings) for place in places):
            items.append(_item("stragglers", num_stragglers, "bold yellow"))
        return [_line(_spread(title, right, width), width), *_packed(items, width), *self._weights(width), Text()]

    def _weights(self, width: int) -> list[Text]:
        """Returns a line for each folder in which the run publishes weights."""
        run = self._run
        described = (describe_publication(each, run.now_s) for each in run.publications.found.values())
        return [_line(Text(publication_text(each)), width) for each in described]

    def _stage(self) -> Text:
        run = self._run
        if (ended := run.info.ended) is not None:
            style = "bold red" if ended.exit_code else "bold green"
            return Text(f"ended, exit code {ended.exit_code}", style=style)
        if not run.is_alive:
            return Text(f"its launcher is gone ({run.job.stage})", style="bold red")
        return Text(str(run.job.stage), style=STAGE_STYLES.get(run.job.stage, "default"))

    def _rate_bars(self) -> str:
        """Returns a bar for the completed steps of each recent interval."""
        pace, run = self._run.pace, self._run
        num_whole = max(0, round(run.now_s * 1e9) - run.info.started_ns) // pace.bucket_ns
        counts = (pace.buckets + [0] * RATE_COLUMNS)[:num_whole][-RATE_COLUMNS:]
        most = max(counts, default=0)
        # An interval without a completed step is a gap; one with a single step is still a line.
        return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts) if most else ""

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def _ranks(self, width: int, room: int, places: list[ScreenPlace]) -> tuple[Table, int]:
        """Returns the table of ranks and its number of lines."""
        is_folded = len(places) + 1 > room
        shard_columns = 7 if self._run.shards else 0
        medians = self._run.stragglers.medians_ms([place.rank for place in places])
        slowest_ms = float(np.nanmax(np.nansum(medians[:, : len(_OWN)], axis=1), initial=0.0))
        node_columns = min(16, max(4, *(len(place.node) for place in places)))
        bar = OwnBar(slowest_ms, 0 if is_folded else min(24, width - FIXED_COLUMNS - shard_columns - node_columns))
        hidden = set() if bar.num_columns else {BAR}
        if is_folded or not self._run.shards:
            hidden.add(SHARD)
        if is_folded and width < FOLDED_WIDE:
            hidden |= {"pid", *_OWN}
        table = _empty_table(hidden, bar.num_columns, node_columns, is_folded)
        if is_folded:
            nodes = self._node_rows(places, medians)
            bad = sorted((place for place in places if place.trouble), key=lambda place: (-place.trouble, place.rank))
            places = bad[: max(1, room - 1 - min(len(nodes), max(1, room // 2)))]
            others = _shortened(nodes, room - 1 - len(places))
        else:
            others = self._spare_rows()[: room - 1 - len(places)]
        rows = [_rank_row(place, medians[place.rank], bar) for place in places] + others
        for row in rows:
            table.add_row(*(cell for cell, name in zip(row, COLUMNS, strict=True) if name not in hidden))
        return table, 1 + len(rows)

    def _spare_rows(self) -> list[Row]:
        rows: list[Row] = []
        for spare in sorted(self._run.job.roster.spares(), key=lambda spare: spare.worker):
            state = "ready" if spare.ready is not None else self._places.phase_of(spare.worker)
            cell = Text(state, "bright_black" if spare.ready is not None else STATE_STYLES.get(state, "default"))
            rows.append(["spare", "", cell, "", "", "", "", "", _number(spare.pid), spare.node, ""])
        return rows

    def _node_rows(self, places: Sequence[ScreenPlace], medians: np.ndarray) -> list[Row]:
        """Returns a row for each node with the states of its ranks and their slowest times. Nodes with ranks in trouble
        come first."""
        by_node: dict[str, list[ScreenPlace]] = {}
        for place in places:
            by_node.setdefault(place.node, []).append(place)
        rows: list[Row] = []
        for node, there in sorted(by_node.items(), key=lambda each: -max(place.trouble for place in each[1])):
            states = Counter(place.state for place in there)
            cells = [Text(f"{num} {state}", STATE_STYLES.get(state, "default")) for state, num in states.most_common(2)]
            steps = [place.step for place in there if place.step is not None]
            span = "-" if not steps else f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"
            own_ms = medians[[place.rank for place in there]]
            worst = [f"≤{_ms(np.nanmax(own_ms[:, at], initial=0.0))}" for at in range(len(_OWN))]
            ranks = Text(_ranges([place.rank for place in there]))
            rows.append([ranks, "", Text(" ").join(cells), span, *worst, "", "", node, f"{len(there)} ranks"])
        return rows

    # ---- the recovery -----------------------------------------------------------------------------------------------

    def _recovery(self, width: int, num_rows: int) -> list[RenderableType]:
        """Draws the current or last recovery: its parts, and a lane for each rank."""
        scene, run = self._run.scenes[-1], self._run
        record = scene.record
        is_current = scene.end_s is None and run.is_alive and run.job.stage is not Stage.ENDED
        title = Text.assemble(
            ("recovery under way" if is_current else "last recovery", "bold yellow" if is_current else "bold"),
            (f"  {_about(scene, run, is_current)}", "bright_black"),
            f"  {_flat(record.detail)}",
            (f"; {loaded}" if (loaded := loaded_text(record)) else "", "bright_black"),
        )
        parts = Text("  ")
        for name, ms in record.milliseconds().items():
            if ms is not None:
                parts.append(f"{name} ", style="bright_black").append(_duration(ms), style="bold").append("  ")
        if record.resume_step is not None:
            parts.append(f"from step {record.resume_step}", style="bright_black")
        spans = scene.spans()
        lost = {failure.rank: failure.since_s for failure in record.failures}
        ranks = sorted({*lost, *(span.rank for span in spans)}, key=lambda rank: (rank not in lost, rank))[:num_rows]
        lanes = Lanes(scene, spans, lost, scene.end_s if scene.end_s is not None else run.now_s, max(10, width - 12))
        rows = [Text(f"  rank {rank:<4} ").append_text(lanes.draw(rank)) for rank in ranks]
        return [Text(), _line(title, width), _line(parts, width), *rows, _line(lanes.legend(), width)]

    # ---- events -----------------------------------------------------------------------------------------------------

    def _events(self, width: int, room: int) -> list[RenderableType]:
        events = sorted(self._run.events[-4 * max(1, room) :], key=lambda event: event.at_s)
        if room < 3 or not events:
            return []
        return [Text(), Text("events", style="bold"), *(self._event(event, width) for event in events[-(room - 2) :])]

    def _event(self, event: ControlEvent, width: int) -> Text:
        at = datetime.datetime.fromtimestamp(self._run.info.unix_ns(event.at_s) / 1e9).astimezone()
        line = Text(f"  {at:%H:%M:%S}.{at.microsecond // 1000:03d}  ", style="bright_black")
        line.append(f"{event.kind:<18}", style=LEVEL_STYLES[event.level])
        line.append(f" {_flat(event.text)}", style="default")
        return _line(line, width)


def _line(text: Text, width: int) -> Text:
    """Truncates a text to exactly one line."""
    text.no_wrap, text.overflow = True, "ellipsis"
    text.truncate(width, overflow="ellipsis")
    return text


def _spread(left: Text, right: Text, width: int) -> Text:
    space = width - right.cell_len
    if space > 20:
        left.truncate(space - 2, overflow="ellipsis")
        left.append(" " * (space - left.cell_len)).append_text(right)
    return left


def _item(name: str, value: object, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "bright_black"), (str(value), style))


def _packed(items: Sequence[Text], width: int) -> list[Text]:
    """Items side by side, on as many lines as they need."""
    lines: list[Text] = []
    for item in items:
        if item and lines and lines[-1].cell_len + 3 + item.cell_len <= width:
            lines[-1].append("   ").append_text(item)
        elif item:
            lines.append(item)
    return [_line(line, width) for line in lines]


def _empty_table(hidden: set[str], bar_columns: int, node_columns: int, is_folded: bool) -> Table:
    """The columns, of fixed width, so that nothing jumps from frame to frame."""
    widths = {"rank": 12 if is_folded else 5, "phase": 26 if is_folded else 13, "step": 9 if is_folded else 7}
    widths[SHARD] = 5
    widths |= dict.fromkeys(_OWN, 9) | {BAR: bar_columns, "pid": 7, "node": node_columns}
    table = Table(box=None, padding=(0, 2, 0, 0), expand=False, header_style="bright_black")
    for name in COLUMNS:
        if name not in hidden:
            justify: JustifyMethod = "right" if name in ("rank", SHARD, "step", "pid", *_OWN) else "left"
            table.add_column(name, no_wrap=True, justify=justify, width=widths.get(name))
    return table


def _rank_row(place: ScreenPlace, medians: np.ndarray, bar: OwnBar) -> Row:
    slow = {each.phase for each in place.stragglings}
    own = [
        Text("-" if np.isnan(own_ms) else _ms(own_ms), "bold yellow" if name in slow else "default")
        for name, own_ms in zip(_OWN, medians.tolist(), strict=False)
    ]
    state = Text(place.state, STATE_STYLES.get(place.state, "default"))
    pid = place.worker.pid if place.worker is not None else None
    return [
        str(place.rank),
        place.shard,
        state,
        _number(place.step),
        *own,
        bar.draw(medians),
        _number(pid),
        place.node,
        _remark(place),
    ]


def _shortened(rows: list[Row], room: int) -> list[Row]:
    if len(rows) <= room or room < 1:
        return rows[: max(0, room)]
    rest = Text(f"{len(rows) - room + 1} nodes more", style="bright_black")
    return [*rows[: room - 1], ["…", "", rest, *[""] * (len(COLUMNS) - 3)]]


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ms(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"


def _remark(place: ScreenPlace) -> Text:
    if place.stragglings:
        worst = place.stragglings[0]
        return Text(f"slow: {worst.phase} {worst.ratio:.1f}x", style="bold yellow")
    if place.is_behind:
        return Text("behind the others", style="red")
    return Text("took the rank" if place.is_fresh else "", style="cyan")


def _ranges(ranks: Sequence[int]) -> str:
    """Formats sorted numbers, with consecutive ones as ranges, in at most 12 characters."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return text if len(text) <= 12 else text[:11] + "…"


def _about(scene: Scene, run: Run, is_current: bool) -> str:
    text = f"{scene.number}, {scene.record.cause}"
    if scene.overtaken_s is not None:
        return f"{text}, overtaken"
    if scene.end_s is None:
        return text if is_current else f"{text}, not completed"
    return text if run.info.ended is not None else f"{text}, {_clock(run.now_s - scene.end_s)} ago"


def _flat(text: str) -> str:
    return printable(" ".join(text.split()))


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _duration(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"
