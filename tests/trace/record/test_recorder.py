"""What a controller records: without the journal nothing goes on, without the phases everything does."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.published import FOLDER, news

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.controller import DeadlineCame, JournalEntry
from keepstep.protocol.messages import PhasesObserved, PublicationStage
from keepstep.trace.record import runfolder
from keepstep.trace.record.journal import read
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseTail
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.weights.publications import Publications

PHASES = PhasesObserved("node", 0, np.zeros(2, PHASE_DTYPE).tobytes())


def test_both_are_written(tmp_path: Path) -> None:
    entry = JournalEntry(1.0, DeadlineCame(()))
    with Recorder(tmp_path) as recorder:
        recorder.decided([entry])
        recorder.observed(PHASES)
    assert read(tmp_path / runfolder.JOURNAL) == [entry]
    tail = PhaseTail(tmp_path / runfolder.PHASES)
    assert [message for _, message in tail.read()] == [PHASES]
    tail.close()


def test_phases_that_cannot_be_written_end_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / runfolder.PHASES).write_text("a file where the folder should be")
    with Recorder(tmp_path) as recorder:
        assert "phases are no longer recorded, training continues" in capsys.readouterr().err
        recorder.observed(PHASES)
        recorder.decided([JournalEntry(1.0, DeadlineCame(()))])
    assert len(read(tmp_path / runfolder.JOURNAL)) == 1
    assert capsys.readouterr().err == ""


def test_a_full_disk_ends_the_log_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(tmp_path) as recorder:
        assert recorder._phases is not None
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), recorder._phases._file)
        recorder.observed(PHASES)
        recorder.observed(PHASES)
        recorder.decided([JournalEntry(1.0, DeadlineCame(()))])
    error = capsys.readouterr().err
    assert error.count("phases are no longer recorded") == 1
    assert "No space left" in error
    assert len(read(tmp_path / runfolder.JOURNAL)) == 1


def test_what_is_no_phases_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder, pytest.raises(RemoteProtocolError, match="no whole records"):
        recorder.observed(PhasesObserved("node", 0, b"x"))


def test_published_weights_are_written_when_that_is_asked_for_and_at_the_end(tmp_path: Path) -> None:
    """A controller that is started again counts on."""
    path = tmp_path / runfolder.WEIGHTS
    with Recorder(tmp_path) as recorder:
        recorder.published("a", news(0, PublicationStage.COMMITTED, 1, 1.0))
        assert not path.exists()
        recorder.show_weights()
        assert Publications.read(path).found[FOLDER].num_committed == 1
        recorder.published("a", news(0, PublicationStage.COMMITTED, 2, 2.0))
    assert Publications.read(path).found[FOLDER].num_committed == 2
    with Recorder(tmp_path) as recorder:
        recorder.published("a", news(0, PublicationStage.COMMITTED, 3, 3.0))
    assert Publications.read(path).found[FOLDER].num_committed == 3


def test_published_weights_that_cannot_be_written_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / runfolder.WEIGHTS).mkdir()
    with Recorder(tmp_path) as recorder:
        recorder.published("a", news(0, PublicationStage.COMMITTED, 1, 1.0))
    assert "published weights are not shown; training continues" in capsys.readouterr().err
