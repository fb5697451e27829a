"""What becomes of ranks that are silent: pauses cost nothing, and a rank that hangs is found.

    python benchmarks/silence.py                  everything; about an hour and a half; the namespaces need root
    python benchmarks/silence.py --quick          a smoke test with few pauses and kills; nothing is written

A  pauses of one rank, some and all of them, shorter than the deadline, in jobs of three layouts: no recovery
B  pauses of one rank beyond its deadline: one recovery each
C  a rank that hangs for good, on one node and on two (network namespaces, as in tests/network): the time to find it
D  kills at random instants: the weights of a run without failures
E  a signal to all processes: SIGSTOP for a while, and SIGTERM

The pauses are drawn from ``--seed``. A job whose weights differ ends the benchmark with an error.

Prints the tables, and writes ``benchmarks/results/DATE-silence.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - the layouts and machines are those of the tests
import page
import psutil
from jobs import JobFailed, RunningJob
from page import RESULTS, Section
from rich.console import Console
from tests.network.lab import Lab, why_not
from tests.support import layouts

from keepstep.config import SECRET_VARIABLE
from keepstep.drill.faults import IN_A_STEP
from keepstep.protocol.deadlines import DEADLINES
from keepstep.trust.tokens import Secret

KEEPSTEP = [sys.executable, "-m", "keepstep.cli.main"]
SILENT, DRAINED = (Path(layouts.SCRIPT).with_name(name) for name in ("silent.py", "drained.py"))
LAYOUTS = ("DDP", "FSDP2", "HSDP 2 × 2")
SHORTEST_S, LONGEST_S = 0.1, 45.0
"""Pauses under the default deadline of a minute. Under a shorter one they are shorter by the same factor."""
SCALED_S = 3.0
"""``--hang-after`` of most jobs."""
SPACING = 3
WAIT_S = 120.0
"""Limit for each wait of part E."""
QUICK = {"pauses": 2, "real_pauses": 0, "beyond": 1, "kills": 2, "asleep": 1.0, "hang_after": (1.0,), "stopped": 1.0}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("A", "B", "C", "D", "E"), help="one part")
    parser.add_argument("--pauses", type=int, default=20, help="A: for each layout (default: %(default)s)")
    parser.add_argument("--real-pauses", type=int, default=10, help="A: not scaled (default: %(default)s)")
    parser.add_argument(
        "--asleep", type=float, default=600.0, help="A: seconds between two steps (default: %(default)s)"
    )
    parser.add_argument("--beyond", type=int, default=20, help="B: pauses (default: %(default)s)")
    parser.add_argument("--hang-after", type=float, nargs="+", default=(DEADLINES.hang_after_s, 1.0), help="C")
    parser.add_argument("--kills", type=int, default=500, help="D (default: %(default)s)")
    parser.add_argument("--stopped", type=float, default=20.0, help="E: seconds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--results", type=Path, help=f"where the page goes (default: {RESULTS.parent.name}/{RESULTS.name})"
    )
    return page.parsed(parser, QUICK)


def drilled(name: str, layout: str, faults: str, steps: int, hang_after_s: float, deadline_s: float) -> dict[str, Any]:
    """Runs a drill of a layout on four ranks.

    Returns:
        the name, the result of the drill, and the seconds of all pauses.

    Raises:
        JobFailed: the weights differ, a fault did not happen, or the drill did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        found = Path(folder) / "drill.json"
        own = ["--json", str(found), "--hang-after", f"{hang_after_s:g}"]
        command = [*KEEPSTEP, "drill", *own, *layouts.arguments(layout, 1, (faults, steps))]
        with RunningJob(command, Path(folder)) as job:
            job.wait(deadline_s)
        result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    if not result["identical"] or result["missed"]:
        raise JobFailed(f"{name}: identical: {result['identical']}, never happened: {result['missed']}")
    return {"name": name, "hang_after_s": hang_after_s, "exit_code": result["exit_code"], **counted(result)}


def counted(result: dict[str, Any]) -> dict[str, Any]:
    """Returns what the tables show of a drill's result."""
    return {
        "num_faults": len(result["faults"]),
        "recoveries": [each["cause"] for each in result["recoveries"]],
        "again": [row["steps_recomputed"] for row in result["faults"] if row["steps_recomputed"] is not None],
    }


def pauses(generator: random.Random, count: int, factor: float) -> tuple[str, int, float]:
    """Returns so many pauses, each of one rank, some, or all of them; the steps and the seconds that they take."""
    faults, total_s = [], 0.0
    for number in range(count):
        ranks = generator.sample(range(layouts.NUM_RANKS), generator.choice((1, 2, 3, layouts.NUM_RANKS)))
        seconds = factor * generator.uniform(SHORTEST_S, LONGEST_S)
        phase = generator.choice([phase for phase in IN_A_STEP if phase != "barrier"])
        total_s += seconds
        place = f"step={5 + number * SPACING},phase={phase}"
        faults += [f"pause@{place},rank={rank},seconds={seconds:.3f}" for rank in ranks]
    return ";".join(faults), 5 + count * SPACING + 5, total_s


