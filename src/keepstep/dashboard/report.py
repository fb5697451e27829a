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
"""Maximum number of phase changes in a report, about 4 MB. For a longer run it has those around the recoveries."""
MAX_RECOVERIES = 20
"""The report of such a run has the phases of the first and the last recoveries, this many each."""
MAX_EVENTS = 1000
"""A report lists the first and the last events, this many each."""
MARGIN_NS = 60_000_000_000
"""Maximum time before and after a recovery for which the report has phases."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def html_report(run: Run) -> str:
    """Returns the report of a run as HTML. The caller must have called `Run.poll`."""
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
    """Returns the content security policy of a report. It allows only the report's own script and style sheet."""
    return (
        f"default-src 'none'; script-src '{_digest(_script())}'; style-src '{_digest(_style())}'; img-src data:; "
        "base-uri 'none'"
    )


def page_data(run: Run) -> dict[str, Any]:
    """Returns the data that the page draws: the state at the end, and all phases or those around the recoveries."""
    events = run.events
    if len(events) > 2 * MAX_EVENTS:
        events = [*events[:MAX_EVENTS], *events[-MAX_EVENTS:]]
    return {
        "snapshot": wire.describe_state(run, events),
        "num_hidden_events": len(run.events) - len(events),
        "windows": _windows(run),
    }


def _windows(run: Run) -> list[dict[str, Any]]:
    """Returns the time windows of the report with their phases."""
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
    """Returns a time window with its phase changes. If there are more than ``most``, it is shortened around
    ``middle_ns``, with as many changes before as after it if possible."""
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
    """Concatenates the page's modules, each after those that it imports."""
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
    """Returns an HTML element with JSON, escaped so that it cannot end the element."""
    text = json.dumps(data, separators=(",", ":"))
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{name}">{text}</script>\n'
