"""Compares keepstep with torchft, NVRx and torchrun: the time from the loss of a rank to the next completed step.

    make bench-peers                              everything, in an environment with all of them; about twenty minutes
    python benchmarks/peers.py --only keepstep    one system, by the beginning of its name
    python benchmarks/peers.py --quick            a smoke test with a tiny model; nothing is written

All train the same model with the same data on three ranks. The systems take turns. In each turn a job starts, the
benchmark kills ranks of it (SIGKILL) at random times, the same ranks at the same times for all systems, and the job
ends. Turns with a stopped rank (SIGSTOP) follow. The last job of each system is undisturbed, and the benchmark compares
the parameters of the others with its own. If a system does not overcome a fault before the deadline, the fault counts
as not overcome, and is not repeated.

Prints a table, and writes ``benchmarks/results/DATE-peers.md`` and the README's table. The machine should have nothing
else to do.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import page
from jobs import Workload, median_step_s
from page import RESULTS, Section
from peers_faults import Lost, PeerJob, digests, strike
from peers_systems import CHECKPOINT_EVERY, SYSTEMS, System, versions
from rich.console import Console
from train_plain import load_example

QUICK = {"kills": 1, "hangs": 1, "size": "small", "deadline": 30.0}
README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- made by benchmarks/peers\.py -->\n).*?(<!-- end -->)", re.DOTALL)
INTRODUCTION = """\
One of three ranks is killed at a random instant: the time until the next completed step, and what is lost.
[`make bench-peers`](benchmarks/peers.py) measures all systems in one run, in turns, with the same model and data, each
at its default and at the lowest practical setting. Compare the orders of magnitude, not the digits: other hardware
gives other numbers.
"""
KILLS_PER_JOB = 2
LONG_HANG_S = 30.0
"""A system that takes longer than this to overcome a stopped rank gets only one such fault."""
WORLD_SIZE = 3


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="for each system and setting (default: %(default)s)")
    parser.add_argument("--hangs", type=int, default=3, help="stopped ranks, the same (default: %(default)s)")
    parser.add_argument("--size", default="10m", help="a size of examples/train_gpt.py (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="windows per rank (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="systems whose name and setting begin with this")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for a kill (default: %(default)s)")
    parser.add_argument("--hang-deadline", type=float, default=120.0, help="for a stopped rank (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, help=f"where the page goes (default: {RESULTS.parent.name}/{RESULTS.name})"
    )
    args = page.parsed(parser, QUICK)
    if args.kills < 1:
        parser.error(f"--kills {args.kills}: at least 1")
    if not any(system.title.startswith(args.only) for system in SYSTEMS):
        parser.error(f"--only {args.only}: it is one of {', '.join(system.title for system in SYSTEMS)}")
    return args


class Comparison:
    """Runs all turns."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self._args, self._console = args, console
        self._workload = Workload(args.size, args.batch_size, WORLD_SIZE, args.seed, args.deadline)
        chosen = [system for system in SYSTEMS if system.title.startswith(args.only)]
        self.missing = {system.title: why for system in chosen if (why := system.missing())}
        self._systems = [system for system in chosen if system.title not in self.missing]
        self.kills: dict[str, list[dict[str, Any]]] = {system.title: [] for system in self._systems}
        self.hangs: dict[str, list[dict[str, Any]]] = {system.title: [] for system in self._systems}
        self._digests: dict[str, list[dict[int, set[int]]]] = {system.title: [] for system in self._systems}

    def measure(self) -> dict[str, Any]:
        """Takes all turns, and returns the figures."""
        for begin in range(0, self._args.kills, KILLS_PER_JOB):
            numbers = range(begin, min(begin + KILLS_PER_JOB, self._args.kills))
            for system in self._in_turn(begin // KILLS_PER_JOB):
                self._kill(system, list(numbers))
        for number in range(self._args.hangs):
            for system in self._in_turn(number):
                if number == 0 or self._is_quick_at_hangs(system):
                    self._hang(system, number)
        references = {system.name: self._undisturbed(system) for system in self._one_of_each_name()}
        return {
            "versions": versions(),
            "settings": {system.title: system.says for system in SYSTEMS},
            "missing": self.missing,
            "undisturbed": {name: reference["step_ms"] for name, reference in references.items()},
            "systems": {system.title: self._row(system, references[system.name]) for system in self._systems},
        }

    def _in_turn(self, number: int) -> list[System]:
        """Returns all systems, each time beginning with another one."""
        first = number % max(1, len(self._systems))
        return self._systems[first:] + self._systems[:first]

    def _one_of_each_name(self) -> list[System]:
        """Returns each system with its lowest setting. An undisturbed job does not depend on the setting."""
        return list({system.name: system for system in self._systems}.values())

    def _is_quick_at_hangs(self, system: System) -> bool:
        return self.hangs[system.title][0].get("gap_ms", 1000 * LONG_HANG_S) < 1000 * LONG_HANG_S

    def _kill(self, system: System, numbers: list[int]) -> None:
        """Kills a rank for each number, in one job if it overcomes all of them."""
        while numbers:
            with _folder() as name, PeerJob(system, self._workload, Path(name)) as job:
                while numbers:
                    row = strike(job, self._workload, signal.SIGKILL, numbers.pop(0), whole=True)
                    self.kills[system.title].append(row)
                    self._tell(system, "kill", row)
                    if row["outcome"] != "overcome":
                        break
                else:
                    self._note_digests(system, job)

    def _hang(self, system: System, number: int) -> None:
        workload = Workload(**{**vars(self._workload), "deadline_s": self._args.hang_deadline})
        with _folder() as name, PeerJob(system, workload, Path(name)) as job:
            row = strike(job, workload, signal.SIGSTOP, number, whole=False)
        self.hangs[system.title].append(row)
        self._tell(system, "stop", row)

    def _note_digests(self, system: System, job: PeerJob) -> None:
        """Waits until the parameters after the last recovery are known."""
        try:
            job.wait_until(lambda: bool(digests(job.events())), "parameters to compare", self._workload.deadline_s)
        except Lost as lost:
            self.kills[system.title][-1] |= {"outcome": str(lost), "said": job.said()}
            return
        self._digests[system.title].append(digests(job.events()))

    def _undisturbed(self, system: System) -> dict[str, Any]:
        """Returns steps and parameters of a job without a fault, up to the last step of this system's other jobs."""
        others = [found for title, found in self._digests.items() if title.startswith(system.name)]
        last_step = max((max(each) for found in others for each in found), default=CHECKPOINT_EVERY)
        deadline_s = 10 * self._workload.deadline_s
        with _folder() as name, PeerJob(system, self._workload, Path(name)) as job:
            try:
                job.wait_until(lambda: last_step <= max(digests(job.events()), default=0), "the last step", deadline_s)
            except Lost as lost:
                self._console.print(f"{system.title}, undisturbed: {lost}\n{job.said()}", highlight=False)
            events = job.events()
        self._console.print(f"{system.name}, undisturbed: {last_step + 1} steps", highlight=False)
        return {"step_ms": round(1000 * median_step_s(events, after_step=3), 3), "digests": digests(events)}

    def _row(self, system: System, reference: dict[str, Any]) -> dict[str, Any]:
        compared = [
            all(hashes == reference["digests"].get(step) for step, hashes in found.items())
            for found in self._digests[system.title]
        ]
        return {
            "kills": self.kills[system.title],
            "hangs": self.hangs[system.title],
            "jobs_compared": len(compared),
            "jobs_equal": sum(compared),
        }

    def _tell(self, system: System, fault: str, row: dict[str, Any]) -> None:
        took = f"{row['gap_ms'] / 1000:.2f} s" if "gap_ms" in row else ""
        self._console.print(f"{system.title}: {fault} of rank {row['rank']}: {row['outcome']} {took}", highlight=False)


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="keepstep-bench-", ignore_cleanup_errors=True)


