"""Replicas compare what they hold before the gradient barrier: what is found, and what each rank does about it."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import file_store, join, run_ranks
from tests.worker.state.parts import small, train

from keepstep.errors import StateMismatch, StepInterrupted
from keepstep.protocol.messages import Member, Membership
from keepstep.worker.state.layout import start_of
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.step import comparison as module
from keepstep.worker.step.comparison import Comparison

STEP = 30


class Rank:
    """One rank with a model that was trained for a while; it takes note of what it would tell the controller."""

    def __init__(self, rank: int, shards: tuple[str, ...], generation: int = 1, *, values: float = 0.0) -> None:
        torch.manual_seed(3)
        self.model = small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        train(self.model, [self.optimizer], 2, 3)
        self.told: list[str] = []
        self.machine = types.SimpleNamespace(
            rank=rank,
            generation=generation,
            interrupted=False,
            used_echo=False,
            membership=Membership.of(Member(each, "n", shard) for each, shard in enumerate(shards)),
            refused=lambda error: self.told.append(f"refused: {error}"),
            breaks_off=lambda: self.told.append("breaks off"),
            stands_apart=lambda error: self.told.append(f"apart: {error}"),
            echoed=lambda: self.told.append("echoed"),
        )
        coordination: Any = types.SimpleNamespace(
            machine=self.machine, link=None, page=types.SimpleNamespace(set_waiting=lambda _is_waiting: None)
        )
        self.state = ProtectedState({"model": self.model, "optimizer": self.optimizer}, shard=shards[rank])
        self.comparison = Comparison(coordination, self.state, lambda: {"best": str(values).encode()} if values else {})

    def step(self, step: int, change: str = "", between: Callable[[], None] = lambda: None) -> list[str]:
        """What the rank tells in a step, and how it ends; the change is made before the step."""
        if change:
            globals()[change](self)
        self.comparison.hand_out(step)
        between()
        try:
            self.comparison.before_barrier(step)
        except (StateMismatch, StepInterrupted) as error:
            self.told.append(f"{type(error).__name__}: {error}")
        told, self.told = self.told, []
        return told


def other_weight(rank: Rank) -> None:
    with torch.no_grad():
        next(rank.model.parameters()).view(-1)[0] += 1e-7


def other_buffer(rank: Rank) -> None:
    rank.model.get_buffer("1.running_mean")[0] += 1.0


def other_moment(rank: Rank) -> None:
    rank.optimizer.state[next(rank.model.parameters())]["exp_avg"][0] += 1.0


def other_rate(rank: Rank) -> None:
    rank.optimizer.param_groups[0]["lr"] = 0.2


def all_nan(rank: Rank) -> None:
    with torch.no_grad():
        next(rank.model.parameters()).fill_(float("nan"))


def joined(rank: int, size: int, path: Path) -> None:
    join(path, rank, size)
    vars(module)["LinkStore"] = lambda _link, generation, name, _timeout: file_store(path, generation, name)


def in_a_first_step(rank: int, size: int, path: Path, change: str, shards: tuple[str, ...]) -> list[str]:
    joined(rank, size, path)
    return Rank(rank, shards).step(4, change if rank == 1 else "")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("other_weight", "'model.0.weight'"),
        ("other_buffer", "'model.1.running_mean'"),
        ("other_moment", "'optimizer/0/exp_avg'"),
        ("other_rate", "the host value optimizer.param_groups[0]['lr']"),
    ],
)
def test_in_the_first_steps_a_difference_is_an_error(change: str, named: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, in_a_first_step, tmp_path, change, ("", ""))
    assert first == [], "the one that is compared with goes on to the barrier"
    (error,) = second
    assert error.startswith("StateMismatch: ")
    assert f"{named} differs between rank 1 and rank 0 in step 4" in error
    assert 'protect(shard=f"rank {session.rank}")' in error


@pytest.mark.parametrize(("change", "shards"), [("", ("", "", "")), ("other_moment", ("a", "b", "a"))])
def test_what_may_be_so_is_no_error(change: str, shards: tuple[str, ...], tmp_path: Path) -> None:
    """Equal replicas, and different shards."""
    assert run_ranks(3, in_a_first_step, tmp_path, change, shards) == [[], [], []]


def after_a_recovery(rank: int, size: int, path: Path, changes: dict[int, str], step: int) -> list[str]:
    joined(rank, size, path)
    own = Rank(rank, ("",) * size, generation=2)
    own.comparison.resumed(STEP, is_restored=rank == size - 1)
    return own.step(step, changes.get(rank, ""))


@pytest.mark.parametrize("step", [STEP, STEP + 1])
@pytest.mark.parametrize("change", ["other_weight", "other_moment", "other_rate"])
def test_a_rank_that_was_restored_and_alone_differs_refuses_its_state(change: str, step: int, tmp_path: Path) -> None:
    """In the restored state itself, and after one update, in which what is in no state_dict() shows."""
    told = run_ranks(3, after_a_recovery, tmp_path, {2: change}, step)
    assert told[:2] == [["breaks off", "StepInterrupted: "]] * 2, "no rank keeps a step with gradients of another state"
    assert told[2][0].startswith("refused: ")
    assert "differs between rank 2 and rank 0 after it was restored" in told[2][0]
    assert told[2][1:] == ["StepInterrupted: "]


def test_ranks_that_had_trained_apart_go_on(tmp_path: Path) -> None:
    told = run_ranks(3, after_a_recovery, tmp_path, {1: "other_weight"}, STEP)
    assert told[0] == told[2] == []
    assert told[1][0].startswith(f"apart: step {STEP}: 'model.0.weight' differs between rank 1 and rank 0")
    assert len(told[1]) == 1


def before_and_after_another_failure(rank: int, size: int, path: Path) -> list[list[str]]:
    """Rank 1 is restored; in the second step after that another failure breaks the comparison, or none does."""
    joined(rank, size, path)
    found = []
    for is_broken in (True, False):
        own = Rank(rank, ("",) * size, generation=2 + 2 * is_broken)
        own.comparison.resumed(STEP, is_restored=rank == 1)
        assert own.step(STEP) == []
        own.machine.used_echo = is_broken
        assert own.step(STEP + 1) == []
        own.machine.used_echo = False
        own.machine.generation += 1
        own.comparison.resumed(STEP + 1, is_restored=False)
        found.append([said.partition(":")[0] for said in own.step(STEP + 1, "other_weight" if rank == 1 else "")])
    return found


def test_a_rank_that_was_not_compared_after_an_update_still_counts_as_restored(tmp_path: Path) -> None:
    first, second = run_ranks(2, before_and_after_another_failure, tmp_path)
    assert first == [["breaks off", "StepInterrupted"], []]
    assert second == [["refused", "StepInterrupted"], ["apart"]]


def test_nan_everywhere_is_no_difference(tmp_path: Path) -> None:
    told = run_ranks(3, after_a_recovery, tmp_path, dict.fromkeys(range(3), "all_nan"), STEP)
    assert told == [[], [], []]


def with_values(rank: int, size: int, path: Path, values: dict[int, float], step: int) -> list[str]:
    joined(rank, size, path)
    return Rank(rank, ("a", "b"), values=values[rank]).step(step)


def test_declared_values_are_equal_on_all_shards(tmp_path: Path) -> None:
    assert run_ranks(2, with_values, tmp_path, {0: 0.5, 1: 0.5}, 64) == [[], []]
    (tmp_path / "again").mkdir()
    first, second = run_ranks(2, with_values, tmp_path / "again", {0: 0.5, 1: 0.25}, 64)
    assert first == []
    assert "the host value best differs between rank 1 and rank 0 in step 64" in second[0]


# ---- what is computed beside a step ---------------------------------------------------------------------------------


def beside(_rank: int, _size: int, _path: Path) -> list[bool]:
    """For each way in which a tensor changes in a step: whether the description is that of the end of the step."""
    found = []
    for change in ("", "other_weight", "other_buffer", "other_moment"):
        rank = Rank(0, ("", ""), generation=2)
        rank.comparison.resumed(STEP, is_restored=False)
        rank.comparison.hand_out(STEP)
        assert rank.comparison._beside is not None
        assert len(rank.comparison._beside.result()) > 4  # they were computed before the change
        if change:
            globals()[change](rank)
        found.append(start_of(rank.state, digest=rank.comparison._digest_beside()) == start_of(rank.state))
    return found


def test_a_digest_of_another_moment_is_never_taken(tmp_path: Path) -> None:
    """A digest that a thread has computed counts only if its tensor has not changed since."""
    assert run_ranks(1, beside, tmp_path) == [[True] * 4]


def asked(_rank: int, _size: int, _path: Path) -> list[int]:
    rank = Rank(0, ("", ""), generation=2)
    rank.comparison.resumed(STEP, is_restored=False)
    steps = []
    for step in range(STEP - 1, 70):
        rank.comparison.hand_out(step)
        if rank.comparison._beside is not None:
            steps.append(step)
    return steps


def test_most_steps_compute_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, asked, tmp_path) == [[STEP, STEP + 1]]
