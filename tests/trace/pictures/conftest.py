"""Runs to draw: real ones with real failures, and simulated ones in which worse things happen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.recorded import overtaken_run, recorded_run

from keepstep.sim.run import case_of, run
from keepstep.trace.timeline.run import Run

SEEDS = range(1, 25)
"""Among them: nodes that are lost, clocks that disagree, failures that overtake each other, jobs that end badly."""


def opened(folder: Path) -> Run:
    """A run, read to its end."""
    found = Run(folder)
    found.poll()
    return found


@pytest.fixture
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A real run of three ranks, one of which was killed in the backward of step 12."""
    found = opened(recorded_run(tmp_path_factory.getbasetemp()).folder)
    yield found
    found.close()


@pytest.fixture
def overtaken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A real run whose first recovery was overtaken, and whose second was not completed."""
    found = opened(overtaken_run(tmp_path_factory.getbasetemp()).folder)
    yield found
    found.close()


@functools.cache
def _simulated(base: Path, seed: int) -> Path:
    folder = base / f"simulated-{seed}"
    run(case_of(seed), record=folder)
    return folder


@pytest.fixture
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Run]:
    """The run of a seed of the simulator."""
    return lambda seed: opened(_simulated(tmp_path_factory.getbasetemp(), seed))
