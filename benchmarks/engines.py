"""Real inference servers, and a training job that sends them its weights, while ranks and servers are killed.

    make test-engines                    makes the environments of the servers
    python benchmarks/engines.py         an hour: two vLLM servers and one of SGLang, three ranks and a spare

The job publishes a version in each step. `keepstep weights load` has the servers load them. A rank is killed every
30 s, a server every 5 minutes, and `weights load` every 7. Clients ask the servers all the time; every answer is
compared with those that each version gives in a run in which nothing was killed, and so are the final weights.

Prints the tables, and writes ``benchmarks/results/DATE-engines.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import page
import torch
from checkout import ROOT
from jobs import JobFailed, RunningJob
from page import RESULTS, Section
from rich.console import Console
from tests.engines.real.asking import CLEAR, NUM_TOKENS, PROMPTS, Answer
from tests.engines.real.servers import RealServer, sglang_server, vllm_server, write_model

KEEPSTEP = [sys.executable, "-m", "keepstep.cli.main"]
WORKER = Path(__file__).resolve().parent / "train_engines.py"
NUM_RANKS = 3
START_S, END_S = 600.0, 60.0
"""Limits for the start of the job and of servers, and for an end."""
QUICK = {"steps": 150, "kill_rank": 20.0, "kill_server": 60.0, "kill_driver": 45.0, "quiet_end": 200.0}


@dataclass
class Asked:
    """A server, and what it answered.

    Attributes:
        killed: when it was killed.
        ready: when it answered again after each kill.
        errors: requests that failed: when they began and failed, and why.
    """

    server: RealServer
    answers: list[Answer] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    errors: list[tuple[float, float, str]] = field(default_factory=list)

    def ask_until(self, stop: threading.Event, seed: int, pause_s: float) -> None:
        """Asks one request after the other."""
        draw = random.Random(seed)
        while not stop.is_set():
            prompt, begun_s = draw.randrange(len(PROMPTS)), time.monotonic()
            try:
                tokens = self.server.ask(PROMPTS[prompt], NUM_TOKENS)
            except Exception as error:  # whatever it is, it is counted
                self.errors.append((begun_s, time.monotonic(), repr(error)))
                stop.wait(0.1)
                continue
            self.answers.append(Answer(prompt, tokens, begun_s, time.monotonic()))
            stop.wait(pause_s)

    def restart(self) -> None:
        """Kills the server, starts it once more, and waits until it answers."""
        self.killed.append(time.monotonic())
        self.server.kill()
        self.server.start()
        self.server.wait_until_healthy()
        self.ready.append(time.monotonic())

    def was_down(self, begun_s: float, ended_s: float) -> bool:
        """Whether it was killed, or not ready again, at any moment of this time."""
        ready = [*self.ready, float("inf")]
        return any(begun_s <= up_s and killed_s <= ended_s for killed_s, up_s in zip(self.killed, ready, strict=False))

    def life(self, at_s: float) -> int:
        """How often it had been killed at a moment."""
        return sum(killed_s <= at_s for killed_s in self.killed)


class Expected:
    """The answers of each version, from a run in which nothing was killed."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Args:
        lines: of the file that `train_engines.py` writes.
        """
        self._of: dict[int, list[tuple[list[int], list[float]]]] = {}
        for line in lines:
            number, answers = json.loads(line)
            self._of[number] = answers

    def versions(self, prompt: int, tokens: list[int]) -> list[int]:
        """Returns the versions that answer a prompt so; empty: it is a mixture."""
        return [number for number, answers in self._of.items() if answers[prompt][0] == tokens]

    def nearly(self, prompt: int, tokens: list[int]) -> list[int]:
        """Returns the versions of which it differs first at a token that was likeliest by less than kernels differ."""
        found = []
        for number, answers in self._of.items():
            own, ahead = answers[prompt]
            first = next(i for i, (one, other) in enumerate(zip(own, tokens, strict=True)) if one != other)
            if ahead[first] < CLEAR:
                found.append(number)
        return found


def judged(asked: Asked, expected: Expected, published: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Returns what the tables show of one server.

    Args:
        asked: the server.
        expected: the answers of each version.
        published: when each version was complete, and its number.
    """
    mixed, near, back, lags = 0, 0, 0, []
    newest: list[tuple[float, int]] = []
    """When each answer ended, and the lowest version that it can be of, since the server was killed last."""
    life = 0
    for each in sorted(asked.answers, key=lambda answer: answer.begun_s):
        if asked.life(each.begun_s) > life:
            life, newest = asked.life(each.begun_s), []
        found = expected.versions(each.prompt, each.tokens)
        if not found:
            is_near = bool(expected.nearly(each.prompt, each.tokens))
            near, mixed = near + is_near, mixed + (not is_near)
            continue
        if max(found) < max((number for ended_s, number in newest if ended_s <= each.begun_s), default=0):
            back += 1
        newest.append((each.ended_s, min(found)))
        there = [number for at_s, number in published if at_s <= each.begun_s]
        lags.append(max(0, max(there, default=0) - max(found)))
    old_s = [_of_checkpoint_s(asked, expected, number) for number in range(1, len(asked.killed) + 1)]
    waits = sorted(each.ended_s - each.begun_s for each in asked.answers)
    failed = [why for begun_s, ended_s, why in asked.errors if not asked.was_down(begun_s, ended_s)]
    seen = {number for each in asked.answers for number in expected.versions(each.prompt, each.tokens)}
    return {
        "name": str(asked.server.kind), "answers": len(asked.answers), "mixed": mixed, "near": near, "back": back,
        "versions": len(seen), "kills": len(asked.killed), "failed": len(failed), "why": failed[:3],
        "old_s": max(old_s, default=0.0),
        "lag": statistics.median(lags) if lags else 0, "median_s": statistics.median(waits), "longest_s": waits[-1],
    }  # fmt: skip