def quiet(args: argparse.Namespace, _folder: Path) -> list[dict[str, Any]]:
    """Part A."""
    generator, found = random.Random(args.seed), []
    for layout in LAYOUTS:
        faults, steps, total_s = pauses(generator, args.pauses, SCALED_S / DEADLINES.hang_after_s)
        name = f"{layout}: {args.pauses} pauses of one, some or all ranks, {total_s:.0f} s in all"
        found.append(drilled(name, layout, faults, steps, SCALED_S, 300.0 + total_s))
    if args.real_pauses:
        faults, steps, total_s = pauses(generator, args.real_pauses, 1.0)
        name = f"DDP: {args.real_pauses} such pauses, {total_s:.0f} s in all"
        found.append(drilled(name, "DDP", faults, steps, DEADLINES.hang_after_s, 300.0 + total_s))
    asleep = f"pause@step=5,phase=updated,rank=0,seconds={args.asleep:g}"
    name = f"DDP: rank 0 asleep for {args.asleep:g} s between two steps"
    found.append(drilled(name, "DDP", asleep, 10, DEADLINES.hang_after_s, 300.0 + args.asleep))
    if disturbed := [each["name"] for each in found if each["recoveries"]]:
        raise JobFailed(f"pauses have cost recoveries: {disturbed}")
    return found


def beyond(args: argparse.Namespace, _folder: Path) -> list[dict[str, Any]]:
    """Part B."""
    generator = random.Random(args.seed)
    faults = [
        f"pause@step={5 + number * SPACING},phase={generator.choice(('forward', 'backward', 'synced'))},"
        f"rank={generator.randrange(layouts.NUM_RANKS)},seconds={generator.uniform(4.0, 3.0 * SCALED_S):.3f}"
        for number in range(args.beyond)
    ]
    name = f"DDP: {args.beyond} pauses of one rank, of 4 to {3 * SCALED_S:g} s"
    row = drilled(name, "DDP", ";".join(faults), 10 + args.beyond * SPACING, SCALED_S, 300.0 + 30.0 * args.beyond)
    if row["recoveries"] != ["hang"] * args.beyond:
        raise JobFailed(f"{args.beyond} pauses beyond the deadline have cost {row['recoveries']}")
    return [row]