def overcome(rows: list[dict[str, Any]], figure: str) -> list[float]:
    """Returns a figure for each fault that was overcome."""
    return [row[figure] for row in rows if row["outcome"] == "overcome" and figure in row]


def seconds(values: list[float]) -> str:
    """Returns the median and the range of values in milliseconds, in seconds."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0] / 1000:.2f}"
    return f"{statistics.median(values) / 1000:.2f} ({min(values) / 1000:.2f}–{max(values) / 1000:.2f})"


def share(values: list[dict[str, Any]]) -> str:
    """Returns how many of all faults were overcome."""
    return f"{len(overcome(values, 'gap_ms'))} of {len(values)}"


def steps_again(rows: list[dict[str, Any]]) -> str:
    """Returns the median and the maximum number of repeated steps."""
    again = overcome(rows, "steps_again")
    return f"{statistics.median(again):g} (≤ {max(again)})" if again else "-"


def survivors_kept(rows: list[dict[str, Any]]) -> str:
    """Returns how many of the surviving processes continued after a kill that was overcome."""
    kept = overcome(rows, "survivors")
    return f"{sum(kept)} of {len(kept) * (WORLD_SIZE - 1)}" if kept else "-"


def equal(row: dict[str, Any]) -> str:
    """Returns how many jobs had the parameters of an undisturbed one."""
    return f"{row['jobs_equal']} of {row['jobs_compared']}" if row["jobs_compared"] else "-"


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables."""
    killed, stopped = [], []
    for title, row in result["systems"].items():
        kills, hangs = row["kills"], row["hangs"]
        gaps, recoveries, whole = (overcome(kills, figure) for figure in ("gap_ms", "recovery_ms", "whole_ms"))
        times = [seconds(gaps), seconds(recoveries), seconds(whole)]
        killed.append([title, share(kills), *times, steps_again(kills), survivors_kept(kills), equal(row)])
        if hangs:
            gaps, recoveries = (overcome(hangs, figure) for figure in ("gap_ms", "recovery_ms"))
            stopped.append([title, share(hangs), seconds(gaps), seconds(recoveries), steps_again(hangs)])
    figures = ("overcome", "to the first step", "without the step itself")
    notes = [
        "Seconds: median (lowest–highest), of the faults that were overcome. first step: completed by all ranks that "
        "then train. without the step itself: less the job's median step. whole: three ranks train again.",
        f"again: steps computed again, that of the kill included; a checkpoint every {CHECKPOINT_EVERY} steps "
        "under NVRx and torchrun. survivors: processes that were not killed and went on.",
        "equal: jobs whose parameters, after their kills, are bit for bit those of an undisturbed job of the same "
        "system. Every step seeds its random numbers, so that a repeated one draws the same.",
        "A step undisturbed: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in result["undisturbed"].items()) + ".",
    ]
    notes += [f"{title}: not measured, {why}." for title, why in result["missing"].items()]
    columns = ("SIGKILL", *figures, "whole", "again", "survivors", "equal")
    found = [Section("A rank is killed", columns, killed, notes + not_overcome(result, "kills"))]
    if stopped:
        hang_notes = [f"A system that took longer than {LONG_HANG_S:g} s was asked once."]
        notes = hang_notes + not_overcome(result, "hangs")
        found.append(Section("A rank is stopped", ("SIGSTOP", *figures, "again"), stopped, notes))
    return found