def _of_checkpoint_s(asked: Asked, expected: Expected, life: int) -> float:
    """Returns for how long a server answered with the checkpoint with which it was started, after a kill."""
    mine = [each for each in asked.answers if asked.life(each.begun_s) == life]
    old = [each for each in mine if 0 in expected.versions(each.prompt, each.tokens)]
    return max((each.ended_s for each in old), default=0.0) - min((each.begun_s for each in old), default=0.0)


class Killer:
    """Kills ranks, servers and what drives them, each at its own interval."""

    def __init__(
        self, args: argparse.Namespace, out: Path, asked: list[Asked], drive: Callable[[], subprocess.Popen[bytes]]
    ) -> None:
        self._out, self._asked, self._drive = out, asked, drive
        self._driver = drive()
        self.counts = dict.fromkeys(("rank", "server", "driver"), 0)
        now_s = time.monotonic()
        self._intervals_s = {"rank": args.kill_rank, "server": args.kill_server, "driver": args.kill_driver}
        self._due_s = {what: now_s + interval_s for what, interval_s in self._intervals_s.items()}
        self._last_s = now_s + args.steps * args.every - args.quiet_end
        self._kill = {"rank": self._kill_rank, "server": self._kill_server, "driver": self._kill_driver}
        self._threads: list[threading.Thread] = []

    def look(self) -> None:
        """Kills what is due."""
        if self._driver.poll() is not None:
            raise JobFailed(f"weights load has ended with exit code {self._driver.returncode}")
        for what, due_s in self._due_s.items():
            if time.monotonic() >= due_s and (what == "rank" or time.monotonic() < self._last_s):
                self._kill[what](self.counts[what])
                self.counts[what] += 1
                self._due_s[what] += self._intervals_s[what]

    def _kill_rank(self, number: int) -> None:
        path = self._out / f"rank-{number % NUM_RANKS}"
        pid = int(path.read_text(encoding="ascii"))
        path.unlink()  # the replacement writes another one
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _kill_server(self, number: int) -> None:
        thread = threading.Thread(target=self._asked[number % len(self._asked)].restart)
        thread.start()
        self._threads.append(thread)

    def _kill_driver(self, _number: int) -> None:
        self._driver.kill()
        self._driver.wait()
        self._driver = self._drive()

    def close(self) -> None:
        """Ends what drives the servers, and waits for servers that start."""
        for thread in self._threads:
            thread.join()
        self._driver.terminate()
        self._driver.wait(END_S)


