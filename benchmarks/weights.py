"""Time to publish weights, compared with the limits of this machine.

    python benchmarks/weights.py                        0.5 and 2 GiB, 2 and 4 devices; minutes on two idle cores
    python benchmarks/weights.py --gib 2 --devices 4    one case
    python benchmarks/weights.py --failures             also the cost of a broken process (--failures only: just that)
    python benchmarks/weights.py --trace update.json    also a trace of the first case, with update.svg beside it
    python benchmarks/weights.py --quick                a smoke test with a tiny model; nothing is written

Each device has a publisher that holds all of the weights, and a consumer that gets all of them. Each is a process with
one thread for torch. In each case the same processes also measure the machine's floors and the ways without keepstep,
between the updates, because the load of a machine changes.

weights_cast.py       the processes, and the model
weights_floors.py     the floors, and the other ways
weights_trace.py      when each stage was busy
weights_failures.py   a process breaks in the middle of an update

Prints tables, and writes ``benchmarks/results/DATE-weights.md``. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import page
import psutil
import weights_failures
from jobs import JobFailed
from page import RESULTS, Section
from rich.console import Console
from weights_cast import (
    Cast,
    Setup,
    architecture_of,
    assembled,
    attach,
    check_equal,
    join_groups,
    memory,
    open_transfer,
    reset_peak,
    stamp,
    update,
)
from weights_floors import OTHERS, best_floors, measure_floors, measure_other
from weights_trace import STAGES, Timeline, Work, write_trace

from keepstep.weights.publisher import DEFAULT_BUCKET_BYTES

GIB, MIB = 1 << 30, 1 << 20
QUICK = {"gib": [1 / 128], "devices": [2], "updates": 2, "other_runs": 1, "failure_runs": 1, "bucket_mib": 1.0}
FAILURE_BYTES = 64 * MIB
TRANSFER_DEADLINE_S = 60.0


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, action="append", help="size of the weights; repeatable (default: 0.5, 2)")
    parser.add_argument("--devices", type=int, action="append", help="number of devices; repeatable (default: 2, 4)")
    parser.add_argument("--updates", type=int, default=10, help="after the first one (default: %(default)s)")
    parser.add_argument(
        "--other-runs", type=int, default=2, help="runs of each other way, twice as many in all (default: %(default)s)"
    )
    parser.add_argument(
        "--bucket-mib",
        type=float,
        default=DEFAULT_BUCKET_BYTES / MIB,
        help="size of a bucket (default: %(default)g, as in the product)",
    )
    parser.add_argument("--atomic", action="store_true", help="consumers load into a second set of tensors")
    parser.add_argument("--failures", nargs="?", const="too", choices=("too", "only"), help="break processes")
    parser.add_argument("--failure-runs", type=int, default=3, help="of each failure (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="file for the trace of one update; a picture .svg goes beside it")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for any one wait (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, help=f"where the page goes (default: {RESULTS.parent.name}/{RESULTS.name})"
    )
    args = page.parsed(parser, QUICK)
    args.gib, args.devices = args.gib or [0.5, 2.0], args.devices or [2, 4]
    for name in ("updates", "other_runs", "failure_runs", "bucket_mib", "gib", "devices"):
        value = getattr(args, name)
        if (min(value) if isinstance(value, list) else value) <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: only numbers above 0")
    if args.failures == "only" and args.trace is not None:
        parser.error("--trace needs updates: not with --failures only")
    return args


# ---- one case -------------------------------------------------------------------------------------------------------


class Case:
    """One size of the weights and number of devices: updates, with floors and other ways before, between and after."""

    def __init__(self, cast: Cast, args: argparse.Namespace) -> None:
        self._cast, self._args = cast, args
        self._versions = itertools.count(1)
        self._floors: list[dict[str, Any]] = []
        self._others: dict[str, list[float]] = {way: [] for way in OTHERS}
        self._updates: list[dict[str, Any]] = []
        self.timelines: list[Timeline] = []

    def measure(self) -> dict[str, Any]:
        """Measures everything, in its order.

        Raises:
            JobFailed: a process has failed, or received bytes differ from the sent ones.
        """
        cast, num_updates = self._cast, self._args.updates
        cast.ask(cast.all, join_groups)
        self._floors += measure_floors(cast)
        before = cast.ask(cast.all, memory)
        cast.ask(cast.all, reset_peak)
        buffers = cast.ask(cast.all, open_transfer)
        cast.ask(cast.all, attach)
        self._update(1)
        noted = [cast.ask(cast.all, memory)]
        self._update(num_updates // 2)
        noted.append(cast.ask(cast.all, memory))
        self._compare(self._args.other_runs)
        noted.append(cast.ask(cast.all, memory))
        self._update(num_updates - num_updates // 2)
        noted.append(cast.ask(cast.all, memory))
        self._compare(self._args.other_runs)
        setup = cast.setup
        return {
            "gib": round(setup.architecture.num_bytes / GIB, 4),
            "devices": setup.num_devices,
            "model": str(setup.architecture),
            "updates": self._updates,
            "floors": self._floors,
            "others": self._others,
            "memory": [
                {"process": cast.name(number), **_memory_of(number, before, buffers, noted)} for number in cast.all
            ],
            "shared_now": sum(each["pss_shmem"] for each in noted[1]) - sum(each["pss_shmem"] for each in before),
        }

    def _update(self, num_updates: int) -> None:
        cast = self._cast
        for version in itertools.islice(self._versions, num_updates):
            cast.ask(cast.publishers, stamp, version)
            answers = cast.ask(cast.all, update, version)
            timings = [timing for timing, _spans in answers]
            begun_s = min(timings[number].begun_s for number in cast.publishers)
            works = tuple(
                Work(number % cast.setup.num_devices, *span)
                for number, (_timing, spans) in enumerate(answers)
                for span in spans
            )
            ended_s = max(timing.ended_s for timing in timings)
            timeline = Timeline(round(begun_s * 1e9), round(ended_s * 1e9), works)
            self.timelines.append(timeline)
            self._updates.append(
                {
                    "seconds": ended_s - begun_s,
                    "cpu_s": sum(timing.cpu_s for timing in timings),
                    "busy": {stage: timeline.busy_share(stage) for stage in STAGES},
                    "overlap": {str(number): timeline.overlap(number) for number in (2, 3)},
                    "overlap_device_0": {str(number): timeline.overlap(number, device=0) for number in (2, 3)},
                }
            )

    def _compare(self, num_runs: int) -> None:
        check_equal(self._cast, "keepstep")
        for way, seconds in self._others.items():
            seconds += [measure_other(self._cast, way) for _ in range(num_runs)]
        self._floors += measure_floors(self._cast)


Noted = Sequence[dict[str, int]]
"""The result of `memory` for each process."""


def _memory_of(number: int, before: Noted, buffers: Sequence[int], noted: Sequence[Noted]) -> dict[str, int]:
    """Returns the memory that one process has taken.

    Args:
        number: the number of the process.
        before: the memory before the publisher or consumer was made.
        buffers: the sizes of the buffers that publishers report.
        noted: the memory after the first update, before and after the other ways, and at the end of the updates.
    """
    first, before_pause, after_pause, last = (each[number] for each in noted)
    growth = {
        f"{what}_growth": before_pause[what] - first[what] + last[what] - after_pause[what]
        for what in ("rss", "rss_shmem", "descriptors")
    }
    peak = before_pause["peak"] - before[number]["rss"]
    mapped = before_pause["rss_shmem"] - before[number]["rss_shmem"]
    return {"buffer_bytes": buffers[number], "peak": peak, "mapped": mapped, "private": peak - mapped, **growth}


def check_room(setup: Setup) -> None:
    """Raises:
    JobFailed: the weights of all processes, and the files of the other ways, do not fit into this machine's memory.
    """
    copies = setup.num_devices * (3 if setup.atomic else 2) + 1
    needed, free = copies * setup.architecture.num_bytes + GIB, psutil.virtual_memory().available
    if needed > free:
        raise JobFailed(f"{needed / GIB:.1f} GiB of memory are needed, {free / GIB:.1f} are there: use a smaller --gib")


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures all cases, and the failures."""
    result: dict[str, Any] = {"cases": []}
    bucket_bytes = round(args.bucket_mib * MIB)
    cases = itertools.product(args.gib, args.devices) if args.failures != "only" else []
    for number, (gib, devices) in enumerate(cases):
        console.print(f"{gib:g} GiB, {devices} devices: {args.updates} updates ...", highlight=False)
        model = architecture_of(round(gib * GIB))
        setup = Setup(model, devices, bucket_bytes, TRANSFER_DEADLINE_S, args.atomic, Path())
        check_room(setup)
        with assembled(setup, args.deadline) as cast:
            case = Case(cast, args)
            result["cases"].append(case.measure())
        if args.trace is not None and number == 0:
            later = sorted(case.timelines[1:], key=lambda timeline: timeline.ended_ns - timeline.begun_ns)
            title = f"Publishing {model.num_bytes / GIB:.3g} GiB to {devices} devices"
            console.print(f"written: {args.trace}, {write_trace(args.trace, later[len(later) // 2], title)}")
    if args.failures is not None:
        console.print(f"{args.failure_runs} × {len(weights_failures.FAILURES)} failures ...", highlight=False)
        result["failures"] = weights_failures.measure(architecture_of(FAILURE_BYTES), args.failure_runs, args.deadline)
    return result


