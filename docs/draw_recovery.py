"""Draws docs/recovery.svg: what happens to each rank when one is lost in the backward of a step.

    python docs/draw_recovery.py            write the picture
    python docs/draw_recovery.py --check    change nothing; exit code 1 if the picture is not what this script draws

Positions are chosen for reading, not measured. Colours follow the reader's light or dark mode.
"""

import argparse
import sys
from pathlib import Path

PICTURE = Path(__file__).with_name("recovery.svg")

WIDTH, HEIGHT = 1000, 398
LEFT, RIGHT = 92, 980
LANE_HEIGHT, BAR_HEIGHT = 52, 28
FIRST_LANE = 78
LANES = ("rank 0", "rank 1", "rank 2", "spare")

# Moments, in pixels from the left edge.
STEP_A, BARRIER_A, END_A = 98, 226, 268  # step i - 1
FAILURE, STOPPED, RESET, RESTORED = 398, 500, 554, 672
BARRIER_B, END_B = 806, 848  # step i, the second time
FORWARD_SHARE = 0.42
LAST_TURN, CUT = 908, 974  # from forward to backward, and where the picture ends, in the step after

STYLE = """
  .panel { fill: #ffffff; stroke: #d0d7de; }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .name { font-weight: 600; }
  .title { font-size: 15px; font-weight: 600; }
  .quiet { fill: #59636e; font-size: 12px; }
  .on { fill: #ffffff; font-size: 12px; text-anchor: middle; }
  .middle { text-anchor: middle; }
  .rail { stroke: #d0d7de; stroke-width: 1; }
  .waits { stroke: #818b98; stroke-width: 2; stroke-dasharray: 2 5; }
  .forward { fill: #0969da; } .backward { fill: #1a7f37; } .optimizer { fill: #bc4c00; }
  .stop { fill: #59636e; } .reset { fill: #818b98; } .restore { fill: #8250df; }
  .barrier { stroke: #1f2328; stroke-width: 3; }
  .moment { stroke: #cf222e; stroke-width: 1; stroke-dasharray: 4 4; }
  .bolt { fill: #d4a72c; stroke: #9a6700; stroke-width: 1; }
  .takes { fill: none; stroke: #8250df; stroke-width: 2; }
  .head { fill: #8250df; }
  .band { fill: #ddf4ff; stroke: #54aeff; } .between { fill: #fff1e5; stroke: #fb8f44; }
  @media (prefers-color-scheme: dark) {
    .panel { fill: #0d1117; stroke: #3d444d; }
    text { fill: #f0f6fc; } .quiet { fill: #9198a1; } .on { fill: #ffffff; }
    .rail { stroke: #3d444d; } .barrier { stroke: #f0f6fc; }
    .forward { fill: #1f6feb; } .backward { fill: #238636; } .optimizer { fill: #bd561d; }
    .stop { fill: #656c76; } .reset { fill: #4d5560; } .restore { fill: #8957e5; }
    .moment { stroke: #f85149; } .takes { stroke: #ab7df8; } .head { fill: #ab7df8; }
    .band { fill: #0c2d6b; stroke: #388bfd; } .between { fill: #5a1e02; stroke: #db6d28; }
  }
"""


def middle(lane: int) -> int:
    """The height of a lane's middle."""
    return FIRST_LANE + lane * LANE_HEIGHT + LANE_HEIGHT // 2


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{content}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>'


def bar(lane: int, begin: float, end: float, kind: str, label: str = "") -> list[str]:
    """A stretch of time on one lane, with what happens in it."""
    top = middle(lane) - BAR_HEIGHT // 2
    drawn = [
        f'<rect x="{begin + 1:g}" y="{top}" width="{end - begin - 2:g}" height="{BAR_HEIGHT}" rx="4" class="{kind}"/>'
    ]
    if label:
        drawn.append(text((begin + end) / 2, middle(lane) + 4, label, "on"))
    return drawn


def computing(lane: int, begin: float, barrier: float, end: float) -> list[str]:
    """A whole step of one rank: forward, backward, a gap for the barrier, optimizer."""
    turn = begin + (barrier - begin) * FORWARD_SHARE
    return [
        *bar(lane, begin, turn, "forward", "forward"),
        *bar(lane, turn, barrier - 4, "backward", "backward"),
        *bar(lane, barrier + 4, end, "optimizer", "opt."),
    ]


def interrupted(lane: int, begin: float, end: float) -> list[str]:
    """The beginning of a step that is not completed."""
    turn = begin + (BARRIER_A - STEP_A) * FORWARD_SHARE
    return [*bar(lane, begin, turn, "forward", "forward"), *bar(lane, turn, end, "backward", "backward")]


def barrier(x: float) -> list[str]:
    top, bottom = middle(0) - 22, middle(2) + 22
    return [line(x, top, x, bottom, "barrier"), text(x, top - 6, "gradient barrier", "middle quiet")]


