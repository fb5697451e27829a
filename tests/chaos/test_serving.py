"""A server that generates text while its weights come from a job whose ranks are killed: both as a user runs them."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.support.jobs import EXAMPLES, running

from keepstep.drill.faults import IN_A_STEP
from keepstep.trace.weights.publications import Publications

DEADLINE_S = 60.0
"""For the server to start, to answer, and to end."""
SHAPE = ("--width", "32", "--layers", "2", "--context", "32")
"""A small GPT: short steps, and short answers."""
EVERY = 5
STEPS = 150
KILLS = dict(zip((20, 41, 62, 84, 104, 129), IN_A_STEP, strict=True))
"""Phases by step. The first come while a version is under way; the last three when one is due, so that some ranks
begin to publish it and others know already that a rank was lost."""
QUESTIONS: list[dict[str, Any]] = [
    {"prompt": "import ", "bytes": 20, "temperature": 0},
    {"prompt": "def test(", "bytes": 10, "temperature": 0},
    {"prompt": "self.", "bytes": 150, "temperature": 0},  # longer than a few steps of training: a version has to wait
    {"bytes": 30, "temperature": 0.8},
]
"""Of the clients, one each; it is asked again and again."""
AGAIN_S = 0.05
"""Until the next question, after an answer that was none."""


class Server:
    """``serve_gpt.py`` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, EXAMPLES / "serve_gpt.py", folder, "--port", "0", *SHAPE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.port = 0

    def wait_until_it_serves(self) -> None:
        """It has said on which port it listens."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        line = self.process.stdout.readline() if ready else ""
        assert line.startswith("serving http://127.0.0.1:"), f"it said {line!r}"
        self.port = int(line.rpartition(":")[2])

    def ask(self, path: str, **question: object) -> tuple[int, dict[str, Any]]:
        """Status and content of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request("GET", f"{path}?{urlencode(question)}")
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def end_by(self, number: signal.Signals) -> tuple[int, str]:
        """Asks it to end; exit code and stderr."""
        self.process.send_signal(number)
        _out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server that is there; nothing of it survives the block."""
    server = Server(folder)
    try:
        server.wait_until_it_serves()
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()


@dataclass(frozen=True)
class Answer:
    """What a client was told, and when."""

    asked_s: float
    answered_s: float
    status: int
    content: dict[str, Any]

    @property
    def version(self) -> int:
        return int(self.content["version"])


def ask_all_the_time(server: Server, question: dict[str, Any], stop: threading.Event) -> list[Answer]:
    """A client: the same question again and again, until it is stopped."""
    answers = []
    while not stop.is_set():
        asked_s = time.monotonic()
        status, content = server.ask("/generate", **question)
        answers.append(Answer(asked_s, time.monotonic(), status, content))
        if status != http.HTTPStatus.OK:
            stop.wait(AGAIN_S)
    return answers


def ask_during_a_drill(tmp_path: Path, server: Server, folder: Path) -> tuple[dict[str, Any], str, list[list[Answer]]]:
    """A drill that came out well: its result, its stderr, and what each client was told from its start to its end."""
    faults = [f"kill@step={step},phase={phase},rank={n % 3}" for n, (step, phase) in enumerate(KILLS.items())]
    script = [EXAMPLES / "train_gpt.py", *SHAPE, "--batch-size", 4, "--steps", STEPS]
    job = [*script, "--publish", folder, "--publish-every", EVERY]
    path = tmp_path / "drill.json"
    flags = ["--run-dir", tmp_path / "runs", "--json", path, "--trace", tmp_path / "trace.json"]
    flags += ["--nproc-per-node", 3, "--spares", 1, "--faults", ";".join(faults)]
    stop = threading.Event()
    with running("drill", *flags, *job) as drill, ThreadPoolExecutor(len(QUESTIONS)) as clients:
        try:
            asking = [clients.submit(ask_all_the_time, server, question, stop) for question in QUESTIONS]
            code, out, err = drill.finish()
        finally:
            stop.set()
        answers = [client.result(2 * DEADLINE_S) for client in asking]
        drill.wait_until_gone()
    assert code == 0, out + err
    return json.loads(path.read_text()), err, answers


def split_in_runs(answers: list[Answer]) -> list[list[Answer]]:
    """What one client was told, cut where the versions begin again."""
    runs = [answers[:1]]
    for before, after in itertools.pairwise(answers):
        if after.version < before.version:
            runs.append([])
        runs[-1].append(after)
    return runs


def test_text_while_ranks_are_killed(tmp_path: Path) -> None:
    """From the first version on every question is answered, and each answer is made with the one version it names.

    Both runs of the drill come to the same weights, so whatever is killed, a version is the same text and digest.
    """
    folder = tmp_path / "w"
    with serving(folder) as server:
        result, notes, told = ask_during_a_drill(tmp_path, server, folder)
        status, last = server.ask("/generate")
        code, errors = server.end_by(signal.SIGINT)
    assert (code, errors) == (0, "")
    assert result["identical"]
    assert not result["missed"]
    assert [row["fault"] for row in result["faults"]] == ["kill"] * len(KILLS)
    assert "was left out" not in notes, notes
    for version in map(int, re.findall(r"version (\d+) was not published", notes)):
        assert any(version - 1 <= step < version + EVERY for step in KILLS), f"no process died near {version}:\n{notes}"
    assert (status, last["version"]) == (200, STEPS), notes
    check_what_is_shown(tmp_path / "runs", folder, notes)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    stages = {event["name"].split()[0] for event in events if event.get("args", {}).get("version") == STEPS}
    assert stages == {"H2D", "Broadcast", "Reload"}

    ready_s = min(answer.answered_s for answers in told for answer in answers if answer.status == 200)
    for answers in told:
        for answer in answers:
            assert answer.status == 200 or (answer.status == 503 and answer.asked_s < ready_s), answer
    told = [[answer for answer in answers if answer.status == 200] for answers in told]
    assert sum(map(len, told)) >= 200
    check_versions(told)


def check_what_is_shown(runs: Path, folder: Path, notes: str) -> None:
    """In both runs' folders: each version that was due was committed or has broken off; the server has the last."""
    broken_off = set(map(int, re.findall(r"version (\d+) was not published", notes)))
    shown = [Publications.read(path).found[str(folder)] for path in sorted(runs.glob("*/weights.json"))]
    assert len(shown) == 2
    for found in shown:
        assert found.version == STEPS
        assert found.under_way is None
        assert list(found.consumers().values()) == [[STEPS]]
        assert found.lag(STEPS, now_s=0.0) == (0, 0.0)
        assert found.last_bytes == shown[0].last_bytes > 0
        assert (found.last_seconds or 0) > 0
        assert found.num_lost_consumers == 0
        assert len({version for version, _ in found.commits}) >= STEPS // EVERY - found.num_broken_off
    assert sum(found.num_broken_off for found in shown) >= len(broken_off)
    assert {failure.version for found in shown for failure in found.failures} >= broken_off


