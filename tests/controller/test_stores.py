"""What the controller keeps for ranks beyond a generation, and when it is dropped: when all ranks restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.protocol.simulated_job import SimulatedJob

from keepstep.controller.stores import ControllerStores
from keepstep.protocol.messages import StoreAnswered, StoreRequested, WorkerReady
from keepstep.protocol.recovery import Stage


class Keeping:
    """A job, and what its controller keeps."""

    def __init__(self, folder: Path | None) -> None:
        self.job = SimulatedJob(world_size=2, num_spares=0).join()
        self.job.withhold(self.job.workers[1], WorkerReady)
        self.stores = ControllerStores(folder)
        self._number = 0
        self.settle()

    def settle(self) -> list[StoreAnswered]:
        self.job.settle()
        return self.stores.settle(self.job.machine)

    def ask(self, operation: str, key: str, value: bytes = b"") -> tuple[bytes, ...] | None:
        """The values of the one answer that comes at once."""
        self._number += 1
        generation = self.job.machine.generation
        request = StoreRequested(self.job.holder(0).number, generation, self._number, operation, (key,), value)
        answers = self.stores.request(request, self.job.machine)
        assert answers is not None
        (answer,) = answers
        return answer.values

    def lose_rank_1_in_start_up(self) -> None:
        assert self.job.machine.stage is Stage.STARTING
        self.job.kill(self.job.holder(1))
        while self.job.where != (Stage.STARTING, 2):
            next(self.job.moves(training=False))[1]()
            self.stores.settle(self.job.machine)
        self.job.withhold(self.job.holder(1), WorkerReady)
        self.settle()
        assert self.job.where == (Stage.STARTING, 2)


@pytest.mark.parametrize("is_in_files", [False, True], ids=["in memory", "in files"])
def test_a_start_up_that_was_interrupted_leaves_nothing(is_in_files: bool, tmp_path: Path) -> None:
    """It was never complete, so what its ranks exchanged is not what the ranks of the next one did."""
    keeping = Keeping(tmp_path if is_in_files else None)
    assert keeping.ask("keep", "of the first", b"1") == (b"1",)
    assert keeping.ask("job_set", "of the first", b"1") == ()
    keeping.lose_rank_1_in_start_up()
    assert keeping.ask("keep", "of the second", b"2") == (b"1",)
    keeping.job.release()
    keeping.settle()
    assert keeping.job.where == (Stage.TRAINING, 2)
    assert keeping.ask("kept", "of the first") == ()
    assert keeping.ask("kept", "of the second") == (b"2",)
    assert keeping.ask("job_check", "of the first") == (b"0",)
    keeping.stores.close()
    if is_in_files:
        assert b"of the first" not in (tmp_path / "start-up").read_bytes()
        assert b"of the first" not in (tmp_path / "store").read_bytes()


def test_a_start_up_that_goes_on_keeps_what_it_has() -> None:
    keeping = Keeping(None)
    assert keeping.ask("keep", "name", b"1") == (b"1",)
    assert keeping.ask("job_set", "name", b"1") == ()
    keeping.settle()
    keeping.job.release()
    keeping.settle()
    assert keeping.job.where == (Stage.TRAINING, 1)
    assert keeping.ask("kept", "name") == (b"1",)
    assert keeping.ask("job_get", "name") == (b"1",)
