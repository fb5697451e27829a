"""A rank's snapshots in memory: what they hold, and which of them can be gone back to."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.worker.state.parts import OPTIMIZERS, Keeps, content, small, train

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch
from keepstep.protocol.messages import Member, Membership
from keepstep.protocol.snapshots import NUM_TRIALS, TRIAL_EVERY
from keepstep.shared import snapshotfile
from keepstep.shared.snapshotfile import SnapshotFile
from keepstep.shared.tagpage import SnapshotMoment
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.step import side_copies
from keepstep.worker.step import snapshots as module
from keepstep.worker.step.second_copies import OnMoment, SecondCopies
from keepstep.worker.step.snapshots import Snapshots, parse_every

LONE = Membership.of(Member(rank, "n", str(rank)) for rank in range(2))


RANK = 1


def snapshots_of(
    state: ProtectedState, descriptor: int, every: int | None = 1, on_moment: OnMoment | None = None
) -> Snapshots:
    file = SnapshotFile(os.dup(descriptor))
    return Snapshots(state, file, every, SecondCopies(file, lambda: None, lambda error: None), on_moment=on_moment)


class Rank:
    """A state that trains, and its memory, which outlives it."""

    def __init__(
        self,
        descriptor: int,
        every: int | None = 1,
        seed: int = 3,
        optimizer: str = "adamw",
        on_moment: OnMoment | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.model = small()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.own = Keeps({"seen": 0})
        self.state = ProtectedState({"model": self.model, "optimizer": self.optimizer, "own": self.own})
        self.state.knows_written = True
        self.snapshots = snapshots_of(self.state, descriptor, every, on_moment)
        self.snapshots.resumed(0, RANK, LONE, None)
        self.contents: dict[int, Any] = {}
        """At each step that was handed out."""

    def step(self, step: int) -> None:
        self.contents[step] = content(self.state)
        self.snapshots.hand_out(step)
        self.snapshots.complete(step, lambda is_waiting: None)
        train(self.model, [self.optimizer], 1, step)
        self.own.state = {"seen": step + 1}


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = snapshotfile.create("test")
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "adafactor"])
def test_a_rank_goes_back_to_either_of_its_two(memory: int, optimizer: str) -> None:
    rank = Rank(memory, optimizer=optimizer)
    for step in range(5):
        rank.step(step)
    assert rank.snapshots.steps(RANK) == (3, 4)
    for back in (4, 3):
        assert rank.snapshots.load(RANK, back)
        assert content(rank.state) == rank.contents[back]


def test_the_snapshot_of_the_next_step_is_taken_where_the_loop_cannot_go_back(memory: int) -> None:
    rank = Rank(memory, every=5)
    rank.snapshots.take_ahead(lambda step: step in (3, 4))
    for step in range(3):
        rank.step(step)

    def pass_on(step: int, seen: int) -> Any:
        rank.snapshots.hand_out(step)
        rank.own.state = {"seen": seen}  # the script's code in a step without an update
        rank.snapshots.complete(step, lambda is_waiting: None)
        return content(rank.state)

    pass_on(3, seen=30)
    at_4 = pass_on(3, seen=31)  # it comes again
    assert rank.snapshots.steps(RANK) == (0, 4)
    at_5 = pass_on(4, seen=40)
    assert rank.snapshots.steps(RANK) == (4, 5)
    rank.step(5)
    for step, expected in ((4, at_4), (5, at_5)):
        assert rank.snapshots.load(RANK, step)
        assert content(rank.state) == expected


def test_to_a_step_before_there_was_optimizer_state(memory: int) -> None:
    rank = Rank(memory)
    rank.step(0)
    rank.step(1)
    assert rank.snapshots.load(RANK, 0)
    assert content(rank.state) == rank.contents[0]
    assert not rank.optimizer.state


def test_a_replacement_gets_what_the_former_process_has_left(memory: int) -> None:
    former = Rank(memory, every=2)
    for step in range(6):
        former.step(step)
    own = snapshotfile.create("own")
    replacement = Rank(own, every=2, seed=99)
    replacement.snapshots.inherit(f"/proc/{os.getpid()}/fd/{memory}", RANK, (2, 4))
    assert replacement.snapshots.steps(RANK) == (2, 4)
    assert replacement.snapshots.load(RANK, 4)
    assert content(replacement.state) == former.contents[4]
    replacement.snapshots.resumed(4, RANK, LONE, None)
    replacement.step(4)
    assert replacement.snapshots.steps(RANK) == (2, 4)
    replacement.snapshots.passed_barrier()
    assert replacement.snapshots.steps(RANK) == (4,), "its own"
    assert content(replacement.state) == content(former_at_5(former))
    os.close(own)


def test_another_rank_is_sent_what_is_in_memory(memory: int) -> None:
    rank = Rank(memory)
    for step in range(3):
        rank.step(step)
    header, held = rank.snapshots.image((0, RANK), 1)
    assert header.step == 1
    tensors = {entry.name: each.tensor for entry, each in zip(header.all_tensors, held, strict=True)}
    rank.snapshots.load(RANK, 1)
    for name, tensor in (*rank.state.parameters(), *rank.state.buffers(), *rank.state.optimizer_tensors()):
        assert torch.equal(tensors[name], tensor), name
    with pytest.raises(RemoteProtocolError, match="no snapshot of rank 0 at step 1 in memory"):
        rank.snapshots.image((0,), 1)


def former_at_5(former: Rank) -> ProtectedState:
    former.snapshots.load(RANK, 4)
    train(former.model, [former.optimizer], 1, 4)
    former.own.state = {"seen": 5}
    return former.state


def test_what_lies_behind_the_step_at_which_all_resume_counts_no_more(memory: int) -> None:
    rank = Rank(memory)
    for step in range(3):
        rank.step(step)
    rank.snapshots.load(RANK, 1)
    rank.snapshots.resumed(1, RANK, LONE, None)
    assert rank.snapshots.steps(RANK) == (1,)
    assert not rank.snapshots.load(RANK, 2)


def test_nothing_is_done_where_there_is_none_of_that_step(memory: int) -> None:
    rank = Rank(memory)
    rank.step(0)
    before = content(rank.state)
    assert not rank.snapshots.load(RANK, 7)
    assert content(rank.state) == before


def test_a_forward_that_changes_buffers_changes_no_snapshot(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy runs beside it: here it begins when the forward is through."""
    may_begin = threading.Event()
    copy = module._Copy.run
    monkeypatch.setattr(module._Copy, "run", lambda *arguments: may_begin.wait(60) and copy(*arguments))
    rank = Rank(memory)
    rank.contents[0] = content(rank.state)
    rank.snapshots.hand_out(0)
    rank.model(torch.randn(6, 4))
    rank.own.state["seen"] = 7
    assert content(rank.state) != rank.contents[0]
    assert rank.snapshots.steps(RANK) == (), "not before it is complete"
    may_begin.set()
    rank.snapshots.complete(1, lambda is_waiting: None)
    assert rank.snapshots.load(RANK, 0)
    assert content(rank.state) == rank.contents[0]


