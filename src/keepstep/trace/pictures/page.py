"""The report of a run as one HTML page that needs nothing else: no other file, no network, no script."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from keepstep.trace.pictures.chart import rate_chart
from keepstep.trace.pictures.drawing import PATTERNS, escaped
from keepstep.trace.pictures.recovery import draw_recovery
from keepstep.trace.pictures.story import story
from keepstep.trace.pictures.theme import FONTS, STYLE
from keepstep.trace.pictures.timescale import duration_text
from keepstep.trace.timeline.events import ControlEvent
from keepstep.trace.timeline.run import Run

MAX_PICTURES = 20
"""The first so many recoveries have a picture, and the last."""
MAX_EVENTS = 1000
"""The first so many events are listed, and the last."""
PARTS = ("detect", "stop", "decide", "reset", "restore", "resume", "gap")
MEANINGS = {
    "detect": "until the controller learned of it",
    "stop": "until all survivors stood still and what was lost was gone",
    "decide": "until the step to resume at and the replacements were fixed",
    "reset": "until the process groups were connected anew",
    "restore": "until every rank stood at that step",
    "resume": "until that step was completed, its computation included",
    "gap": "all of it",
}

_DAY = {"ground": "#f6f8fa", "card": "#ffffff", "ink": "#1f2328", "quiet": "#59636e", "rule": "#d0d7de"}
_DAY |= {"good": "#1a7f37", "bad": "#cf222e", "warn": "#9a6700", "link": "#0969da"}
_NIGHT = {"ground": "#010409", "card": "#0d1117", "ink": "#f0f6fc", "quiet": "#9198a1", "rule": "#3d444d"}
_NIGHT |= {"good": "#3fb950", "bad": "#f85149", "warn": "#d29922", "link": "#4493f8"}
PAGE_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; padding: 32px 24px 64px; background: var(--ground); color: var(--ink); font: 15px/1.5 FONTS; }
main { max-width: 1060px; margin: 0 auto; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 44px 0 12px; }
h3 { font-size: 16px; margin: 28px 0 4px; }
p { margin: 4px 0 10px; max-width: 80ch; overflow-wrap: anywhere; }
.quiet, figcaption { color: var(--quiet); } .good { color: var(--good); } .bad { color: var(--bad); }
.warning { color: var(--warn); } .error { color: var(--bad); }
.verdict { font-weight: 600; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
a { color: var(--link); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin: 20px 0; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px; }
.card b { display: block; font-size: 24px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card span { display: block; color: var(--quiet); font-size: 13px; line-height: 1.35; }
svg.picture { display: block; width: 100%; height: auto; margin: 8px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; margin: 6px 0 10px; }
th { font-weight: 600; text-align: left; color: var(--quiet); }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.number { text-align: right; padding-right: 18px; } .strong { font-weight: 600; }
table.log td:last-child { overflow-wrap: anywhere; min-width: 24ch; white-space: pre-wrap; }
footer { margin-top: 48px; color: var(--quiet); font-size: 13px; }
@media print {
  body { background: #ffffff; padding: 0; font-size: 12px; }
  .card, article, figure { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .card { border-color: #d0d7de; }
}
""".replace("FONTS", FONTS)


