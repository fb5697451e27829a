"""Recorded runs for tests of what shows them: of the simulator, so that they are there in a second."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.published import published_run
from tests.support.recorded import LONE, simulate_shards

from keepstep.sim.run import case_of, run
from keepstep.trace.timeline.run import Run

SEED = 13
"""Some seed whose job has several recoveries, and trains to its end."""


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended well. Only to be read."""
    folder = tmp_path_factory.mktemp("recorded")
    outcome = run(case_of(SEED), record=folder)
    assert outcome.check is None
    return folder


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without replicas, which has lost a rank. Only to be read."""
    folder = tmp_path_factory.mktemp("sharded")
    simulate_shards(folder, LONE, 2)
    return folder


@pytest.fixture(scope="session")
def publishing(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has published weights. Only to be read."""
    return published_run(recorded, tmp_path_factory.mktemp("publishing") / "run")


@pytest.fixture
def shown(recorded: Path) -> Run:
    """The same, read."""
    found = Run(recorded)
    found.poll()
    return found