def test_a_copy_that_is_cut_off_counts_for_nothing(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin = threading.Event()
    copy = module._Copy.run
    monkeypatch.setattr(module._Copy, "run", lambda *arguments: may_begin.wait(60) and copy(*arguments))
    rank = Rank(memory)
    may_begin.set()
    rank.step(0)
    rank.step(1)
    may_begin.clear()
    rank.snapshots.hand_out(2)
    assert rank.snapshots.steps(RANK) == (1,), "its slot was that of step 0"
    stopper = threading.Timer(0.05, may_begin.set)
    stopper.start()
    rank.snapshots.release_state()
    stopper.join()
    assert rank.snapshots.steps(RANK) == (1,)
    assert rank.snapshots.load(RANK, 1)
    assert content(rank.state) == rank.contents[1]


def test_a_step_that_is_repeated_has_its_snapshot_already(memory: int) -> None:
    rank = Rank(memory)
    rank.step(0)
    rank.snapshots.hand_out(1)
    rank.snapshots.hand_out(1)
    rank.snapshots.complete(1, lambda is_waiting: None)
    rank.snapshots.hand_out(1)
    assert rank.snapshots.steps(RANK) == (0, 1)


def test_damage_is_no_state(memory: int) -> None:
    rank = Rank(memory)
    rank.step(0)
    before = content(rank.state)
    view = rank.snapshots._file._maps[0]
    view[len(view) // 2] ^= 1
    with pytest.raises(RemoteProtocolError, match="wrong checksum"):
        rank.snapshots.load(RANK, 0)
    assert content(rank.state) == before
    assert rank.snapshots.steps(RANK) == (), "the next recovery does not count on it"


def test_a_replacement_counts_on_damage_once(memory: int) -> None:
    former = Rank(memory)
    for step in range(2):
        former.step(step)
    replacement = snapshots_of(former.state, snapshotfile.create("replacement"))
    replacement.inherit(f"/proc/{os.getpid()}/fd/{memory}", RANK, (0, 1))
    assert replacement.steps(RANK) == (0, 1)
    file = former.snapshots._file
    found = file.find(RANK, 1)
    assert found is not None
    file._maps[found.slot][found.num_bytes // 2] ^= 1
    with pytest.raises(RemoteProtocolError, match="wrong checksum"):
        replacement.image([RANK], 1)
    assert replacement.steps(RANK) == (0,)
    assert not replacement.load(RANK, 1)
    assert replacement.load(RANK, 0)


def test_another_model_is_refused(memory: int) -> None:
    rank = Rank(memory)
    rank.step(0)
    model = torch.nn.Linear(7, 5)
    other = snapshots_of(ProtectedState({"model": model, "own": Keeps({})}), memory)
    with pytest.raises(StateMismatch, match="the snapshot"):
        other.load(RANK, 0)


def test_memory_that_is_not_there(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: 100)
    with pytest.raises(ConfigurationError, match=r"2 x 0 MB of memory, which is not there: 0 MB are left"):
        Rank(memory).step(0)


def test_how_often_is_agreed_after_some_steps(memory: int) -> None:
    rank = Rank(memory, every=None)
    said = []
    for step in range(NUM_TRIALS + 1):
        rank.step(step)
        assert (step in rank.snapshots.steps(RANK)) is (step % TRIAL_EVERY == 0)
        said.append(rank.snapshots.proposal(step))
    assert said[0] == 0, "it cannot tell yet"
    assert [step for step, each in enumerate(said) if each is not None] == [0, NUM_TRIALS - 1]
    assert (said[NUM_TRIALS - 1] or 0) >= 1
    rank.snapshots.agreed(4)
    assert rank.snapshots.every == 4


@pytest.mark.parametrize(("value", "every"), [("auto", None), ("off", 0), (1, 1), (17, 17)])
def test_what_can_be_asked_for(value: object, every: int | None) -> None:
    assert parse_every(value) == every


@pytest.mark.parametrize("value", [0, -1, True, 1.0, None, "3", "on"])
def test_what_cannot(value: object) -> None:
    with pytest.raises(ConfigurationError, match='allowed are 1 and more, "auto" and "off"'):
        parse_every(value)


def test_what_becomes_of_a_snapshot_is_reported(memory: int) -> None:
    told: list[tuple[SnapshotMoment, int, int]] = []
    rank = Rank(memory, on_moment=lambda moment, step, num_bytes, at_ns: told.append((moment, step, at_ns)))
    rank.step(0)
    rank.step(1)
    assert rank.snapshots.load(RANK, 1)
    assert [(moment, step) for moment, step, _ in told] == [
        (SnapshotMoment.BEGUN, 0),
        (SnapshotMoment.COMPLETE, 0),
        (SnapshotMoment.BEGUN, 1),
        (SnapshotMoment.COMPLETE, 1),
        (SnapshotMoment.LOADED, 1),
    ]
    assert [at_ns for *_, at_ns in told] == sorted(at_ns for *_, at_ns in told)


def test_a_snapshot_that_was_cut_off_is_never_complete(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[SnapshotMoment] = []
    rank = Rank(memory, on_moment=lambda moment, *_: told.append(moment))
    is_let_go = threading.Event()
    copy = side_copies.copy_flat

    def held(to: torch.Tensor, source: torch.Tensor) -> None:
        assert threading.current_thread() is threading.main_thread() or is_let_go.wait(60)
        copy(to, source)

    monkeypatch.setattr(side_copies, "copy_flat", held)
    monkeypatch.setattr(side_copies.HostCopies, "chunk_bytes", 8)
    rank.snapshots.hand_out(0)
    releasing = threading.Thread(target=rank.snapshots.release_state)
    releasing.start()
    assert rank.snapshots._copy is not None
    while not rank.snapshots._copy.is_cancelled:
        pass
    is_let_go.set()
    releasing.join()
    assert told == [SnapshotMoment.BEGUN]


def test_a_rank_that_waits_for_its_copy_says_so(memory: int) -> None:
    """It is not hung: the first copies touch new memory, which can take longer than a backward."""
    rank = Rank(memory)
    rank.snapshots.hand_out(0)
    said: list[bool] = []
    rank.snapshots.complete(0, said.append)
    assert said[:2] == [True, False]