def not_overcome(result: dict[str, Any], faults: str) -> list[str]:
    """Returns a note for each kind of failure of a system to overcome its faults."""
    found: dict[str, int] = {}
    for title, row in result["systems"].items():
        for fault in row[faults]:
            if fault["outcome"] != "overcome":
                text = f"{title}, {fault['outcome']}, {fault['survivors']} of {WORLD_SIZE - 1} survivors alive; "
                text += f"it said: {fault['said']}"
                found[text] = found.get(text, 0) + 1
    return [f"{number} × {text}" for text, number in found.items()]


def readme_table(result: dict[str, Any], page_name: str) -> str:
    """Returns the README's table for a result, with the text before and after it."""
    columns = (
        "",
        "kills survived",
        "kill → first step, s",
        "all ranks back, s",
        "steps recomputed",
        "equal parameters",
    )
    lines = [INTRODUCTION, "| " + " | ".join((*columns, "stopped process → first step, s")) + " |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for title, row in result["systems"].items():
        kills = row["kills"]
        times = [seconds(overcome(kills, figure)) for figure in ("gap_ms", "whole_ms")]
        name = f"**{title}**" if title.startswith("keepstep") else title
        stopped = seconds(overcome(row["hangs"], "gap_ms"))
        lines.append("| " + " | ".join([name, share(kills), *times, steps_again(kills), equal(row), stopped]) + " |")
    machine, versions_ = result["machine"], result["versions"]
    used = ", ".join(f"{name} {version}" for name, version in versions_.items() if name != "keepstep")
    source = f"[{page_name}](benchmarks/results/{page_name})"
    lines.append("")
    lines.append(f"Median (lowest–highest). {result['date']}, {machine['cores']} CPU cores, gloo,\n{used}:\n{source}.")
    return "\n".join(lines) + "\n"


def write_readme(path: Path, result: dict[str, Any]) -> None:
    """Replaces the table in the README."""
    table = readme_table(result, f"{result['date']}-peers.md")
    text = BLOCK.sub(lambda found: found[1] + table + found[2], path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    workload = result["workload"]
    head = page.heading("keepstep and its peers", result)
    head += f"""* Job: the GPT of examples/train_gpt.py, size {workload["size"]} ({workload["parameters"] / 1e6:.1f} M
  parameters, AdamW), batch {workload["batch_size"]} per rank, {WORLD_SIZE} ranks, seed {workload["seed"]}.
"""
    head += "".join(f"* {name} {version}\n" for name, version in result["versions"].items())
    head += page.measured_in(result) + "\n"
    settings = "".join(f"* {title}: {says}.\n" for title, says in result["settings"].items())
    tables = "\n".join(section.markdown() for section in sections(result))
    return head + tables + "\n## The settings\n\n" + settings


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)  # an exception, so that the jobs are ended
    parameters = sum(parameter.numel() for parameter in load_example().build_model(args.size).parameters())
    workload = {"size": args.size, "batch_size": args.batch_size, "seed": args.seed, "parameters": parameters}
    known: dict[str, Any] = {**page.provenance("peers.py"), "workload": workload}
    folder = args.results or (None if args.quick else RESULTS)

    def measured_page(result: dict[str, Any]) -> str:
        if folder == RESULTS and not args.only:
            write_readme(README, result)
        return markdown(result)

    comparison = Comparison(args, console)
    return page.carry_out("peers", known, comparison.measure, sections, measured_page, console, folder)


if __name__ == "__main__":
    sys.exit(main())
