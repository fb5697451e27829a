"""What `keepstep status` shows of a job on several nodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepstep.cli.status import add_places
from keepstep.protocol.messages import PhasesObserved
from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import PHASES
from keepstep.trace.record import phaselog, runfolder
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseLog


def observed(node: str, *changes: tuple[int, int, int, Phase]) -> PhasesObserved:
    """(time, worker, step, phase) as a node reports them."""
    records = np.zeros(len(changes), PHASE_DTYPE)
    for record, (at_ns, worker, step, phase) in zip(records, changes, strict=True):
        record["at_ns"], record["worker"], record["step"], record["phase"] = at_ns, worker, step, PHASES.index(phase)
    return PhasesObserved(node, 0, records.tobytes())


def entry(worker: int, phase: str | None = None, step: int | None = None) -> dict[str, Any]:
    return {"worker": worker, "phase": phase, "step": step}


def test_steps_and_phases_come_from_the_phase_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phaselog, "SEGMENT_BYTES", 1)  # a segment for each message
    log = PhaseLog(tmp_path / runfolder.PHASES)
    log.write(observed("b", (10, 2, -1, Phase.STARTING)))
    log.write(observed("a", (20, 0, 7, Phase.FORWARD), (40, 1, 8, Phase.SYNCED), (30, 1, 8, Phase.BACKWARD)))
    log.write(observed("a", (50, 0, 8, Phase.FORWARD)))
    log.close()
    workers = [entry(0), entry(1), entry(2), entry(3), entry(4, "updated", 3)]
    add_places(tmp_path, workers)
    assert workers == [
        entry(0, "forward", 8),
        entry(1, "synced", 8),
        entry(2, "starting", -1),
        entry(3),
        entry(4, "updated", 3),
    ]


def test_a_log_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / runfolder.PHASES).mkdir()
    (tmp_path / runfolder.PHASES / "00000001.frames").write_bytes(b"\xff" * 64)
    workers = [entry(0)]
    add_places(tmp_path, workers)
    assert workers == [entry(0)]
    assert "keepstep status: no steps and phases: " in capsys.readouterr().err