def hangs(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Part C."""
    found = []
    for hang_after_s in args.hang_after:
        found.append(hung("2 ranks on one node", hang_after_s, folder, None))
        if (reason := why_not()) is None:
            with Lab(2, args.seed).built() as lab:
                found.append(hung("1 rank on each of two nodes", hang_after_s, folder, lab))
        else:
            print(f"not on two nodes: {reason}", file=sys.stderr)
    return found


def hung(name: str, hang_after_s: float, folder: Path, lab: Lab | None) -> dict[str, Any]:
    """Runs a job of two ranks, of which one hangs for good. Returns when that was known, and when training went on."""
    report = folder / f"{'two' if lab else 'one'}-{hang_after_s:g}.json"
    flags = ["--hang-after", f"{hang_after_s:g}", "--spares", "1", "--report", str(report)]
    script = [str(SILENT), "hang", "0"]
    environment = dict(os.environ)
    if lab is None:
        commands = [[*KEEPSTEP, "run", *flags, "--nproc-per-node", "2", *script]]
    else:
        environment[SECRET_VARIABLE] = Secret.new().text()
        where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"{lab.address(0)}:29400"]
        own = [["--node-rank", str(node), "--run-dir", str(folder / f"{hang_after_s:g}-{node}")] for node in range(2)]
        commands = [lab.inside(node, *KEEPSTEP, "run", *flags, *where, *own[node], *script) for node in range(2)]
    running = [
        subprocess.Popen(each, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for each in commands
    ]
    try:
        told = [process.communicate(timeout=300.0 + hang_after_s)[1].decode() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    if any(process.returncode for process in running):
        raise JobFailed(f"{name}: exit codes {[process.returncode for process in running]}\n" + "\n".join(told))
    (recovery,) = json.loads(report.read_text(encoding="utf-8"))["recoveries"]
    return {"name": name, "hang_after_s": hang_after_s, **recovery["milliseconds"]}


def kills(args: argparse.Namespace, _folder: Path) -> list[dict[str, Any]]:
    """Part D."""
    found = []
    for number, (layout, share) in enumerate(zip(LAYOUTS, (0.5, 0.25, 0.25), strict=True)):
        count = max(1, int(args.kills * share))
        faults, steps = layouts.at_random(count, args.seed + number)
        name = f"{layout}: {count} kills at random instants"
        found.append(drilled(name, layout, faults, steps, SCALED_S, 300.0 + 20.0 * count))
    return found


def signals(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Part E."""
    ranks, checkpoints, reports = folder / "ranks", folder / "checkpoints", [folder / f"{name}.json" for name in "ab"]
    ranks.mkdir()
    command = [*KEEPSTEP, "run", "--nproc-per-node", "2", "--report"]
    with RunningJob([*command, str(reports[0]), str(SILENT), "stopped", "0", str(ranks)], folder) as job:
        job.wait_until(lambda: len(list(ranks.glob("*-at-*"))) == 2, "both ranks are in the step", WAIT_S)
        stopped = [psutil.Process(int(path.name.rpartition("-")[2])) for path in ranks.glob("*-at-*")]
        signalled(stopped, signal.SIGSTOP)
        (ranks / "go on").touch()
        time.sleep(args.stopped)
        at_s = signalled(stopped, signal.SIGCONT)
        job.wait(WAIT_S)
        name = f"SIGSTOP to all ranks, and {args.stopped:g} s later SIGCONT"
        found = [{"name": name, "left": "goes on", "exit_code": 0, "took_s": time.monotonic() - at_s}]
    told = [str(reports[1]), "--grace", "8", str(DRAINED), str(checkpoints), "loads", "100000"]
    with RunningJob([*command, *told], folder) as job:
        job.wait_until(lambda: all(f"rank {rank} trains" in job.output() for rank in range(2)), "both train", WAIT_S)
        at_s = signalled(job.family(), signal.SIGTERM)
        job.wait(WAIT_S, exit_code=1)
        took_s = time.monotonic() - at_s
        step = int(job.output().partition("drained at step ")[2].partition(",")[0])
        if not (checkpoints / f"step_{step:010d}").exists():
            raise job.failure("there is no checkpoint")
        name = "SIGTERM to every process, with loaders' workers and --grace 8"
        found.append({"name": name, "left": "the last step's checkpoint", "exit_code": 1, "took_s": took_s})
    of_stop, of_term = (json.loads(path.read_text(encoding="utf-8"))["recoveries"] for path in reports)
    if of_stop or any(each["failed_ranks"] for each in of_term):  # SIGTERM ends loaders' workers, which undoes a step
        raise JobFailed(f"signals to all have cost recoveries: {of_stop}, {of_term}")
    return found


def signalled(processes: list[psutil.Process], number: signal.Signals) -> float:
    """Sends a signal to processes. Returns the time, in seconds of the monotonic clock."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return time.monotonic()


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables."""
    found = []
    columns = ("job on four ranks", "--hang-after", "recoveries", "exit code")
    titles = {"quiet": "Pauses that must cost nothing", "beyond": "Pauses of one rank beyond its deadline"}
    for part, title in titles.items():
        rows = [
            [row["name"], f"{row['hang_after_s']:g} s", str(len(row["recoveries"])), str(row["exit_code"])]
            for row in result.get(part, [])
        ]
        if rows:
            found.append(Section(title, columns, rows, ["The weights of all jobs are those of an undisturbed run."]))
    if result.get("hangs"):
        rows = [
            [row["name"], f"{row['hang_after_s']:g} s", f"{row['detect'] / 1000:.2f}", f"{row['gap'] / 1000:.2f}"]
            for row in result["hangs"]
        ]
        columns = ("a rank hangs in its forward", "--hang-after", "known after, s", "next step after, s")
        found.append(Section("Hangs", columns, rows, ["From the last progress of the rank that hangs."]))
    if result.get("kills"):
        rows = [
            [row["name"], str(len(row["recoveries"])), f"≤ {max(row['again'])}", str(row["exit_code"])]
            for row in result["kills"]
        ]
        columns = ("job on four ranks", "recoveries", "steps computed again", "exit code")
        found.append(Section("Kills at random instants", columns, rows, ["The same weights, bit for bit."]))
    if result.get("signals"):
        rows = [[row["name"], row["left"], f"{row['took_s']:.2f}", str(row["exit_code"])] for row in result["signals"]]
        columns = ("job of two ranks", "", "ended after, s", "exit code")
        found.append(Section("Signals", columns, rows, ["From the last signal."]))
    return found


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("Silence", result) + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Runs the parts, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    folder = args.results or (None if args.quick else RESULTS)
    known = {**page.provenance("silence.py"), "settings": {"seed": args.seed}}
    functions = {"A": quiet, "B": beyond, "C": hangs, "D": kills, "E": signals}
    parts = [(letter, function.__name__, function) for letter, function in functions.items()]
    return page.carry_out(
        "silence", known, lambda: page.measure_parts(parts, args, console), sections, markdown, console, folder
    )


if __name__ == "__main__":
    sys.exit(main())