def bolt(x: float, y: float) -> str:
    points = [(2, -22), (-10, 3), (-2, 3), (-6, 22), (10, -6), (2, -6), (8, -22)]
    return f'<polygon class="bolt" points="{" ".join(f"{x + dx:g},{y + dy:g}" for dx, dy in points)}"/>'


def lanes() -> list[str]:
    drawn = []
    for lane, name in enumerate(LANES):
        drawn += [text(20, middle(lane) + 4, name, "name"), line(LEFT, middle(lane), RIGHT, middle(lane), "rail")]
    for lane in range(3):
        drawn += computing(lane, STEP_A, BARRIER_A, END_A)
        drawn += interrupted(lane, END_A + 6, FAILURE if lane == 1 else FAILURE + 18)
        if lane != 1:
            drawn += bar(lane, FAILURE + 18, STOPPED, "stop", "stop · clean")
            drawn += bar(lane, STOPPED, RESET, "reset", "reset")
            drawn += bar(lane, RESET, RESTORED, "stop", "send state")
        drawn += computing(lane, RESTORED + 6, BARRIER_B, END_B)
        drawn += bar(lane, END_B + 6, LAST_TURN, "forward", "forward")
        drawn += bar(lane, LAST_TURN, CUT, "backward", "backward")
    drawn += bar(1, STOPPED, RESET, "reset", "reset")
    drawn += bar(1, RESET, RESTORED, "restore", "restore · rollback")
    return drawn


def spare() -> list[str]:
    """The spare waits, warm; then it is the lost rank, and another one is started."""
    y = middle(3)
    target = middle(1) + BAR_HEIGHT // 2 + 3
    # Behind the lane of rank 2, so the arrow goes round its bars in the gap between two of them.
    x = STOPPED
    return [
        line(STEP_A, y, STOPPED - 16, y, "waits"),
        text(STEP_A + 2, y - 8, "warm: has built its model, waits for a rank", "quiet"),
        f'<path class="takes" d="M {x - 16} {y} H {x} V {target + 8}"/>',
        f'<polygon class="head" points="{x - 6},{target + 9} {x + 6},{target + 9} {x},{target - 1}"/>',
        text(STOPPED + 10, y - 8, "takes rank 1", "quiet"),
        line(END_B + 6, y, CUT, y, "waits"),
        text(END_B + 6, y - 8, "a new spare starts", "quiet"),
    ]


def parameters() -> list[str]:
    """The band below: at which step the parameters of the job are."""
    top, height = FIRST_LANE + 4 * LANE_HEIGHT + 16, 28
    drawn = [text(20, top + 18, "weights", "name")]
    for begin, end, kind, label in (
        (STEP_A, BARRIER_A, "band", "at step i-1"),
        (BARRIER_A, END_A, "between", ""),
        (END_A, BARRIER_B, "band", "at step i, on every survivor, all the time: nothing is read from a disk"),
        (BARRIER_B, END_B, "between", ""),
        (END_B, CUT, "band", "at step i+1"),
    ):
        drawn.append(
            f'<rect x="{begin + 1}" y="{top}" width="{end - begin - 2}" height="{height}" rx="4" class="{kind}"/>'
        )
        if label:
            drawn.append(text((begin + end) / 2, top + 18, label, "middle"))
    drawn.append(text(BARRIER_A, top + height + 18, "being updated", "quiet"))
    drawn.append(text(BARRIER_B, top + height + 18, "being updated", "quiet"))
    return drawn


def steps() -> list[str]:
    y = 42
    drawn = []
    for begin, end, label in (
        (STEP_A, END_A, "step i-1"),
        (END_A + 6, FAILURE, "step i"),
        (RESTORED + 6, END_B, "step i, again"),
        (END_B + 6, CUT, "step i+1"),
    ):
        drawn.append(text((begin + end) / 2, y, label, "title middle"))
    drawn.append(text((FAILURE + RESTORED) / 2 + 12, y, "recovery", "title middle"))
    return drawn


def picture() -> str:
    """The whole picture."""
    parts = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" class="panel"/>',
        *steps(),
        *lanes(),
        *spare(),
        *barrier(BARRIER_A),
        *barrier(BARRIER_B),
        line(FAILURE, middle(0) - 26, FAILURE, middle(2) + 24, "moment"),
        bolt(FAILURE, middle(1)),
        *parameters(),
        text(20, HEIGHT - 16, "Time runs to the right; not to scale. What the words mean: docs/PROTOCOL.md.", "quiet"),
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="what">\n'
        '<title id="what">Rank 1 is lost in the backward of step i; the survivors stop and keep their weights, a spare '
        "takes rank 1 and receives the state from them, and all compute step i again.</title>\n"
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw docs/recovery.svg.")
    parser.add_argument("--check", action="store_true", help="only say whether the picture is up to date")
    arguments = parser.parse_args()
    if arguments.check:
        stale = not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != picture()
        if stale:
            print(f"{PICTURE.name} is out of date: run 'python docs/draw_recovery.py'", file=sys.stderr)
        return int(stale)
    PICTURE.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
