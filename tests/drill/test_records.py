"""What each rank's state was at every step: who writes it down, and what counts of it."""

from pathlib import Path

import pytest

from keepstep.drill import records
from keepstep.drill.records import (
    FINISHED,
    FOLDER,
    STATE_DICTS,
    StateRecorder,
    StepPlace,
    StepState,
    places_of,
    read_states,
)
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.protocol.worker import WorkerMachine
from keepstep.worker.state import digests


class Worker:
    """Moves through its steps, and tells its recorder as `Coordination` does."""

    def __init__(self, worker: int, rank: int, run_dir: Path, step: int = 0) -> None:
        self.machine = WorkerMachine(worker, 4711, rank)
        self.machine.steps.restored(step)
        self.framework_step: int | None = None
        self.fails = False
        self.state: dict[str, str] = {"model.weight": "a"}
        self.recorder = StateRecorder(self, run_dir)

    def digests(self) -> dict[str, tuple[str, tuple[float, float, float] | None]]:
        return {name: (digest, (0.5, 1.0, 0.25)) for name, digest in self.state.items()}

    def save_state_dicts(self, path: Path) -> None:
        if self.fails:
            path.write_text("half")
            raise OSError("no space left on device")
        path.write_text(str(self.state))

    def move(self, *events: StepEvent) -> None:
        for event in events:
            self.machine.steps.advance(event)
            self.recorder.observe(str(self.machine.steps.phase))

    def step(self, weight: str) -> None:
        self.move(StepEvent.STEP_ENTERED, StepEvent.BACKWARD_BEGUN, StepEvent.FORWARD_BEGUN, StepEvent.BACKWARD_BEGUN)
        self.move(StepEvent.GRADIENTS_SYNCED, StepEvent.BARRIER_LEFT)
        self.state["model.weight"] = weight
        self.move(StepEvent.STEP_COMPLETED)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second later than the last."""
    times = iter(range(1000))
    monkeypatch.setattr(records.time, "monotonic", lambda: float(next(times)))


def weights(states: dict[int, StepState]) -> dict[int, tuple[str, ...]]:
    return {step: state.digests for step, state in states.items()}


def test_a_state_is_recorded_once_at_the_start_of_each_step_and_after_the_last(tmp_path: Path) -> None:
    worker = Worker(0, 1, tmp_path)
    worker.step("b")
    worker.step("c")
    worker.recorder.observe(FINISHED)
    states = read_states(tmp_path)
    assert list(states) == [1]
    assert weights(states[1]) == {0: ("a",), 1: ("b",), 2: ("c",)}
    assert [state.at_s for state in states[1].values()] == [0.0, 2.0, 4.0]
    assert [state.between_s for state in states[1].values()] == [0.0, 1.0, 1.0]


def test_the_steps_of_a_framework_are_known_by_its_numbers(tmp_path: Path) -> None:
    worker = Worker(0, 0, tmp_path)
    worker.step("b")
    worker.framework_step = 1
    worker.step("c")
    states = read_states(tmp_path)[0]
    assert {step: state.framework_step for step, state in states.items()} == {0: None, 1: 1}


def test_the_moments_of_each_step_and_the_time_after_it_are_known(tmp_path: Path) -> None:
    worker = Worker(0, 0, tmp_path)
    worker.step("b")
    end_of_epoch = (StepEvent.GRADIENTS_SYNCED, StepEvent.BARRIER_LEFT, StepEvent.STEP_COMPLETED)
    worker.move(StepEvent.STEP_ENTERED, *end_of_epoch)
    worker.recorder.observe(FINISHED)
    first, second = places_of(read_states(tmp_path))
    assert first == StepPlace(0, ("forward", "backward", "synced", "optimizer", "updated"), 1)
    assert second == StepPlace(1, ("forward", "synced", "optimizer", "updated"), 1)


def test_torch_saves_the_last_state_and_a_full_disk_ends_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [Worker(rank, rank, tmp_path) for rank in (0, 1)]
    workers[1].fails = True
    for worker in workers:
        worker.step("b")
        worker.recorder.observe(FINISHED)
    assert {path.name: path.read_text() for path in (tmp_path / STATE_DICTS).iterdir()} == {
        "rank0.pt": "{'model.weight': 'b'}"
    }
    assert "keepstep drill: rank1.pt was not saved: no space left on device" in capsys.readouterr().err


def test_moments_of_other_threads_and_of_a_recovery_record_nothing(tmp_path: Path) -> None:
    worker = Worker(0, 0, tmp_path)
    worker.move(StepEvent.STEP_ENTERED)
    for moment in ("stop", "bucket", "reset", "restore", "ready", str(Phase.FORWARD)):
        worker.recorder.observe(moment)
    assert weights(read_states(tmp_path)[0]) == {0: ("a",)}


def test_a_step_that_is_begun_again_counts_by_the_last_time(tmp_path: Path) -> None:
    worker = Worker(0, 0, tmp_path)
    worker.move(StepEvent.STEP_ENTERED, StepEvent.BACKWARD_BEGUN, StepEvent.STEP_UNDONE)
    worker.state["model.weight"] = "not put back"
    worker.step("b")
    assert weights(read_states(tmp_path)[0]) == {0: ("not put back",)}


def test_a_replacement_goes_on_where_the_lost_rank_ended(tmp_path: Path) -> None:
    lost = Worker(9, 0, tmp_path)  # its file is read after that of its replacement
    lost.step("b")
    lost.step("c")
    replacement = Worker(10, 0, tmp_path, step=1)
    replacement.state["model.weight"] = "restored"
    replacement.step("d")
    assert weights(read_states(tmp_path)[0]) == {0: ("a",), 1: ("restored",)}


def test_what_a_killed_worker_had_begun_to_write_is_left_out(tmp_path: Path) -> None:
    worker = Worker(0, 0, tmp_path)
    worker.step("b")
    path = tmp_path / FOLDER / "0"
    path.write_bytes(path.read_bytes() + b'[0,1,3.0,["')
    assert list(read_states(tmp_path)[0]) == [0]


def test_names_are_written_where_they_change(tmp_path: Path) -> None:
    worker = Worker(0, 0, tmp_path)
    worker.step("b")
    worker.state["optimizer/0/exp_avg"] = "m"
    worker.step("c")
    worker.step("d")
    assert [state.names for state in read_states(tmp_path)[0].values()] == [
        ("model.weight",),
        ("model.weight", "optimizer/0/exp_avg"),
        ("model.weight", "optimizer/0/exp_avg"),
    ]
    assert (tmp_path / FOLDER / "0").read_text().count("exp_avg") == 1


def test_a_run_without_records_has_no_states(tmp_path: Path) -> None:
    assert read_states(tmp_path) == {}


def test_states_differ_in_what_one_of_them_lacks(tmp_path: Path) -> None:
    state = StepState(0.0, ("a", "b"), ("1", "2"))
    assert state.differing(StepState(9.0, ("a", "b"), ("1", "2"))) == []
    assert state.differing(StepState(0.0, ("b", "a"), ("2", "1"))) == []
    assert state.differing(StepState(0.0, ("a", "b", "c"), ("1", "3", "4"))) == ["b", "c"]
    assert state.differing(StepState(0.0, ("a",), ("1",))) == ["b"]


def test_the_worker_marks_nan_as_it_is_read() -> None:
    assert records.HOLDS_NAN == digests.HOLDS_NAN
