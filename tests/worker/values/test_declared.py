"""Values that the script declares: when they may change, and that every rank holds those of all."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.worker.ranks import join, run_ranks

from keepstep.errors import ConfigurationError, InternalError, StateMismatch, UsageError
from keepstep.worker.values import declared as module
from keepstep.worker.values.declared import DeclaredState

TABLE = "per rank"


def alone(rank: int | None = 0) -> DeclaredState:
    return DeclaredState(lambda: rank, lambda: False)


# ---- when they may change -------------------------------------------------------------------------------------------


LATE = r"session\.state\(per_rank=True\)\.losses was changed after optimizer\.step\(\)"


def test_replicated_values_may_change_at_any_time() -> None:
    declared = alone()
    state = declared.declare("", False, {"wins": 0, "losses": []})
    for moment in (
        lambda: declared.begin(1, share=True),
        declared.hand_out,
        lambda: declared.before_barrier(1),
        declared.check,
        declared.hand_out,
        declared.undone,
        declared.end,
    ):
        state.wins += 1
        state.losses.append(1)
        moment()
    assert state.wins == 7


def test_local_values_may_change_from_the_hand_out_to_the_barrier() -> None:
    declared = alone()
    own = declared.declare("", True, {"losses": 0})
    own.losses = 1
    declared.begin(1, share=True)
    for _ in range(2):
        with pytest.raises(UsageError, match=LATE):
            own.losses = 2
        declared.hand_out()
        own.losses = 3
        declared.undone()
        own.losses = 4  # put back before the step is repeated
        declared.hand_out()
        declared.before_barrier(1)
        with pytest.raises(UsageError, match=LATE):
            own.losses = 5
        declared.check()
    declared.end()
    own.losses = 6


def test_late_changes_in_place_are_found_at_the_end_of_the_step_or_at_the_next() -> None:
    declared = alone()
    own = declared.declare("", True, {"losses": []})
    declared.begin(1, share=True)
    for step in range(2):
        declared.hand_out()
        own.losses.append(step)
        declared.before_barrier(1)
        own.losses.append(2)
        with pytest.raises(UsageError, match=LATE):
            declared.check()
        own.losses.pop()
        declared.check()
    own.losses.append(3)
    with pytest.raises(UsageError, match=LATE):
        declared.hand_out()


@pytest.mark.parametrize(
    ("name", "per_rank", "values", "problem"),
    [
        ("", False, {}, "session.state(): give it attributes with their first values"),
        ("first", True, {"a": 1}, "session.state('first', per_rank=True) was called twice"),
        ("other", False, {"a": object()}, "session.state('other').a is a builtins.object"),
    ],
)
def test_declarations_that_are_refused(name: str, per_rank: bool, values: dict[str, Any], problem: str) -> None:
    declared = alone()
    declared.declare("first", False, {"a": 1})
    declared.declare("first", True, {"a": 1})
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        declared.declare(name, per_rank, values)


def test_nothing_is_declared_after_the_first_step() -> None:
    declared = alone()
    declared.begin(1, share=True)
    with pytest.raises(UsageError, match=r"session\.state\(\) after the first step"):
        declared.declare("", False, {"a": 1})


def test_local_values_that_are_too_large_are_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = alone()
    own = declared.declare("", True, {"small": 0, "large": b""})
    declared.begin(1, share=True)
    declared.hand_out()
    own.large = b"x" * module.MAX_RANK_BYTES
    with pytest.raises(ConfigurationError, match=r"take 65\d\d\d bytes, and 65536 are allowed on 1 ranks.*\.large"):
        declared.before_barrier(1)
    own.large = b"x" * 1000
    monkeypatch.setattr(module, "MAX_TABLE_BYTES", 100)
    with pytest.raises(ConfigurationError, match="and 100 are allowed"):
        declared.before_barrier(1)


# ---- between ranks --------------------------------------------------------------------------------------------------


def in_a_step(declared: DeclaredState, step: int, world_size: int) -> None:
    """To the end of a step in which nothing more changes."""
    declared.before_barrier(world_size)
    declared.check()


def every_rank_holds_all(rank: int, num_ranks: int, path: Path) -> Any:
    join(path, rank, num_ranks)
    declared = DeclaredState(lambda: rank, lambda: False)
    own = declared.declare("", True, {"rank": -1, "total": torch.zeros(()), "text": ""})
    own.rank = rank
    declared.begin(num_ranks, share=True)
    table = declared.objects[TABLE]
    states = [table.state_dict()]
    for step in range(3):
        declared.hand_out()
        own.total += rank + step
        own.text = "x" * (1000 * step * rank)  # of another length on each rank, and longer and longer
        in_a_step(declared, step, num_ranks)
        states.append(table.state_dict())
    # Each rank's part as another rank would get it, and its own state back as of an earlier step.
    seen = []
    for state in states:
        for other in range(num_ranks):
            replacement = DeclaredState(lambda other=other: other, lambda: False)
            mine = replacement.declare("", True, {"rank": -1, "total": torch.zeros(()), "text": ""})
            replacement.begin(num_ranks, share=False)
            replacement.objects[TABLE].load_state_dict(state)
            replacement.hand_out()  # what was loaded is no change
            seen.append((mine.rank, mine.total.item(), len(mine.text)))
    table.load_state_dict(states[1])
    seen.append((own.rank == rank, own.total.item() == rank, own.text))
    declared.hand_out()
    in_a_step(declared, 1, num_ranks)
    return states, seen


def test_every_rank_holds_the_local_values_of_all(tmp_path: Path) -> None:
    results = run_ranks(3, every_rank_holds_all, tmp_path)
    assert all(result[0] == results[0][0] for result in results)
    expected = [
        (rank, float(sum(rank + step for step in range(done))), 1000 * max(0, done - 1) * rank)
        for done in range(4)
        for rank in range(3)
    ]
    assert all(result[1] == [*expected, (True, True, "")] for result in results)


# ---- what is loaded -------------------------------------------------------------------------------------------------


def a_table(monkeypatch: pytest.MonkeyPatch, world_size: int = 1) -> tuple[Any, dict[str, Any]]:
    """A protected table, and what one rank alone has put into it."""
    monkeypatch.setattr(module.dist, "get_world_size", lambda: world_size)
    declared = alone()
    declared.declare("", True, {"a": 1})
    declared.begin(1, share=True)
    table = declared.objects[TABLE]
    return table, table.state_dict()


def test_a_checkpoint_of_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table, state = a_table(monkeypatch, world_size=2)
    with pytest.raises(StateMismatch, match=r"of 1 ranks has of its own \(per_rank\), and this job has 2: start it"):
        table.load_state_dict(state)


def test_a_checkpoint_of_other_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table, state = a_table(monkeypatch)
    with pytest.raises(StateMismatch, match=r"is .* here, and in the state"):
        table.load_state_dict(state | {"names": {"session.state(per_rank=True)": ["b"]}})


def test_a_table_that_was_not_filled_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    table, state = a_table(monkeypatch)
    with pytest.raises(InternalError, match="local values of 0 ranks"):
        table.load_state_dict(state | {"num_rows": 0})


def test_what_is_protected_can_be_carried() -> None:
    declared = alone()
    declared.declare("", True, {"a": 1})
    declared.declare("", False, {"a": 1})
    assert list(declared.objects) == [TABLE, "session.state()"]
    declared.begin(1, share=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(declared.objects[TABLE].state_dict()))["num_rows"] == 1
