"""The clock of a job, on the machine where it began and on others."""

from __future__ import annotations

import time

import msgspec
import pytest

from keepstep.protocol.recovery import RecoverySettings
from keepstep.trace.record import runfolder
from keepstep.trace.record.jobclock import JobClock, this_machine
from keepstep.trace.record.runfolder import RunInfo

S = 10**9


@pytest.fixture
def info() -> RunInfo:
    return runfolder.new_run(("train.py",), "node", RecoverySettings(3, 1))


def elsewhere(info: RunInfo, *, ago_s: int, monotonic_s: int) -> RunInfo:
    """The same run, begun so long ago on a machine whose monotonic clock showed this."""
    begun_ns = time.time_ns() - ago_s * S
    return msgspec.structs.replace(info, machine="another", started_ns=monotonic_s * S, started_unix_ns=begun_ns)


def test_on_the_machine_where_it_began_it_is_the_monotonic_clock(info: RunInfo) -> None:
    assert info.machine == this_machine()
    assert info.clock().offset_ns == 0
    before_ns, now_ns, after_ns = time.monotonic_ns(), JobClock().now_ns(), time.monotonic_ns()
    assert before_ns <= now_ns <= after_ns
    again = runfolder.goes_on(info, "node", before_ns / 1e9)
    assert (again.clock_offset_ns, again.machine, again.started_ns) == (0, info.machine, info.started_ns)


def test_elsewhere_it_goes_on_as_the_clock_on_the_wall(info: RunInfo) -> None:
    there = elsewhere(info, ago_s=1000, monotonic_s=5)
    assert there.clock().now_s() == pytest.approx(1005.0, abs=60.0)
    here = runfolder.goes_on(there, "second", 900.0)
    assert (here.machine, here.node, here.run) == (this_machine(), "second", info.run)
    assert here.clock().now_s() == pytest.approx(1005.0, abs=60.0)
    assert here.clock().offset_ns == here.clock_offset_ns
    assert (here.started_ns, here.started_unix_ns) == (there.started_ns, there.started_unix_ns)


def test_back_where_it_began_it_goes_on_from_where_it_was_elsewhere(info: RunInfo) -> None:
    """The first machine's monotonic clock is of no use any more: the second one's may have been ahead of it."""
    second = elsewhere(info, ago_s=1000, monotonic_s=5)
    third = runfolder.goes_on(second, "first", 2000.0)
    assert third.clock().now_s() >= 2000.0


@pytest.mark.parametrize("machine", [None, "another"])
def test_it_never_goes_back_behind_the_journal(info: RunInfo, machine: str | None) -> None:
    """A clock on the wall may be wrong, and be put right."""
    last_s = time.monotonic() + 12_345.678
    there = info if machine is None else elsewhere(info, ago_s=-500, monotonic_s=5)
    here = runfolder.goes_on(there, "second", last_s)
    assert here.clock().now_s() > last_s
    assert here.clock().now_s() < last_s + 60.0
