"""Objects that each rank has of its own: every rank holds the state of all, and sends what has changed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import join, run_ranks

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch, UsageError
from keepstep.worker.values import rank_objects
from keepstep.worker.values.declared import DeclaredState
from keepstep.worker.values.rank_objects import RankObjects, _Change, _changed, _runs

TABLE = "per rank"


class Log:
    """An object as a script would write it: lines, and a tensor."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sums = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"lines": "\n".join(self.lines), "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lines = state["lines"].split("\n") if state["lines"] else []
        self.sums.copy_(state["sums"])


class Keeping:
    """An object whose state is set as it stands."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def objects(**things: Any) -> RankObjects:
    made = RankObjects()
    for name, thing in things.items():
        made.add(name, thing)
    return made


# ---- between ranks --------------------------------------------------------------------------------------------------


def every_rank_holds_all(rank: int, num_ranks: int, path: Path) -> Any:
    join(path, rank, num_ranks)
    declared, log = DeclaredState(lambda: rank, lambda: False), Log()
    declared.keep({"log": log})
    log.lines.append(f"begun on {rank}")
    declared.begin(num_ranks, share=True)
    table = declared.objects[TABLE]
    states, expected = [table.state_dict()], [list(log.lines)]
    for step in range(6):
        declared.hand_out()
        if step % 2 and rank != 1:  # in some steps nothing changes, or not on every rank
            log.lines.extend([f"{step} of {rank}"] * (rank + 1))
            log.sums += rank
        declared.before_barrier(num_ranks)
        declared.check()
        states.append(table.state_dict())
        expected.append(list(log.lines))
    seen = []
    for state in states:  # a replacement of each rank, at each step
        for other in range(num_ranks):
            replacement, its = DeclaredState(lambda other=other: other, lambda: False), Log()
            replacement.keep({"log": its})
            replacement.begin(num_ranks, share=False)
            replacement.objects[TABLE].load_state_dict(state)
            replacement.hand_out()  # what was loaded is no change
            seen.append((its.lines, its.sums.tolist()))
    table.load_state_dict(states[2])
    assert (log.lines, log.sums.tolist()) == (expected[2], [0.0 if rank == 1 else float(rank)] * 2)
    declared.hand_out()
    log.lines.append("again")
    declared.before_barrier(num_ranks)
    return states, expected, seen, table.state_dict()


def test_every_rank_holds_the_objects_of_all(tmp_path: Path) -> None:
    results = run_ranks(3, every_rank_holds_all, tmp_path)
    assert all((states, again) == (results[0][0], results[0][3]) for states, _expected, _seen, again in results)
    sums = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0]
    wanted = [
        (results[rank][1][step], [0.0 if rank == 1 else rank * sums[step]] * 2)
        for step in range(7)
        for rank in range(3)
    ]
    assert all(seen == wanted for _states, _expected, seen, _again in results)


def test_what_an_echo_has_returned_is_left_out() -> None:
    """This rank's own changes in place of another's fit nothing; the step is undone."""
    log, echoes = Log(), [False]
    declared = DeclaredState(lambda: 0, lambda: echoes[0])
    declared.keep({"log": log})
    declared.begin(1, share=True)
    before = declared.objects[TABLE].state_dict()
    declared.hand_out()
    log.lines.append("lost")
    echoes[0] = True
    declared.before_barrier(1)
    assert declared.objects[TABLE].state_dict()["objects"] == before["objects"]


# ---- when they may change -------------------------------------------------------------------------------------------


def test_a_change_after_the_barrier_is_refused() -> None:
    log = Log()
    declared = DeclaredState(lambda: 0, lambda: False)
    declared.keep({"log": log})
    declared.begin(1, share=True)
    declared.hand_out()
    log.lines.append("in time")
    declared.before_barrier(1)
    declared.check()
    log.lines.append("late")
    with pytest.raises(UsageError, match=r"per_rank\['log'\] was changed after optimizer\.step\(\)"):
        declared.check()
    with pytest.raises(UsageError, match=r"per_rank\['log'\]"):
        declared.hand_out()


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_a_line_more_of_a_long_log_is_sent_alone() -> None:
    log = Log()
    log.lines = [f"line {number}" for number in range(20_000)]
    made = objects(log=log)
    made.put_together([made.changes(0)])
    assert made.changes(0) == b""
    log.lines.append("one more")
    changes = made.changes(0)
    assert 0 < len(changes) < 500
    made.put_together([changes])
    assert made.changes(0) == b""


def test_changes_make_the_one_state_of_the_other() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draws = random.Random(seed)
    for _ in range(300):
        former = draws.randbytes(draws.choice([0, 1, 63, 64, 65, draws.randrange(2000)]))
        now = bytearray(former[: draws.randrange(len(former) + 1)] if draws.random() < 0.5 else former)
        for _ in range(draws.randrange(4) if now else 0):
            now[draws.randrange(len(now))] ^= draws.randrange(1, 256)
        now += draws.randbytes(draws.choice([0, 1, 64, 100]))
        runs = _runs(former, bytes(now))
        assert _changed(former, _Change("x", len(now), runs)) == now


# ---- what is refused ------------------------------------------------------------------------------------------------


def misnamed(made: RankObjects) -> None:
    other = objects(other=Keeping(a=1))
    made.put_together([other.changes(0)])


def wrong_after_load(made: RankObjects) -> None:
    class Deaf(Keeping):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Sets nothing."""

    source = objects(a=Keeping(x=1.0))
    source.put_together([source.changes(0)])
    objects(a=Deaf(x=2.0)).load(source.packed(), 0)


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (lambda made: made.add("m", torch.nn.Linear(1, 1)), ConfigurationError, r"belongs among .*m=\.\.\."),
        (lambda made: made.add("m", object()), ConfigurationError, r"no state_dict\(\) and load_state_dict\(\)"),
        (lambda _made: objects(a=Keeping(x=object())).changes(0), ConfigurationError, r"per_rank\['a'\]\['x'\]"),
        (lambda _made: objects(a=Keeping(**{"1": 2}), b=Listing()).changes(0), ConfigurationError, "must be a dict"),
        (misnamed, StateMismatch, "has 'other' on rank 0, and not here"),
        (wrong_after_load, StateMismatch, r"per_rank\['a'\]\['x'\] is not what was restored"),
        (lambda made: made.load({"a": b"\xc1"}, 0), RemoteProtocolError, "does not parse"),
    ],
)
def test_refused(act: Callable[[RankObjects], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        act(RankObjects())


class Listing(Keeping):
    """An object whose state is no dict."""

    def state_dict(self) -> Any:
        return [1, 2]


def test_too_much_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_objects, "MAX_BYTES", 1000)
    small, large = objects(a=Keeping(x=b"1" * 300)), objects(a=Keeping(x=b"1" * 800))
    small.put_together([small.changes(0), b""])
    with pytest.raises(ConfigurationError, match=r"1000 are allowed.*The largest is 'a' of rank 1 with 8\d\d bytes"):
        small.put_together([b"", large.changes(0)])
