"""Part of `benchmarks/weights.py`: one process breaks in the middle of an update. How long until the others know?

A consumer injects the failure in its own ``load``, when half of the version's tensors have arrived, so the update is
certainly in progress. It notes the time, and then kills or stops a process, or raises an exception.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jobs import JobFailed
from page import Section
from weights_cast import Architecture, Cast, Member, Setup, assembled, attach, open_transfer

from keepstep.errors import KeepstepError
from keepstep.weights.subscriber import Subscriber

NUM_DEVICES = 2
DEADLINE_S = 1.0
ALLOWANCE_S = 1.0
"""Allowance beyond the deadline. Both together are the limit for the end of publish() on every surviving device."""
BUCKET_BYTES = 1 << 20
"""Smaller than the default, so that the middle of an update is far from its begin and end."""
PUBLISHER_0, PUBLISHER_1, CONSUMER_0, CONSUMER_1 = range(2 * NUM_DEVICES)


class Failure(NamedTuple):
    """A failure: the process that breaks, the process that causes it, and the signal (None: it raises)."""

    name: str
    victim: int
    striker: int
    signal: signal.Signals | None


FAILURES = (
    Failure("consumer killed", CONSUMER_1, CONSUMER_1, signal.SIGKILL),
    Failure("consumer stopped", CONSUMER_1, CONSUMER_1, signal.SIGSTOP),
    Failure("consumer raises in load", CONSUMER_1, CONSUMER_1, None),
    Failure("source killed", PUBLISHER_1, CONSUMER_0, signal.SIGKILL),
    Failure("source stopped", PUBLISHER_1, CONSUMER_0, signal.SIGSTOP),
    Failure("coordinator killed", PUBLISHER_0, CONSUMER_1, signal.SIGKILL),
)


class NoRoom(Exception):
    """The exception that a consumer's load raises here."""


class Engine:
    """A consumer's ``load``, which may inject a failure."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._num_loaded = 0
        self._strike: Callable[[], None] | None = None

    def arm(self, strike: Callable[[], None] | None) -> None:
        """Sets the failure to inject in the next version; None: none."""
        self._num_loaded, self._strike = 0, strike

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor. Injects the failure when half of the tensors have arrived."""
        self._member.weights[name].copy_(tensor)
        self._num_loaded += 1
        if self._strike is not None and self._num_loaded == len(self._member.weights) // 2:
            self._strike()


ENGINES: list[Engine] = []
"""The engine of this process, if it is a consumer."""


def open_engine(member: Member) -> None:
    """Does the same as `open_transfer`, but a consumer loads with a function."""
    if member.is_publisher:
        open_transfer(member)
        return
    ENGINES.append(Engine(member))
    setup, name = member.setup, f"consumer {member.device}"
    member.subscriber = Subscriber(
        setup.folder, load=ENGINES[0].load, device=member.device, name=name, deadline_s=setup.deadline_s
    )


def take_part(member: Member, version: int) -> tuple[float, str]:
    """Publishes or receives. Returns when that ended, and the error or result as text."""
    try:
        if member.publisher is not None:
            failures = member.publisher.publish(version).failures
            said = f"published to all but {_said(failures[0])}" if failures else "published"
        else:
            assert member.subscriber is not None
            said = f"version {member.subscriber.receive(10 * member.setup.deadline_s)}"
    except KeepstepError as error:
        said = _said(error)
    return time.monotonic(), said


def take_part_striking(member: Member, version: int, victim_pid: int, number: int | None) -> tuple[float, str]:
    """Runs `take_part` in a consumer that injects the failure in the middle."""

    def strike() -> None:
        member.note(time.monotonic())
        if number is None:
            raise NoRoom("the engine has no room")
        os.kill(victim_pid, number)

    ENGINES[0].arm(strike)
    return take_part(member, version)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def measure(architecture: Architecture, repeats: int, patience_s: float) -> list[dict[str, Any]]:
    """Measures every failure, each time with new processes.

    Raises:
        JobFailed: publish() or the reception did not end on a survivor.
    """
    setup = Setup(architecture, NUM_DEVICES, BUCKET_BYTES, DEADLINE_S, atomic=False, folder=Path())
    rows = []
    for failure in FAILURES:
        runs = []
        for _ in range(repeats):
            with assembled(setup, patience_s) as cast:
                runs.append(_fail(cast, failure))
        rows.append(
            {
                "failure": failure.name,
                "median_s": statistics.median(run["publish_s"] for run in runs),
                "max_s": max(run["publish_s"] for run in runs),
                "bound_s": setup.deadline_s + ALLOWANCE_S,
                "runs": runs,
            }
        )
    return rows


def _fail(cast: Cast, failure: Failure) -> dict[str, Any]:
    cast.ask(cast.all, open_engine)
    cast.ask(cast.all, attach)
    whole = cast.ask(cast.all, take_part, 1)
    if {said for _at_s, said in whole} != {"published", "version 1"}:
        raise JobFailed(f"{failure.name}: the version before it did not come: {whole}")
    # A process that raises, or that kills another one, continues to run; all others answer.
    silent = {failure.victim} if failure.signal is not None else set()
    alive = [number for number in cast.all if number not in silent]
    others = [number for number in cast.all if number != failure.striker]
    cast.tell([failure.striker], take_part_striking, 2, cast.pid(failure.victim), failure.signal)
    cast.tell(others, take_part, 2)
    begun_s = cast.last_note(failure.striker)
    assert isinstance(begun_s, float)
    answers = dict(zip(alive, cast.hear(alive), strict=True))
    reports = {cast.name(number): {"after_s": at - begun_s, "said": said} for number, (at, said) in answers.items()}
    return {
        "publish_s": max(at_s - begun_s for number, (at_s, _said) in answers.items() if number in cast.publishers),
        "reports": reports,
    }


def section(rows: list[dict[str, Any]]) -> Section:
    """Returns the table of the failures, with the survivors' reports of one of the runs."""
    table, notes = [], []
    for row in rows:
        table.append(
            [
                row["failure"],
                f"{row['median_s']:.3f}",
                f"{row['max_s']:.3f}",
                f"{row['bound_s']:g}",
                "yes" if row["max_s"] <= row["bound_s"] else "NO",
            ]
        )
        reports = row["runs"][0]["reports"].items()
        said = "; ".join(f"{name} after {told['after_s']:.2f} s: {told['said']}" for name, told in reports)
        notes.append(f"{row['failure']}: {said}.")
    notes.insert(
        0,
        f"From the failure, in the middle of an update, to the end of publish() on every surviving device; "
        f"runs of each: {len(rows[0]['runs'])}; {NUM_DEVICES} devices, deadline_s={DEADLINE_S:g}, buckets of "
        f"{BUCKET_BYTES / 2**20:g} MiB. Below: what the survivors reported in the first run.",
    )
    columns = ("seconds", "median", "max", "bound: deadline + 1 s", "holds")
    return Section("A process breaks", columns, table, notes)
