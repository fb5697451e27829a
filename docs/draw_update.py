"""Draws the first buckets of an update of published weights, to scale: docs/weights.svg, from a trace of a real one.

    python benchmarks/weights.py --gib 0.5 --devices 2 --trace update.json
    python docs/draw_update.py update.json docs/weights.svg

The trace of a job that publishes (`keepstep trace export`) has the same tracks. The times differ from run to run, so
nothing checks that the picture is up to date: draw it again when the pipeline has changed, and look at it.
"""

import json
import sys
from html import escape
from pathlib import Path

STAGES = {
    "h2d": ("H2D", "weights to the source's H2D buffer", "#0969da"),
    "broadcast": ("Broadcast", "consumers are told where the bucket is", "#8250df"),
    "reload": ("Reload", "source's H2D buffer to the consumer's weights", "#1a7f37"),
}
NUM_BUCKETS = 10
WIDTH, LEFT, TOP, ROW, DEVICE = 1200, 190, 70, 26, 96
"""In pixels. ROW is the height of a stage, and DEVICE that of the three stages of a device."""
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #59636e; }
.name { font-weight: 600; font-size: 13px; fill: #1f2328; } .on { font-size: 11px; fill: #fff; }
.panel { fill: #fff; stroke: #d0d7de; } .grid { stroke: #d0d7de; }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1; } .name { fill: #f0f6fc; } .panel { fill: #0d1117; stroke: #3d444d; } .grid { stroke: #3d444d; }
}
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def picture(trace: dict) -> str:
    """Returns the SVG of the update in a trace."""
    works = [e for e in trace["traceEvents"] if e.get("cat") in STAGES]
    works.sort(key=lambda work: work["ts"])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    shown = list(dict.fromkeys(work["args"]["bucket"] for work in works))[:NUM_BUCKETS]
    works = [work for work in works if work["args"]["bucket"] in shown]
    tops = {pid: TOP + DEVICE * n for n, pid in enumerate(sorted({work["pid"] for work in works}))}
    begin = works[0]["ts"]
    scale = (WIDTH - 20 - LEFT) / (max(work["ts"] + work["dur"] for work in works) - begin)
    bottom = TOP + DEVICE * len(tops)
    drawn = [f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom + 49}" rx="8" class="panel"/>']
    # The tick is the first of 1, 2, 5, 10, ... ms that leaves 60 pixels for each label.
    tick_us = next(us for zeros in range(6) for n in (1, 2, 5) if (us := n * 10**zeros * 1000) * scale >= 60)
    for us in range(0, int((WIDTH - 20 - LEFT) / scale), tick_us):
        x = LEFT + us * scale
        drawn.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom - 8}" class="grid"/>')
        drawn.append(text(x, bottom + 8, f"{us // 1000} ms", anchor="middle"))
    for n, (name, what, colour) in enumerate(STAGES.values()):
        drawn.append(f'<rect x="{20 + 360 * n}" y="24" width="14" height="14" rx="3" fill="{colour}"/>')
        drawn.append(text(40 + 360 * n, 36, f"{name}: {what}"))
    for pid, top in tops.items():
        rails = "".join(f"M{LEFT} {top + (n + 0.5) * ROW}H{WIDTH - 20}" for n in range(len(STAGES)))
        drawn.append(f'<path d="{rails}" class="grid"/>')
        drawn.append(text(20, top + 1.5 * ROW + 4, names[pid].rpartition(", ")[2], "name"))
        drawn += [text(110, top + (n + 0.5) * ROW + 4, name) for n, (name, _, _) in enumerate(STAGES.values())]
    for work in works:
        row, bucket, width = [*STAGES].index(work["cat"]), work["args"]["bucket"], max(work["dur"] * scale - 0.6, 1)
        x, y = LEFT + (work["ts"] - begin) * scale, tops[work["pid"]] + row * ROW + 2
        colour = STAGES[work["cat"]][2]
        drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}" rx="3" fill="{colour}"/>')
        if width >= 7 * len(str(bucket)) + 2:
            label = f"b{bucket}" if width >= 26 else str(bucket)
            drawn.append(text(x + width / 2, y + 15, label, "on", "middle"))
    note = f"The first {len(shown)} buckets, to scale, as measured. The reload runs in the consumer's process."
    drawn.append(text(20, bottom + 34, note))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 50}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *drawn, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text("utf-8"))), encoding="utf-8")