# ---- output ---------------------------------------------------------------------------------------------------------


def sections(result: dict[str, Any]) -> Iterator[Section]:
    """Returns the tables of a result."""
    if result["cases"]:
        yield _updates(result)
        yield _stages(result)
        yield _floors(result)
        yield _memory(result)
        yield _others(result)
    if "failures" in result:
        yield weights_failures.section(result["failures"])


def _name(case: dict[str, Any]) -> str:
    return f"{case['gib']:.3g} GiB, {case['devices']} devices"


def _later(case: dict[str, Any], *keys: str) -> list[float]:
    """Returns a figure of every update except the first."""
    found: list[Any] = case["updates"][1:]
    for key in keys:
        found = [each[key] for each in found]
    return found


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


COPIES, MAPPED_COPIES = ("h2d", "memcpy", "reload"), ("h2d", "reload")
"""Stages that copy: with a copy from device to device, and if consumers map the buffers of all sources."""


def floors_of(case: dict[str, Any], cores: int) -> dict[str, float]:
    """Returns the seconds of a perfect pipeline, in four definitions.

    gloo: its slowest stage, with gloo between the devices. memcpy: its slowest stage, with one copy between them.
    cores: all copies of memcpy, evenly distributed over all cores. cores, mapped: the same without the copies between
    the devices, as if consumers map the buffers of all sources.
    """
    best = best_floors(case["floors"])
    return {
        "gloo": max(best[stage]["seconds"] for stage in ("h2d", "gloo", "reload")),
        "memcpy": max(best[stage]["seconds"] for stage in COPIES),
        "cores": copies_cpu_s(case, COPIES) / cores,
        "cores, mapped": copies_cpu_s(case, MAPPED_COPIES) / cores,
    }


