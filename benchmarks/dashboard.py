"""Cost of the dashboard for a job, and delay until its page shows an event.

    python benchmarks/dashboard.py                everything; about twelve minutes on two idle cores
    python benchmarks/dashboard.py --quick        a smoke test with few ranks; nothing is written

A  1,024 simulated ranks, written into a run folder in real time, shown in a headless Chromium
B  a real job: the cost of its steps without a page, with one open page, and with 200, in turns
C  a drill with an open page: the time from a failure, and from the resumed step, until the page shows it

Prints tables, and writes ``benchmarks/results/DATE-dashboard.md``. The machine should have nothing else to do. The
pages of part B are connections that read a page's data. A browser runs on the user's machine, so only part A has one.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dashboard_feed
import page
import psutil
import turns
from jobs import JobFailed, RunningJob
from page import RESULTS, Section
from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from keepstep.dashboard.process import serving
from keepstep.protocol.phases import Phase
from keepstep.shared import tagpage
from keepstep.trace.timeline.run import Run

GPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
WATCH = Path(__file__).parents[1] / "tests" / "e2e" / "watch.js"
KEEPSTEP = [sys.executable, "-m", "keepstep.cli.main"]
DEADLINE_S = 300.0
TAG_ROUNDS = 200
SOMEBODY_LOOKS, NOBODY_LOOKS = "somebody looks", "nobody looks"
FAULTS_AT = range(6, 200, 8)
QUICK = {"nodes": 8, "seconds": 5.0, "pairs": 2, "block": 1.5, "many": 5, "faults": 1}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=128, help="A: of eight ranks each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="A: how long it is watched (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=480, help="B: blocks with and without (default: %(default)s)")
    parser.add_argument("--block", type=float, default=0.3, help="B: seconds of a block (default: %(default)s)")
    parser.add_argument("--many", type=int, default=200, help="B: how many pages are many (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=10, help="C: kills (default: %(default)s)")
    parser.add_argument("--only", choices=("A", "B", "C"), help="one part")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    return page.parsed(parser, QUICK)


@contextlib.contextmanager
def browser_page() -> Iterator[Page]:
    """Opens a page in a headless Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise JobFailed("no chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = browser.new_page(viewport={"width": 1920, "height": 1080})
        found.set_default_timeout(DEADLINE_S * 1000)
        yield found
        browser.close()


# ---- A --------------------------------------------------------------------------------------------------------------

FRAMES = """(seconds) => new Promise((resolve) => {
  const times = [];
  const frame = (time) => {
    times.push(time);
    if (time - times[0] < 1000 * seconds) return requestAnimationFrame(frame);
    const gaps = times.slice(1).map((t, i) => t - times[i]).sort((a, b) => a - b);
    resolve({ fps: (1000 * gaps.length) / (time - times[0]), p99_ms: gaps[Math.floor(0.99 * gaps.length)],
              worst_ms: gaps[gaps.length - 1], draw_ms: window.keepstep.frames().draw_ms });
  };
  requestAnimationFrame(frame);
})"""


def measure_scale(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures many ranks: frames per second in the page, and processor time of the server."""
    begin_s = dashboard_feed.simulate(folder / "recorded", args.nodes, 8, args.seconds * 1.5 + 20)
    recorded = Run(folder / "recorded")
    changes = recorded.poll().changes
    rate = len(changes) / (int(changes["at_ns"].max()) / 1e9 - begin_s)
    recorded.close()
    with (
        dashboard_feed.Feeder(folder / "recorded", folder / "fed", begin_s + 3),
        serving(folder / "fed", "127.0.0.1:0", "--listen") as link,
        browser_page() as shown,
    ):
        (server,) = [p for p in psutil.Process().children() if "keepstep.dashboard" in p.cmdline()]
        shown.goto(link)
        shown.get_by_test_id("card-step").wait_for()
        before, begun_s = server.cpu_times(), time.monotonic()
        frames = shown.evaluate(FRAMES, args.seconds)
        after, took_s = server.cpu_times(), time.monotonic() - begun_s
        lanes = shown.evaluate("() => window.keepstep.lanes().length")
        used_s = after.user + after.system - before.user - before.system
        return {
            "ranks": args.nodes * 8,
            "changes_per_s": round(rate),
            "server_percent": round(100 * used_s / took_s, 2),
            "server_mib": round(server.memory_info().rss / 2**20),
            "lanes": lanes,
            **{name: round(value, 2) for name, value in frames.items()},
        }


# ---- B --------------------------------------------------------------------------------------------------------------

READER = """
import os, selectors, socket, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
port, token, num = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
chosen = selectors.DefaultSelector()
for _ in range(num):
    line = socket.create_connection(("127.0.0.1", port))
    line.sendall(f"GET /api/stream HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {token}\\r\\n\\r\\n".encode())
    assert line.recv(1 << 16)
    chosen.register(line, selectors.EVENT_READ)
print("open", flush=True)
while True:
    for key, _ in chosen.select():
        if not key.fileobj.recv(1 << 20):
            sys.exit("cut off")
"""


@contextlib.contextmanager
def open_pages(run_dir: Path, num_pages: int) -> Iterator[list[psutil.Process]]:
    """Starts a dashboard with ``num_pages`` pages that read all data. Yields the processes."""
    before = set(psutil.Process().children())
    with serving(run_dir, "127.0.0.1:0", "--listen") as link:
        port, token = re.search(r":(\d+)/\?token=(\S+)", link).groups()
        command = ["nice", "-n", "19", sys.executable, "-c", READER, port, token, str(num_pages)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
            assert reader.stdout.readline() == b"open\n"
            try:
                yield [process for process in psutil.Process().children() if process not in before]
            finally:
                reader.kill()


def measure_cost(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures the cost of a step on rank 0 with and without open pages, in turns.

    In every other block dashboard and pages are stopped (SIGSTOP), which for the job is as if they did not exist. On
    this machine they could cost a step processor time (because they share caches), or the wait for a free core. The
    kernel counts both, besides the total time of a step.

    On a machine with two cores one rank leaves a core idle, as training on GPUs leaves most of its host idle. Two ranks
    leave none.
    """
    found = []
    for num_ranks, num_pages, num_pairs in (
        (1, 1, args.pairs),
        (1, args.many, -(-args.pairs // 4)),
        (2, 1, -(-args.pairs // 4)),
    ):
        where = folder / f"{num_ranks}-{num_pages}"
        where.mkdir()
        command = [*KEEPSTEP, "run", "--nproc-per-node", str(num_ranks), "--spares", "0", "--run-dir", str(where)]
        with RunningJob([*command, str(turns.WATCHED), str(where)], where) as job:
            job.wait_until(lambda where=where: len(turns.steps_of(where)) > 30, "training", DEADLINE_S)
            with open_pages(where, num_pages) as lookers:
                blocks = _take_turns(job, lookers, args.block, 2 * num_pairs + 1)
        pairs = turns.pairs(turns.steps_of(where), blocks, NOBODY_LOOKS)[SOMEBODY_LOOKS]
        found.append({"ranks": num_ranks, "pages": num_pages, "pairs": pairs})
    return found


def measure_tags() -> dict[str, float]:
    """Measures the cost of one phase change for a worker: the tag, and the record in the ring, in nanoseconds."""
    writer = tagpage.TagWriter(tagpage.create("measured"))
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED)
    rounds = []
    for _ in range(TAG_ROUNDS):
        begun_ns = time.perf_counter_ns()
        for step in range(200):
            for phase in phases:
                writer.write(1, step, phase)
        rounds.append((time.perf_counter_ns() - begun_ns) / (200 * len(phases)))
    return {"write_ns": statistics.median(rounds), "writes_per_step": len(phases)}


def _take_turns(job: RunningJob, lookers: list[psutil.Process], block_s: float, num: int) -> list[tuple[int, str]]:
    """Runs the blocks, and returns when each began, and whether the pages ran in it."""
    blocks = []
    for number in range(num):
        is_looked_at = number % 2 == 1
        for process in lookers:
            process.resume() if is_looked_at else process.suspend()
        blocks.append((time.monotonic_ns(), SOMEBODY_LOOKS if is_looked_at else NOBODY_LOOKS))
        time.sleep(block_s)
        job.check_alive("the end of a block")
    for process in lookers:
        process.resume()
    return blocks


# ---- C --------------------------------------------------------------------------------------------------------------


def measure_latency(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures the seconds from an event in a drill until the page shows it."""
    faults = [f"kill@step={step},phase=backward,rank={n % 2}" for n, step in enumerate(FAULTS_AT[: args.faults])]
    num_steps = str(FAULTS_AT[args.faults - 1] + 10)
    command = [
        *KEEPSTEP,
        "drill",
        "--nproc-per-node",
        "2",
        "--dashboard=127.0.0.1:0",
        "--run-dir",
        str(folder / "drill"),
    ]
    command += ["--faults", ";".join(faults), str(GPT), "--steps", num_steps]
    with RunningJob(command, folder) as job:
        log = folder / "output.log"
        job.wait_until(lambda: "token=" in log.read_text(encoding="utf-8"), "the link", DEADLINE_S)
        with browser_page() as shown:
            shown.add_init_script(path=WATCH)
            shown.goto(re.search(r"http://\S+", log.read_text(encoding="utf-8"))[0])
            shown.locator(f"[data-testid=recovery-row][data-number='{args.faults}']").wait_for()
            job.wait(DEADLINE_S)
            seen = shown.evaluate("() => window.seen")
    run = Run(folder / "drill" / "with-faults")
    run.poll()
    run.close()
    delays: dict[str, list[float]] = {"failure": [], "resumed step": []}
    for scene in run.scenes:
        note = seen[str(scene.number)]
        for name, at_s, shown_ms in (
            ("failure", scene.record.begun_s, note["shown"]),
            ("resumed step", scene.record.resumed_s, note["whole"]),
        ):
            if at_s is not None and shown_ms is not None:
                delays[name].append(round(shown_ms / 1000 - run.info.unix_ns(at_s) / 1e9, 3))
    return delays


# ---- the page -------------------------------------------------------------------------------------------------------


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables of a result."""
    found = []
    if "scale" in result:
        scale = result["scale"]
        rows = [[name, str(scale[key])] for name, key in _SCALE.items()]
        found.append(Section(f"{scale['ranks']:,} simulated ranks, one page", ("", "measured"), rows, []))
    if "cost" in result:
        rows = []
        for part in result["cost"]:
            ranks = "1 rank" if part["ranks"] == 1 else f"{part['ranks']} ranks"
            pages = "one page" if part["pages"] == 1 else f"{part['pages']} pages"
            rows += [[f"{ranks}, {pages}", *row] for row in turns.rows(part["pairs"])]
        columns = ("job, and who looks", *turns.COLUMNS)
        notes = [turns.NOTE]
        if "tags" in result:
            tags = result["tags"]
            notes.append(
                f"Writing a phase change takes a worker {tags['write_ns']:.0f} ns, whoever looks; a step has "
                f"{tags['writes_per_step']}: {tags['write_ns'] * tags['writes_per_step'] / 1000:.1f} microseconds."
            )
        found.append(Section("A step while a page is open", columns, rows, notes))
    if "latency" in result:
        rows = [
            [name, str(len(d)), f"{statistics.median(d):.2f}", f"{min(d):.2f}", f"{max(d):.2f}"]
            for name, d in result["latency"].items()
        ]
        found.append(
            Section("Seconds until the page shows it", ("what", "of them", "median", "least", "most"), rows, [])
        )
    return found


_SCALE = {
    "phase changes a second": "changes_per_s",
    "frames a second": "fps",
    "99 % of frames within, ms": "p99_ms",
    "longest frame, ms": "worst_ms",
    "drawing a frame, ms": "draw_ms",
    "lanes": "lanes",
    "server, percent of a core": "server_percent",
    "server, MiB": "server_mib",
}


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("Looking at a job", result)
    return "\n".join([head + page.measured_in(result), *(section.markdown() for section in sections(result))])


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()

    parts = (
        ("A", "scale", measure_scale),
        ("B", "cost", measure_cost),
        ("B", "tags", lambda args, folder: measure_tags()),
        ("C", "latency", measure_latency),
    )

    def measure() -> dict[str, Any]:
        return page.measure_parts(parts, args, console)

    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out("dashboard", page.provenance("dashboard.py"), measure, sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