def html_report(run: Run) -> str:
    """The report of a run, after its `Run.poll`."""
    numbers = story(run)
    title = escaped(" ".join(run.info.command)) or "keepstep"
    body = "\n".join([*_head(run, numbers), *_chart(numbers), *_recoveries(run, numbers), *_restart(numbers),
                      *_stragglers(numbers), *_log(run.events, run.info.started_ns / 1e9)])  # fmt: skip
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="keepstep {escaped(run.info.version)}">
<title>{title}: keepstep report</title>
<style>
:root {{ color-scheme: light dark; {_variables(_DAY)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_NIGHT)} }} }}
{PAGE_STYLE}
{STYLE}
</style>
</head>
<body>
<svg width="0" height="0" style="position: absolute" aria-hidden="true">{PATTERNS}</svg>
<main>
{body}
<footer>Made by keepstep {escaped(run.info.version)} from the folder of run {escaped(run.info.run)}.</footer>
</main>
<script type="application/json" id="report">
{_embedded(numbers)}
</script>
</body>
</html>
"""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _embedded(numbers: dict[str, Any]) -> str:
    """JSON that may stand inside of a page: it cannot end the element that it stands in."""
    text = json.dumps(numbers, indent=1)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int, kind: str = "") -> Iterator[str]:
    """A table; the last ``numbers`` columns hold numbers. Cells are HTML."""
    first = len(head) - numbers
    yield f'<div class="scroll"><table class="{kind}"><thead><tr>'
    yield "".join(f"<th{' class=number' * (at >= first)}>{cell}</th>" for at, cell in enumerate(head))
    yield "</tr></thead><tbody>"
    for row in rows:
        yield (
            "<tr>"
            + "".join(f"<td{' class=number' * (at >= first)}>{cell}</td>" for at, cell in enumerate(row))
            + "</tr>"
        )
    yield "</tbody></table></div>"


# ---- what ran -------------------------------------------------------------------------------------------------------


def _head(run: Run, numbers: dict[str, Any]) -> Iterator[str]:
    info = run.info
    began = datetime.datetime.fromtimestamp(info.started_unix_ns / 1e9, datetime.UTC)
    yield f"<h1>{escaped(' '.join(info.command)) or 'keepstep'}</h1>"
    ranks, spares = info.settings.world_size, info.settings.num_spares
    yield (
        f'<p class="quiet">{ranks} rank{"s" * (ranks != 1)} and {spares} spare{"s" * (spares != 1)} on '
        f"{escaped(info.node)}, begun {began:%Y-%m-%d %H:%M:%S} UTC</p>"
    )
    if info.ended is not None:
        kind = "good" if info.ended.exit_code == 0 else "bad"
        yield (
            f'<p><span class="verdict {kind}">Ended with exit code {info.ended.exit_code}</span> after '
            f"{duration_text(numbers['duration_s'])}: {escaped(info.ended.reason)}</p>"
        )
    elif run.is_alive:
        yield f'<p><span class="verdict">Still running</span> after {duration_text(numbers["duration_s"])}.</p>'
    else:
        yield '<p><span class="verdict bad">Its launcher is gone</span>, and has not said how the run ended.</p>'
    goodput = "–" if numbers["goodput"] is None else f"{100 * numbers['goodput']:.2f} %"
    cards = (
        (f"{numbers['steps']:,}", "steps completed"),
        (duration_text(numbers["duration_s"]), "duration"),
        (goodput, "goodput: time that was not lost, since training began"),
        (f"{numbers['num_failures']:,}", "ranks lost"),
        (f"{len(numbers['recoveries']):,}", "recoveries"),
        (f"{numbers['spares_used']:,}", "ranks taken by another worker"),
    )
    yield '<div class="cards">'
    yield from (f'<div class="card"><b>{value}</b><span>{name}</span></div>' for value, name in cards)
    yield "</div>"


def _chart(numbers: dict[str, Any]) -> Iterator[str]:
    if not numbers["steps_per_bucket"]:
        yield "<p>No phases were recorded, so how fast the job went is not known.</p>"
        return
    moments = [recovery["at_s"] for recovery in numbers["recoveries"]]
    chart = rate_chart(
        numbers["steps_per_bucket"], numbers["bucket_s"], numbers["duration_s"], numbers["lost"], moments
    )
    yield f"<h2>Pace</h2>\n<figure style='margin: 0'>{chart.inline_svg()}</figure>"


# ---- recoveries -----------------------------------------------------------------------------------------------------


def _recoveries(run: Run, numbers: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Recoveries</h2>"
    found = numbers["recoveries"]
    if not found:
        yield "<p>Nothing failed.</p>"
        return
    meanings = "; ".join(f"<b>{part}</b> {meaning}" for part, meaning in MEANINGS.items())
    yield f'<p class="quiet">Milliseconds, from the failure on. {meanings}.</p>'
    yield from _table(("", "at", "what", *PARTS), [_row(each) for each in found], len(PARTS))
    if len(found) > 2 * MAX_PICTURES:
        yield f'<p class="quiet">Pictures: the first {MAX_PICTURES} and the last {MAX_PICTURES}.</p>'
    for each in found:
        if each["number"] <= MAX_PICTURES or each["number"] > len(found) - MAX_PICTURES:
            yield f'<article id="recovery-{each["number"]}"><h3>Recovery {each["number"]}</h3>'
            yield f"<p>{escaped(in_words(each))}</p>"
            yield f"{draw_recovery(run, each['number']).inline_svg()}</article>"


def _row(each: dict[str, Any]) -> list[str]:
    times = [_ms(each["milliseconds"][part]) for part in PARTS]
    times[-1] = f'<span class="strong">{times[-1]}</span>'
    what = escaped((each["detail"].strip().splitlines() or [""])[0])
    return [f'<a href="#recovery-{each["number"]}">{each["number"]}</a>', duration_text(each["at_s"]), what, *times]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def in_words(each: dict[str, Any]) -> str:
    """One recovery, as `story` describes it, in a few sentences."""
    said = [each["detail"].strip().rstrip(".") + "."]
    said[0] = said[0][:1].upper() + said[0][1:]
    if each["step"] is not None:
        said.append(f"It was in the phase “{each['phase']}” of step {each['step']}.")
    if not each["failed_ranks"]:
        said.append("No rank was lost: all stayed, and their groups were connected anew.")
    for rank, worker in each["taken_by_worker"].items():
        said.append(f"Worker {worker} took rank {rank}.")
    if each["taken_by_worker"] and each["sources"]:
        size, ranks = each["received_bytes"], ", ".join(map(str, each["sources"][:8]))
        much = f"{size / 2**20:,.1f} MiB of state" if size else "The state"
        said.append(f"{much} came from rank{'s' * (len(each['sources']) > 1)} {ranks}.")
    gap_ms, steps = each["milliseconds"]["gap"], each["steps_recomputed"]
    if gap_ms is not None:
        said.append(
            f"Training went on from step {each['resume_step']}, whose end came {gap_ms:,.0f} ms after the failure."
        )
        if steps is not None:
            said.append({0: "No step was computed again.", 1: "One step was computed again."}.get(
                steps, f"{steps} steps were computed again."))  # fmt: skip
    elif each["overtaken"] or each["superseded"]:
        said.append("Another failure came before this one was repaired.")
    else:
        said.append("It was not repaired, or not yet.")
    return " ".join(said)


# ---- the rest -------------------------------------------------------------------------------------------------------


def _restart(numbers: dict[str, Any]) -> Iterator[str]:
    found = numbers["restart"]
    yield "<h2>What a checkpoint-restart would have lost</h2>"
    if found is None:
        yield "<p>Nothing was lost here, or training never began, so there is nothing to compare.</p>"
        return
    num = found["num_failures"]
    rows = [("keepstep, as measured in this run", duration_text(found["lost_s"]), "1")]
    for case in found["cases"]:
        name = f"restart from a checkpoint every {duration_text(case['interval_s'])}"
        ratio = "–" if case["ratio"] is None else f"{case['ratio']:,.0f}"
        rows.append((name, duration_text(case["lost_s"]), ratio))
    yield from _table(("", "time lost", "times as much"), rows, 2)
    times = f"{num} failure{'s' * (num != 1)}"
    yield (
        f"<p>Reckoned, not measured: {times} × (start of the job + interval / 2). The start of this job took "
        f"{duration_text(found['startup_s'])}, from its launch to its first forward; a restart of everything costs "
        "that again. A failure comes at any moment between two checkpoints, so half an interval is computed again on "
        "average. Everything else is taken to be free for the restart: noticing the failure, writing checkpoints, "
        "reading one, finding a replacement. For keepstep it is the time from the beginning of the step that was "
        "computed for nothing, or from the failure where none was, to the first step afterwards. Recoveries that "
        "overtook each other count as one failure.</p>"
    )


def _stragglers(numbers: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Stragglers</h2>"
    if not numbers["stragglers"]:
        yield "<p>At the end, no rank was much slower than the others.</p>"
        return
    yield '<p class="quiet">Ranks whose own time in a phase stands out, over the last steps of the run.</p>'
    rows = [
        (f"rank {each['rank']}", each["phase"], f"{each['own_ms']:,.1f} ms", f"{each['typical_ms']:,.1f} ms",
         f"{each['ratio']:.2f}")
        for each in numbers["stragglers"]
    ]  # fmt: skip
    yield from _table(("", "phase", "takes", "the others", "ratio"), rows, 3)


def _log(events: Sequence[ControlEvent], started_s: float) -> Iterator[str]:
    shown = sorted(events, key=lambda event: event.at_s)
    hidden = max(0, len(shown) - 2 * MAX_EVENTS)
    if hidden:
        shown = [*shown[:MAX_EVENTS], *shown[-MAX_EVENTS:]]
    yield f"<h2>What the controller learned and decided</h2>\n<details{' open' * (len(shown) <= 200)}>"
    yield f"<summary>{len(events):,} events{f', {hidden:,} of them in the middle left out' * bool(hidden)}</summary>"
    rows = [
        (
            f"{event.at_s - started_s:,.3f} s",
            str(event.generation),
            f'<span class="{event.level}">{escaped(event.kind)}</span>',
            escaped(event.text),
        )
        for event in shown
    ]
    yield from _table(("at", "generation", "event", ""), rows, 0, "log")
    yield "</details>"
