"""One rank without a job, in this very process; the test plays its controller. Use it inside of `run_ranks(1, ...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keepstep import config
from keepstep.protocol.messages import (
    Complete,
    Recover,
    Rescue,
    Resume,
    SafePointReached,
    StateRecovered,
    StepsFinished,
    Stop,
    WorkerReport,
)
from keepstep.protocol.phases import Phase
from keepstep.worker import alone
from keepstep.worker.session import Session, init
from keepstep.worker.step_controller import StepController

NUM_STEPS = 5


class Controller(alone.LinkAlone):
    """Stops the rank when it is told to, and has it resume at the greatest step that it reaches.

    Attributes:
        resume_at: the step at which it resumes instead.
        is_ending: the rank is to save what it has, and to end.
        reports: all that the rank has sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.resume_at: int | None = None
        self.is_ending = False
        self.reports: list[WorkerReport] = []

    def stop(self, generation: int) -> None:
        self._give(Stop(generation, "rank 1 was lost", None))

    def send(self, report: WorkerReport) -> None:
        self.reports.append(report)
        match report:
            case SafePointReached() if self.is_ending:
                self._give(Rescue("too few ranks are left", False))
            case SafePointReached():
                step = max(report.reach) if self.resume_at is None else self.resume_at
                self._give(Recover(report.generation, step, (), self._membership, (), None))
            case StateRecovered():
                self._give(Resume(report.generation))
            case StepsFinished():
                self._give(Complete(report.generation))
            case _:
                super().send(report)


class Training:
    """A session without a job, a model with dropout and a running mean, and what happened in its steps."""

    def __init__(self, *, stands_ready: bool = True, **protected: Any) -> None:
        self.link = Controller()
        alone_link, session = self.link, config.worker_config()
        assert session is None, "the test runs in no job"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("keepstep.worker.session.LinkAlone", lambda: alone_link)
            self.session: Session = init()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.session.protect(model=self.model, optimizer=self.optimizer, **protected)
        assert self.session._controller is not None
        self.controller: StepController = self.session._controller
        self.phases: list[tuple[int, int, bool]] = []
        """(index, attempt, resumed) of each attempt."""
        if stands_ready:  # else the session's own loop is begun
            self.controller.stand_ready(0)

    def run(self, body: Callable[[int], None], num_steps: int = NUM_STEPS) -> None:
        """A loop that is not keepstep's."""
        controller = self.controller
        while (index := controller.next_step(num_steps)) is not None:
            self.phases.append((index, controller.attempt, controller.resumed))
            try:
                controller.begin()
                body(index)
                controller.commit()
            except BaseException as error:
                if not controller.is_interruption(error):
                    raise
                controller.undo()

    def step(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        self.model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def phase(self) -> Phase:
        return self.session._coordination.phase

    def digest(self) -> str:
        assert self.session._state is not None
        return self.session._state.digest()