def check_versions(told: list[list[Answer]]) -> None:
    """What each client was told in the two runs of a drill fits together."""
    versions: list[set[int]] = [set(), set()]
    texts, digests = defaultdict(set), defaultdict(set)
    for question, answers in zip(QUESTIONS, told, strict=True):
        runs = split_in_runs(answers)
        assert len(runs) == 2, [answer.version for answer in answers]
        for seen, run in zip(versions, runs, strict=True):
            for answer in run:
                seen.add(answer.version)
                digests[answer.version].add(answer.content["digest"])
                if question["temperature"] == 0:
                    texts[question["prompt"], answer.version].add(answer.content["text"])
    assert not {version: several for version, several in digests.items() if len(several) > 1}
    assert not {asked: several for asked, several in texts.items() if len(several) > 1}
    assert len(set.union(*digests.values())) == len(digests), "two versions have the same digest"
    assert set(digests) <= set(range(EVERY, STEPS + 1, EVERY))
    assert len(versions[0]) + len(versions[1]) >= 20
    assert len(versions[0] & versions[1]) >= 5, "too few of them to compare the runs"


REFUSED = [
    ("bytes", "many", "must be numbers"),
    ("bytes", "", "must be numbers"),
    ("bytes", "1.5", "must be numbers"),
    ("bytes", "0", "allowed are 1 to"),
    ("bytes", "-1", "allowed are 1 to"),
    ("bytes", "100000", "allowed are 1 to"),
    ("temperature", "hot", "must be numbers"),
    ("temperature", "-0.5", "allowed are 0 and"),
    ("temperature", "1e-300", "allowed are 0 and"),
    ("temperature", "nan", "allowed are 0 and"),
    ("temperature", "inf", "allowed are 0 and"),
    ("prompt", "", "allowed are 1 to"),
    ("prompt", "x" * 5000, "allowed are 1 to"),
    ("byte", "3", "unknown: byte"),
]
"""Parts of a question that no server could answer, and what it says of them."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_any_job(tmp_path: Path, number: signal.Signals) -> None:
    """Says that it has nothing yet, refuses what cannot be, and ends when it is told to."""
    with serving(tmp_path / "w") as server:
        assert server.ask("/generate", prompt="x") == (503, {"error": "no version has arrived yet"})
        health = {"version": None, "condition": "empty", "attached": False, "last_error": None}
        assert server.ask("/health") == (200, health)
        for name, value, reason in REFUSED:
            status, content = server.ask("/generate", **{name: value})
            assert (status, reason in content["error"]) == (400, True), (name, value, content)
        assert server.ask("/")[0] == 404
        assert server.end_by(number) == (0, "")