def copies_cpu_s(case: dict[str, Any], stages: Sequence[str]) -> float:
    """Returns the processor seconds of some stages, each run alone."""
    best = best_floors(case["floors"])
    return sum(best[stage]["cpu_s"] for stage in stages)


def _table(title: str, what: str, cases: dict[str, dict[str, str]], notes: list[str]) -> Section:
    """Returns a table with a column for each case and a row for each figure."""
    rows = [[figure, *(found[figure] for found in cases.values())] for figure in next(iter(cases.values()))]
    return Section(title, (what, *cases), rows, notes)


def _updates(result: dict[str, Any]) -> Section:
    cores = result["machine"]["cores"]
    cases = {}
    for case in result["cases"]:
        seconds = _later(case, "seconds")
        measured = statistics.median(seconds)
        cases[_name(case)] = {
            "first update": f"{case['updates'][0]['seconds']:.3f}",
            "later updates: median (min–max)": _spread(seconds),
            "GiB/s, to each device": f"{case['gib'] / measured:.2f}",
            **{
                f"floor, {kind} (floor / measured)": f"{floor:.3f} ({_share(floor / measured)})"
                for kind, floor in floors_of(case, cores).items()
            },
        }
    notes = [
        "an update: from the first publish() that begins to the last publish() or receive() that returns; "
        f"{len(result['cases'][0]['updates']) - 1} after the first. GiB/s: the size of the weights by the median.",
        "floor, gloo: the slowest of the three stages, each alone with all its devices at once, the devices exchanging "
        "buckets with gloo. memcpy: the same, with one copy through shared memory between them. cores: the processor "
        "time of the copies of the memcpy way, spread over all cores: stages that run side by side share them. cores, "
        "mapped: the same for the two copies that are left where consumers map the sources' buffers, as keepstep does. "
        "An update that copies less than a floor can be faster than it.",
    ]
    return _table("Publishing a version", "seconds", cases, notes)


