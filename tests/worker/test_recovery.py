"""Recoveries of one rank without a job: it stays, goes back to a checkpoint, or saves what it has and ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import run_ranks
from tests.worker.single import NUM_STEPS, Training

from keepstep.protocol.messages import SafePointReached, StateRescued
from keepstep.protocol.recovery import EXIT_TOO_FEW_RANKS
from keepstep.worker import recovery

AT = 3


def rewound(_rank: int, _size: int, path: Path, back_to: int | None) -> Any:
    """Writes a checkpoint every step; stopped behind step `AT`, it goes back."""
    training = Training(checkpoint_dir=path, checkpoint_every=1)

    def body(index: int) -> None:
        # A checkpoint that is due while another one is being written is left out.
        training.session._recovery._checkpoints.flush()  # type: ignore[union-attr]  # protect() has made it
        training.step(index)
        if index == AT and training.session.generation == 1:
            training.link.resume_at = back_to
            training.link.stop(2)

    training.run(body)
    reports = [report for report in training.link.reports if isinstance(report, SafePointReached)]
    return [phase[0] for phase in training.phases], training.digest(), reports[0].reach, reports[0].snapshots


def test_a_rank_stays_or_goes_back_to_a_checkpoint_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    ((steps, digest, reach, snapshots),) = run_ranks(1, rewound, tmp_path / "stays", None)
    assert steps == list(range(NUM_STEPS))
    assert reach == (AT + 1,)
    assert set(snapshots) <= set(range(1, AT + 1))
    back_to = max(snapshots)
    ((steps, again, _reach, _snapshots),) = run_ranks(1, rewound, tmp_path / "goes back", back_to)
    assert steps == [*range(AT + 1), *range(back_to, NUM_STEPS)]
    assert again == digest


def rescued(_rank: int, _size: int, path: Path) -> Any:
    """The job cannot continue: stopped in a backward, the rank saves what the step began with."""
    training = Training()
    before: list[torch.Tensor] = []

    def body(index: int) -> None:
        if index == AT:
            before.extend(parameter.detach().clone() for parameter in training.model.parameters())
            training.link.is_ending = True
            training.model[1].weight.register_post_accumulate_grad_hook(lambda _parameter: training.link.stop(2))
        training.step(index)

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(path)
        with pytest.raises(SystemExit) as ended:
            training.run(body)
    same = all(map(torch.equal, before, training.model.parameters()))
    report = next(report for report in training.link.reports if isinstance(report, StateRescued))
    return ended.value.code, report.error, Path(str(report.path)).name, same


def test_a_rank_of_a_job_that_cannot_go_on_saves_what_it_has_and_ends(tmp_path: Path) -> None:
    ((code, error, name, same),) = run_ranks(1, rescued, tmp_path)
    assert (code, error, same) == (EXIT_TOO_FEW_RANKS, None, True)
    assert name.startswith(f"keepstep-rescue-step{AT}-rank0-")
    assert [folder.name for folder in tmp_path.iterdir()] == [name]


def test_buckets_that_move_are_reported_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of sockets are not among those that the kernel counts as read or written."""
    monkeypatch.setattr(recovery, "_REPORTED_S", 0.01)
    monkeypatch.setattr(recovery, "bytes_moved", lambda: 0)
    buckets = 0
    told, looked = threading.Event(), threading.Semaphore(0)

    def num_buckets() -> int:
        looked.release()
        return buckets

    moving = recovery._Moving(told.set, num_buckets)
    try:
        for _look in range(3):
            assert looked.acquire(timeout=10.0)
        assert not told.is_set()
        buckets = 1
        assert told.wait(10.0)
    finally:
        moving.end()


def test_a_state_is_moved_where_no_thread_can_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on threads is reached. Nothing but the report needs this one."""

    def refuses(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    recovery._Moving(lambda: None, lambda: 0).end()
