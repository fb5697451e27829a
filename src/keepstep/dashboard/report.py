"""The report of a run: the dashboard's page with its data, as one self-contained HTML file.

The file loads nothing else, and its content security policy allows only the page's own script. The element
with the id ``report`` holds the numbers of `keepstep.dashboard.story` as JSON, for programs; the element with the id
``page`` holds what the page draws.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from keepstep.dashboard import wire
from keepstep.dashboard.story import story
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import Scene

STATIC = Path(__file__).with_name("static")
MAX_CHANGES = 200_000
"""Phase changes in a report, which take about 4 MB. A longer run keeps those around its recoveries."""
MAX_RECOVERIES = 20
"""In such a run, the first so many recoveries keep their phases, and the last."""
MAX_EVENTS = 1000
"""The first so many events are listed, and the last."""
MARGIN_NS = 60_000_000_000
"""How long before and after a recovery phases are kept at most."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def html_report(run: Run) -> str:
    """The report of a run, after its `Run.poll`."""
    style, script = _style(), _script()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{security_policy()}">'
    data = _element("report", story(run)) + _element("page", page_data(run))
    page = (STATIC / "index.html").read_text("utf-8")
    for linked, inline in (
        ('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{policy}\n'),
        ('<link rel="stylesheet" href="static/style.css">\n', f"<style>{style}</style>\n"),
        ('<script type="module" src="static/app.js"></script>\n', ""),
        ("</body>", f'{data}<script type="module">{script}</script>\n</body>'),
    ):
        before, found, after = page.partition(linked)
        assert found, linked
        page = before + inline + after
    return page


@functools.cache
def security_policy() -> str:
    """What a report may do: run its own script and use its own style sheet, and nothing else."""
    return (
        f"default-src 'none'; script-src '{_digest(_script())}'; style-src '{_digest(_style())}'; img-src data:; "
        "base-uri 'none'"
    )


def page_data(run: Run) -> dict[str, Any]:
    """What the page draws: the state at the end, and the phases of the run, or those around its recoveries."""
    events = run.events
    if len(events) > 2 * MAX_EVENTS:
        events = [*events[:MAX_EVENTS], *events[-MAX_EVENTS:]]
    return {
        "snapshot": wire.describe_state(run, events),
        "num_hidden_events": len(run.events) - len(events),
        "windows": _windows(run),
    }


def _windows(run: Run) -> list[dict[str, Any]]:
    """Stretches of time with all their phases."""
    started_ns, end_ns = run.info.started_ns, max(run.history.end_ns, round(run.now_s * 1e9)) + 1
    if run.history.num <= MAX_CHANGES:
        return [_window(run, started_ns, end_ns, end_ns, MAX_CHANGES)]
    scenes = run.scenes
    if len(scenes) > 2 * MAX_RECOVERIES:
        scenes = [*scenes[:MAX_RECOVERIES], *scenes[-MAX_RECOVERIES:]]
    most = MAX_CHANGES // (len(scenes) + 1)
    windows = [_around(run, scene, most) for scene in scenes]
    begin_ns = int(run.history.newest(most)["at_ns"][0])
    return [*windows, _window(run, begin_ns, end_ns, end_ns, most)]


def _around(run: Run, scene: Scene, most: int) -> dict[str, Any]:
    since_ns = round(scene.since_s * 1e9)
    end_ns = round((scene.end_s if scene.end_s is not None else run.now_s) * 1e9)
    return _window(run, since_ns - MARGIN_NS, end_ns + MARGIN_NS, since_ns, most)


def _window(run: Run, begin_ns: int, end_ns: int, middle_ns: int, most: int) -> dict[str, Any]:
    """The phases in a stretch of time, or ``most`` of them, as many before ``middle_ns`` as after it if there are."""
    changes = run.history.records(begin_ns, end_ns)
    if len(changes) > most:
        middle = int(changes["at_ns"].searchsorted(middle_ns))
        first = max(0, min(middle - most // 2, len(changes) - most))
        begin_ns = int(changes["at_ns"][first]) if first else begin_ns
        end_ns = int(changes["at_ns"][first + most]) if first + most < len(changes) else end_ns
        changes = changes[first : first + most]
    begin, end = (wire.micros(run, at_ns / 1e9) for at_ns in (begin_ns, end_ns))
    return {"begin": begin, "end": end, "truncated": False, "phases": wire.describe_phases(run, changes)}


# ---- the file -------------------------------------------------------------------------------------------------------


@functools.cache
def _style() -> str:
    return (STATIC / "style.css").read_text("utf-8")


@functools.cache
def _script() -> str:
    """The page's modules as one, each after those that it imports."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (STATIC / f"{name}.js").read_text("utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in texts:
                add(imported)
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add("app")
    return "\n".join(texts.values())


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _element(name: str, data: dict[str, Any]) -> str:
    """JSON inside of a page: it cannot end the element that it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{name}">{text}</script>\n'