def _stages(result: dict[str, Any]) -> Section:
    cases = {}
    for case in result["cases"]:
        figures: dict[str, tuple[str, ...]] = {f"{name} busy": ("busy", stage) for stage, name in STAGES.items()}
        for where, key in (("anywhere", "overlap"), ("on device 0", "overlap_device_0")):
            figures |= {f"at least two at once, {where}": (key, "2"), f"all three at once, {where}": (key, "3")}
        found = {figure: _share(statistics.median(_later(case, *keys))) for figure, keys in figures.items()}
        used = [cpu_s / s for cpu_s, s in zip(_later(case, "cpu_s"), _later(case, "seconds"), strict=True)]
        cpu_s = statistics.median(_later(case, "cpu_s"))
        for what, stages in (("three copies", COPIES), ("two copies, mapped", MAPPED_COPIES)):
            found[f"processor time of {what} / of the update"] = _share(copies_cpu_s(case, stages) / cpu_s)
        cases[_name(case)] = found | {"cores used": f"{statistics.median(used):.2f}"}
    notes = [
        "busy: a stage of one device at work on a bucket, as the spans of publishers and consumers say; the mean of "
        "all devices. A stage that waits for a core while it is at work counts as busy.",
        "at once: different stages, of any devices, or of device 0. Medians of all updates but the first.",
        "Broadcast tells consumers where a bucket is, and copies nothing. processor time: of the copies by themselves, "
        "as in the floors, and of all processes in an update. A busy machine changes it less than it changes seconds.",
        "cores used: processor time of all processes, checksums and messages included, by the time of the update.",
    ]
    return _table("Which stages were busy", "share of an update", cases, notes)


def _floors(result: dict[str, Any]) -> Section:
    cases = {}
    for case in result["cases"]:
        best, devices = best_floors(case["floors"]), case["devices"]
        stages = {
            "one thread": ("one", 1),
            "H2D": ("h2d", 1),
            "broadcast, gloo": ("gloo", devices),
            "broadcast, memcpy": ("memcpy", devices),
            "reload": ("reload", devices),
        }
        found = {}
        for name, (stage, times) in stages.items():
            seconds, piece = best[stage]["seconds"], best[stage]["piece_bytes"] / MIB
            found[name] = f"{seconds:.3f} ({times * case['gib'] / seconds:.1f} GiB/s; {piece:g} MiB)"
        cases[_name(case)] = found
    pieces = [row["piece_bytes"] for row in result["cases"][0]["floors"] if row["stage"] == "h2d"]
    notes = [
        "one thread: memcpy of all bytes out of a buffer of bucket size into a consumer's weights. reload: the same in "
        "every consumer at once. H2D: every publisher at once copies its share out of its weights into such a buffer.",
        "broadcast: every device gets all bytes, from all sources in turn; gloo: dist.broadcast between publishers, "
        "one from each source on its way at a time; memcpy: between buffers in shared memory.",
        "GiB/s: of all processes together, a broadcast and a reload counting once for each device. Medians of "
        f"{pieces.count(pieces[0])} measurements before, between and after the updates, for the best size of a piece.",
    ]
    return _table("Floors of this machine", "seconds (GiB/s; size of a piece)", cases, notes)


