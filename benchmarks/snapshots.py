"""Cost of snapshots in memory, and time to restore a lost shard without a replica from one.

    python benchmarks/snapshots.py                everything; about fifteen minutes on two idle cores
    python benchmarks/snapshots.py --only a       the cost alone
    python benchmarks/snapshots.py --quick        a smoke test; nothing is written

a: four ranks, each with its part of 50 M parameters with Adam's state, train steps of about 100 and 500 ms: without
snapshots, with one in each step, and with one in every tenth. The jobs run at the same time and take turns. Forward and
backward do not communicate, so the time of a copy is taken from computing. The floor is the time to copy and hash the
same bytes if all ranks do it at once on the same cores and do nothing else.

b: FSDP2 on four ranks with 50 M parameters loses ranks (snapshots_kills.py): under keepstep, where each lost rank is
restored from its snapshot; and under torchrun with an asynchronous checkpoint of torch's DCP in each step, where all
ranks restart. DDP under keepstep is measured, too.

Prints tables, and writes ``benchmarks/results/DATE-snapshots.md``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import page
import snapshots_kills
import xxhash
from jobs import JobFailed
from overhead import Shape, Turns, calibrated
from page import RESULTS, Section
from rich.console import Console

from keepstep.protocol.snapshots import fewest_steps

RANKS, CORES_OF_A_RANK = 4, 0.5
WIDTH, DEPTH = 1024, 12
"""Width and depth of a rank's part of the model: 12.6 M parameters."""
BLOCK = 22
"""Steps in a turn: those that do not count at its start, and a multiple of the longest interval between snapshots."""
EVERY = {"none": "off", "each step": "1", "each tenth step": "10"}
STEP_MS = (100, 500)
CHUNK_BYTES = 1 << 20
QUICK = {
    "starts": 1,
    "turns": 1,
    "kills": 1,
    "step_ms": [100],
    "depth": 1,
    "width": 64,
    "series": [name for name in snapshots_kills.SERIES if "model before" in name or "DCP" in name],
}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("a", "b"))
    parser.add_argument("--starts", type=int, default=3, help="of the jobs of a (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each job and start (default: %(default)s)")
    parser.add_argument("--step-ms", type=int, nargs="+", default=list(STEP_MS))
    parser.add_argument("--kills", type=int, default=8, help="of each system in b (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    parser.set_defaults(width=WIDTH, depth=DEPTH, series=list(snapshots_kills.SERIES))
    return page.parsed(parser, QUICK)


# ---- a: the cost ----------------------------------------------------------------------------------------------------


def cost(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures all lengths of steps."""
    num_bytes = 3 * 4 * args.depth * (args.width + 1) * args.width  # parameters and two moments, float32
    return {
        "num_bytes": num_bytes,
        "floor_ms": floor_ms(num_bytes),
        "sizes": [cost_of(step_ms, args, folder) for step_ms in args.step_ms],
    }


def cost_of(step_ms: int, args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Measures one length of steps. Returns the milliseconds of a step for each start and interval of snapshots."""
    shape = calibrated(step_ms * CORES_OF_A_RANK, args.width, args.depth)
    starts = []
    for number in range(args.starts):
        with tempfile.TemporaryDirectory(dir=root) as name:
            starts.append(one_start(shape, args.turns, number, Path(name)))
    return {"step_ms": step_ms, "starts": starts}


def one_start(shape: Shape, num_turns: int, number: int, root: Path) -> dict[str, Any]:
    """Starts all jobs and lets them take turns. The first turn of each does not count."""
    with ExitStack() as stack:
        jobs = {}
        for name, every in (EVERY | {"auto": "auto"}).items():
            folder = root / every
            folder.mkdir()
            command = shape.command("keepstep", RANKS, folder, "--block", str(BLOCK), "--snapshots", every)
            jobs[name] = Turns(command, folder, RANKS, stack)
        jobs["auto"].take()
        names = list(EVERY)
        for turn in range(1 + num_turns):
            for place in range(len(names)):
                jobs[names[(number + turn + place) % len(names)]].take()
        steps_ms = {name: float(np.mean(jobs[name].blocks(BLOCK)[0][1:])) for name in names}
        output = (jobs["auto"].folder / "output.log").read_text(encoding="utf-8")
    found = re.search(r"keepstep: (each step|every (\d+) steps) all ranks copy", output)
    if found is None:
        raise JobFailed(f'snapshot_every="auto" said nothing\n{output[-2000:]}')
    return {"mean_ms": steps_ms, "auto_every": int(found[2] or 1)}


def floor_ms(num_bytes: int, repeats: int = 7) -> float:
    """Returns how long all ranks take, at the same time, to copy and hash ``num_bytes`` each: the median of repeats."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(RANKS)
    with context.Pool(RANKS, _share_barrier, (barrier,)) as pool:
        times = pool.starmap(_copy_and_hash, [(num_bytes, repeats)] * RANKS, chunksize=1)
    return 1000 * statistics.median(max(each) for each in zip(*times, strict=True))


def _share_barrier(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _copy_and_hash(num_bytes: int, repeats: int) -> list[float]:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    times = []
    for _ in range(repeats):
        _barrier.wait(60)
        begun_s = time.perf_counter()
        checksum = xxhash.xxh3_128()
        for begin in range(0, num_bytes, CHUNK_BYTES):
            end = min(num_bytes, begin + CHUNK_BYTES)
            target[begin:end] = source[begin:end]
            checksum.update(target[begin:end])
        times.append(time.perf_counter() - begun_s)
    return times


def _cost_section(result: dict[str, Any]) -> Section:
    rows = []
    for size in result["sizes"]:
        none_ms = statistics.median(start["mean_ms"]["none"] for start in size["starts"])
        row = [f"{size['step_ms']} ms", f"{none_ms:.0f}"]
        for name in list(EVERY)[1:]:
            more = sorted(start["mean_ms"][name] / start["mean_ms"]["none"] - 1 for start in size["starts"])
            row.append(f"{100 * statistics.median(more):+.1f} % ({100 * more[0]:+.1f} to {100 * more[-1]:+.1f})")
        one_ms = statistics.median(start["mean_ms"]["each step"] - start["mean_ms"]["none"] for start in size["starts"])
        row += [f"{one_ms:.0f}", f"{100 * result['floor_ms'] / none_ms:.1f} %"]
        row += [str(fewest_steps(cost_ms, none_ms)) for cost_ms in (one_ms, result["floor_ms"])]
        row.append(", ".join(str(start["auto_every"]) for start in size["starts"]))
        rows.append(row)
    columns = (
        "steps of",
        "without, ms",
        "one in each step",
        "in each tenth",
        "a snapshot, ms",
        "floor of one in each",
        "fewest steps for 1 %",
        "by the floor",
        "auto",
    )
    notes = [
        f"{RANKS} ranks, each with {result['num_bytes'] / 1e6:.0f} MB of state, one copy of it on this node. Medians "
        f"of {len(result['sizes'][0]['starts'])} starts (least to most), means of the steps of a start.",
        f"floor: all ranks copy and hash these bytes at once in {result['floor_ms']:.0f} ms, on cores that do nothing "
        "else; on cores that compute all the time a snapshot cannot cost less than that.",
        "fewest steps for 1 %: from the cost of one in each step. auto: what snapshot_every='auto' chose.",
    ]
    return Section("What snapshots cost", columns, rows, notes)


# ---- altogether -----------------------------------------------------------------------------------------------------

PARTS = (("a", "cost", cost), ("b", "kills", snapshots_kills.measure))


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables of the parts that were measured."""
    made = {"cost": _cost_section, "kills": snapshots_kills.section}
    return [make(result[name]) for name, make in made.items() if name in result]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("Snapshots in memory", result) + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    folder = args.results or (None if args.quick else RESULTS)
    known = page.provenance("snapshots.py")

    def measure() -> dict[str, Any]:
        return page.measure_parts(PARTS, args, console)

    return page.carry_out("snapshots", known, measure, sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
