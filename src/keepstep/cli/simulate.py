"""``keepstep simulate``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from keepstep.errors import ConfigurationError
from keepstep.sim import batch
from keepstep.sim.batch import Tally
from keepstep.sim.run import case_of, run
from keepstep.sim.shrink import shrink, with_faults
from keepstep.sim.track_record import append_soak

DEFAULT_SEEDS = 1000


def main(arguments: list[str]) -> int:
    """Simulates jobs from seeds, replays one, or explores all interleavings. Returns 0 only if no check failed."""
    chosen = _parser().parse_args(arguments)
    console = Console(soft_wrap=True)
    if chosen.exhaustive is not None:
        return _explore(console, chosen.exhaustive, chosen.shards, chosen.delays)
    if chosen.seed is not None:
        return _replay(console, chosen)
    end = None if chosen.seeds is None and chosen.seconds else chosen.first + (chosen.seeds or DEFAULT_SEEDS)
    if chosen.json_lines:
        for tally in batch.run_seeds(chosen.first, end, chosen.stride, chosen.seconds):
            sys.stdout.buffer.write(msgspec.json.encode(tally) + b"\n")
            sys.stdout.buffer.flush()
        return 0
    return _batch(console, chosen, end)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keepstep simulate",
        description="Runs whole jobs in virtual time, each from one seed: the real machines of controller, agents and "
        "workers, a cluster that fails, and an oracle that watches.",
    )
    many = parser.add_argument_group("many seeds")
    many.add_argument("--seeds", type=int, help=f"how many (default: {DEFAULT_SEEDS})")
    many.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="the first one")
    many.add_argument("--seconds", type=float, help="stop after this many seconds")
    many.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    many.add_argument("--track-record", type=Path, metavar="FILE", help="add a row to the last table of this page")
    many.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    many.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    many.add_argument("--json-lines", action="store_true", help=argparse.SUPPRESS)
    one = parser.add_argument_group("one seed")
    one.add_argument("--seed", type=int, help="run this seed and print its trace")
    one.add_argument("--faults", help="only these faults of the seed's plan, by number: 0,2")
    one.add_argument(
        "--record", type=Path, metavar="DIR", help="write the run to a folder, for 'keepstep dashboard DIR'"
    )
    one.add_argument("--shrink", action="store_true", help="find the smallest set of its faults that still fails")
    small = parser.add_argument_group("all interleavings around one failure")
    small.add_argument("--exhaustive", type=int, metavar="RANKS", help="of a job of this many ranks and a spare")
    small.add_argument(
        "--shards", type=int, default=1, metavar="N", help="with this many shards (default: %(default)s)"
    )
    small.add_argument("--delays", type=int, metavar="N", help="only those that delay older events this many times")
    return parser


def _replay(console: Console, chosen: argparse.Namespace) -> int:
    seed, kept = chosen.seed, None
    case = case_of(seed)
    if chosen.faults is not None:
        kept = _numbers(chosen.faults, len(case.plan))
        case = with_faults(case, kept)
    outcome = run(case)
    if chosen.shrink and outcome.check is not None:
        case, kept = shrink(outcome)
        console.print(f"replay: {replay_command(seed, kept)}\n", highlight=False, markup=False)
    outcome = run(case, tell=True, record=chosen.record)
    console.print("\n".join(outcome.story), highlight=False, markup=False)
    return int(outcome.check is not None)


def _explore(console: Console, num_ranks: int, num_shards: int, max_delays: int | None) -> int:
    from keepstep.sim.exhaustive.explorer import Explorer, small_job

    if num_ranks < 2:
        raise ConfigurationError(f"--exhaustive {num_ranks}: allowed are 2 and more")
    if num_shards < 1 or num_ranks % num_shards:
        raise ConfigurationError(f"--shards {num_shards}: {num_ranks} ranks hold as many replicas of each shard")
    if max_delays is not None and max_delays < 0:
        raise ConfigurationError(f"--delays {max_delays}: allowed are 0 and more")
    snapshot_every = int(num_shards == num_ranks)  # without replicas, snapshots are the only state to restore
    found = Explorer(small_job(num_ranks, snapshot_every, num_shards), max_delays).explore()
    shards = f" with {num_shards} shards" if num_shards > 1 else ""
    delays = "" if max_delays is None else f", up to {max_delays} delays"
    console.print(
        f"{num_ranks} ranks{shards} and a spare, one rank killed at any point of a step{delays}: "
        f"{found.num_states:,} states, {found.num_transitions:,} transitions, {found.num_ends:,} ways to resume, "
        f"at most {found.longest} events",
        highlight=False,
    )
    if found.violation is not None:
        console.print("\n".join((found.violation, *found.path)), highlight=False, markup=False)
    return int(found.violation is not None)


def _numbers(text: str, count: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ConfigurationError(f"--faults {text}: give numbers such as 0,2") from None
    if any(not 0 <= number < count for number in numbers):
        raise ConfigurationError(f"--faults {text}: the plan of this seed has faults 0 to {count - 1}")
    return numbers


def replay_command(seed: int, kept: tuple[int, ...] | None = None) -> str:
    """Returns the command that replays a failing seed."""
    faults = "" if kept is None else f" --faults {','.join(map(str, kept))}"
    return f"keepstep simulate --seed {seed}{faults}"


def _batch(console: Console, chosen: argparse.Namespace, end: int | None) -> int:
    if chosen.jobs < 1 or (chosen.seeds is not None and chosen.seeds < 1):
        raise ConfigurationError("--jobs and --seeds: allowed are 1 and more")
    total, begun_s = Tally(), time.monotonic()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=None if end is None else end - chosen.first)
        for tally in batch.run_on_all_cores(chosen.first, end, chosen.jobs, chosen.seconds):
            total.add(tally)
            progress.update(task, completed=total.num_seeds, description=f"{total.num_failures} failures")
    console.print(summary(total), highlight=False)
    for failed in total.failed[:20]:
        console.print(f"  {failed.check}: {failed.detail}", highlight=False, markup=False)
        console.print(f"    {replay_command(failed.seed)} --shrink", highlight=False, markup=False)
    if chosen.track_record is not None:
        append_soak(chosen.track_record, total, time.monotonic() - begun_s, chosen.jobs)
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(total), indent=2))
    return int(bool(total.failed))


def summary(total: Tally) -> str:
    """Returns the results of many seeds in one line."""
    return (
        f"{total.num_seeds:,} seeds, {total.num_failures:,} simulated failures, {total.num_recoveries:,} recoveries, "
        f"{total.num_events:,} events, {total.virtual_s / 3600:,.1f} h of virtual time; "
        f"{len(total.failed)} seeds failed"
    )