def _memory(result: dict[str, Any]) -> Section:
    figures = {
        "peak": "peak",
        "peak, of it mapped": "mapped",
        "peak, of it private": "private",
        "later growth": "rss_growth",
        "later growth, of it shared": "rss_shmem_growth",
    }
    cases = {}
    for case in result["cases"]:
        bound = f"{max(each['buffer_bytes'] for each in case['memory']) / MIB:.1f}"
        shared = f"{case['shared_now'] / MIB:.1f}"
        cases[_name(case)] = found = {"a publisher's buffers": bound, "all buffers, counted once": shared}
        for role in ("publisher", "consumer"):
            members = [each for each in case["memory"] if each["process"].startswith(role)]
            for figure, key in figures.items():
                found[f"{role}: {figure}"] = f"{max(each[key] for each in members) / MIB:.1f}"
            num = max(each["descriptors_growth"] for each in members)
            found[f"{role}: later growth, descriptors"] = f"{num:+d} files"
    second = "; it includes a consumer's second set of tensors" if result["settings"]["atomic"] else ""
    notes = [
        "a publisher's buffers: what `Publisher.buffer_bytes` says, the bound for what a device takes. all buffers: "
        "the sum of Pss_Shmem over all processes, after the first updates less before they were made.",
        "The others are the largest of any process of the kind. peak: the highest resident memory (VmHWM, reset "
        "before publishers and consumers were made) up to the middle of the updates, less what was resident (Rss of "
        f"smaps_rollup), weights included, when it was reset{second}.",
        "mapped: of the peak, shared memory (RssShmem): a process's own buffers, and those of others that it looks at, "
        "which count in each. private: the rest.",
        f"later growth: of Rss, of RssShmem, and of open files, over the {len(result['cases'][0]['updates']) - 1} "
        "updates after the first together.",
    ]
    return _table("Memory beyond the weights", "MiB", cases, notes)


def _others(result: dict[str, Any]) -> Section:
    cases = {}
    for case in result["cases"]:
        measured = statistics.median(_later(case, "seconds"))
        cases[_name(case)] = found = {"keepstep": _spread(_later(case, "seconds"))}
        for way, seconds in case["others"].items():
            found[way] = _spread(seconds[1:])
            found[f"{way} / keepstep"] = f"{statistics.median(seconds[1:]) / measured:.2f}"
    notes = [f"{way}: {what}." for way, what in OTHERS.items()]
    num = len(result["cases"][0]["others"]["checkpoint"]) - 1
    notes.append(f"Runs of each: {num}, and a first one that is not counted. Ratios of the medians.")
    return _table("Other ways to do it", "seconds: median (min–max)", cases, notes)


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    settings = result["settings"]
    kind = "into a second set of tensors" if settings["atomic"] else "in place"
    lines = [f"* {_name(case)}: {case['model']}.\n" for case in result["cases"]]
    setup = (
        f"* Each device: a publisher with all of the weights and a consumer that gets all of them, {kind}, each in a\n"
        f"  process with one thread for torch. Buckets of {settings['bucket_mib']:g} MiB.\n"
    )
    head = page.heading("Publishing weights", result) + setup + "".join(lines) + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    settings = {name: getattr(args, name) for name in ("bucket_mib", "atomic")}
    known = {**page.provenance("weights.py"), "settings": settings}
    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out("weights", known, lambda: measure(args, console), sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