def job(args: argparse.Namespace, model: Path, out: Path, *more: str) -> RunningJob:
    """Starts a job of three ranks and a spare."""
    out.mkdir()
    flags = ["--nproc-per-node", str(NUM_RANKS), "--spares", "1"]
    return RunningJob(
        [*KEEPSTEP, "run", *flags, str(WORKER), str(model), str(out), "--steps", str(args.steps), *more], out
    )


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the job twice, the second time with servers and kills."""
    model, plain, out, weights = write_model(folder / "model"), folder / "plain", folder / "out", folder / "w"
    with job(args, model, plain) as running:
        running.wait(START_S + args.steps)
    expected = Expected((plain / "expected.jsonl").read_text(encoding="ascii").splitlines())
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        starts = [(vllm_server, args.vllm_python)] * 2 + [(sglang_server, args.sglang_python)]
        asked = [Asked(stack.enter_context(start(model, python=str(python)))) for start, python in starts]
        urls = [word for each in asked for word in (f"--{each.server.kind}", each.server.url)]
        log = stack.enter_context((folder / "load.log").open("ab"))
        load = [*KEEPSTEP, "weights", "load", str(weights), *urls]
        killer = Killer(
            args, out, asked, lambda: subprocess.Popen(load, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        )
        stack.callback(killer.close)
        running = stack.enter_context(job(args, model, out, "--every", str(args.every), "--weights", str(weights)))
        running.wait_until((out / "versions.jsonl").exists, "the first version", START_S)
        begun_s = time.monotonic()
        threads = [
            threading.Thread(target=each.ask_until, args=(stop, number, args.pause))
            for number, each in enumerate(asked)
        ]
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stop.set)
        for thread in threads:
            thread.start()
        until_s = begun_s + START_S + args.steps * (args.every + 2.0)
        while not (out / "final.pt").exists():
            killer.look()
            running.check_alive("its last step")
            if time.monotonic() > until_s:
                raise running.failure("the job did not end in time")
            time.sleep(0.1)
        ended_s = time.monotonic()
        running.wait(START_S)
        stop.wait(args.settle)
        labels = [each.server.get("weight_info" if each.server.kind == "vllm" else "model_info") for each in asked]
    raw = [
        {
            "answers": [vars(one) for one in each.answers],
            "killed": each.killed,
            "ready": each.ready,
            "errors": each.errors,
        }
        for each in asked
    ]
    (folder / "answers.json").write_text(json.dumps(raw), encoding="ascii")
    one, other = (torch.load(each / "final.pt", weights_only=True) for each in (plain, out))
    lines = [json.loads(line) for line in (out / "versions.jsonl").read_text(encoding="ascii").splitlines()]
    published = [(at_s, number) for number, at_s in lines]
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(published)]
    return {
        "identical": all(torch.equal(one[name], other[name]) for name in one),
        "servers": [judged(each, expected, published) for each in asked],
        "labels": [each["weight_version"] for each in labels],
        "kills": killer.counts, "minutes_of_job": (ended_s - begun_s) / 60, "steps": args.steps,
        "longest_step_s": max(gaps), "step_s": statistics.median(gaps), "said": running.output().splitlines()[-1],
    }  # fmt: skip


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables."""
    kills = result["kills"]
    rows = [
        [
            f"{each['name']} {number}", f"{each['answers']:,}", str(each["versions"]), str(each["mixed"]),
            str(each["near"]), str(each["back"]), str(each["failed"]), str(each["kills"]), f"{each['lag']:g}",
            f"{each['old_s']:.1f}", f"{each['median_s']:.2f}", f"{each['longest_s']:.1f}",
        ]
        for number, each in enumerate(result["servers"])
    ]  # fmt: skip
    columns = (
        "server", "answers", "versions", "mixtures", "ties", "went back", "failed", "kills", "behind", "old, s",
        "median, s", "longest, s",
    )  # fmt: skip
    notes = [
        "mixtures: answers of no version. ties: answers that differ from a version's at a token that is the likeliest "
        f"by less than {CLEAR:g}.",
        "went back: answers of an older version than an answer that had ended before, of a server that was not killed "
        "in between. failed: requests that failed although the server was not killed. behind: median number of "
        "versions that had been published since, when the request began. old: for how long a server that was started "
        "again answered with the checkpoint of its start, at most.",
        "longest: of one request, waits for changes, kills and restarts of what drives the server included.",
    ]
    found = [Section("Answers", columns, rows, notes)]
    rows = [
        ["killed: ranks", str(kills["rank"])],
        ["killed: servers", str(kills["server"])],
        ["killed: weights load", str(kills["driver"])],
        ["versions", str(result["steps"])],
        ["from one version to the next: median, s", f"{result['step_s']:.2f}"],
        ["from one version to the next: longest, s", f"{result['longest_step_s']:.1f}"],
        ["final weights", "identical" if result["identical"] else "DIFFERENT"],
        ["versions of the servers at the end", ", ".join(result["labels"])],
    ]
    notes = [f"The job took {result['minutes_of_job']:.1f} minutes, and said at its end: {result['said']}"]
    return [*found, Section("The job", ("", ""), rows, notes)]


def check(result: dict[str, Any]) -> None:
    """Raises:
    JobFailed: something was not as it must be.
    """
    wrong = [each for each in result["servers"] if each["mixed"] or each["back"] or each["failed"]]
    if wrong or not result["identical"] or set(result["labels"]) != {str(result["steps"])}:
        raise JobFailed(f"not as it must be: {wrong}, identical: {result['identical']}, {result['labels']}")


def markdown(result: dict[str, Any]) -> str:
    """Returns the page."""
    head = page.heading("Inference engines", result) + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1650, help="of the job (default: %(default)s)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one to the next (default: %(default)s)")
    parser.add_argument("--kill-rank", type=float, default=30.0, help="seconds (default: %(default)s)")
    parser.add_argument("--kill-server", type=float, default=300.0, help="seconds (default: %(default)s)")
    parser.add_argument("--kill-driver", type=float, default=420.0, help="seconds (default: %(default)s)")
    parser.add_argument(
        "--quiet-end", type=float, default=240.0,
        help="at the end nothing but ranks is killed for so long, so that all servers are up (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between requests (default: %(default)s)")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds at the end (default: %(default)s)")
    for kind in ("vllm", "sglang"):
        own = ROOT / f".venv-{kind}" / "bin" / "python"
        parser.add_argument(f"--{kind}-python", type=Path, default=own, help="its interpreter (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="a folder for all that is written")
    parser.add_argument("--results", type=Path, help=f"where the page goes (default: {RESULTS})")
    return page.parsed(parser, QUICK)


def main() -> int:
    """Runs the jobs, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    folder = args.results or (None if args.quick else RESULTS)

    def measured() -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            parent = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-bench-")))
            found = measure(args, parent)
        for section in sections(found):
            section.show(console)
        check(found)
        return found

    return page.carry_out("engines", page.provenance("engines.py"), measured, sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
