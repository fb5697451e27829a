"""`Session.once` and `agree` in one process, with a controller that only writes down what it is asked."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.once import Once, agreed


class Asked:
    """Grants everything, or nothing."""

    def __init__(self, *, grants: bool) -> None:
        self.grants = grants
        self.operations: list[str] = []
        self.known: dict[str, bool] = {}

    def __call__(self, operation: str, name: str, value: bytes = b"") -> tuple[bool, bytes]:
        self.operations.append(operation)
        return self.grants, value

    def once(self, name: str = "x") -> Once:
        return Once(name, self, self.known)


def test_a_condition_is_true_for_one_call_and_asks_once() -> None:
    asked = Asked(grants=True)
    first = asked.once()
    assert [bool(first), bool(first), bool(asked.once())] == [True, True, False]
    assert asked.operations == ["claim"]


def test_what_another_process_has_is_not_asked_for_in_every_step() -> None:
    asked = Asked(grants=False)
    assert [bool(asked.once()) for _ in range(3)] == [False] * 3
    assert asked.operations == ["claim"]


def test_a_block_ends_well_or_is_given_up() -> None:
    asked = Asked(grants=True)
    with pytest.raises(ZeroDivisionError), asked.once() as mine:
        print(mine, 1 // 0)
    with asked.once() as mine:
        assert mine
    with asked.once() as mine:
        assert not mine
    assert not asked.once()
    assert asked.operations == ["hold", "give_up", "hold", "done", "claim"], "the last has an answer"


def test_a_block_that_another_process_has_done_says_nothing_at_its_end() -> None:
    asked = Asked(grants=False)
    with asked.once() as mine:
        assert not mine
    assert asked.operations == ["hold"]


def test_a_block_inside_of_itself_would_wait_for_its_own_end() -> None:
    asked = Asked(grants=True)
    with asked.once(), pytest.raises(UsageError, match="inside of itself"), asked.once():
        pass


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_name_is_short(name: str) -> None:
    with pytest.raises(UsageError, match="1 to 200 characters"):
        Asked(grants=True).once(name)


ALONE = """
import keepstep
session = keepstep.init()
print(session.is_main, bool(session.once("a")), bool(session.once("a")))
for _ in range(2):
    try:
        with session.once("b") as mine:
            print(mine)
            raise RuntimeError
    except RuntimeError:
        pass
with session.once("b") as mine:
    print(mine)
"""


def test_alone_it_is_always_the_first() -> None:
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines() == ["True True False", "True", "True", "True"]


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 7, "runs/ü", b"\0", [1, ("a", 2.5)], {"seed": 1 << 70, 3: {4}}])
def test_a_value_comes_back_as_it_was_proposed(value: object) -> None:
    assert agreed("x", value, Asked(grants=True)) == value


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("", 1, UsageError, "1 to 200 characters"),
        ("folder", "x" * (1 << 16), ConfigurationError, "and at most 65536 are allowed"),
        ("folder", [torch.ones(2)], ConfigurationError, "tolist()"),
        ("folder", Path("runs"), ConfigurationError, r"agree\('folder'\)"),
    ],
)
def test_what_cannot_be_agreed_on_is_refused(name: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        agreed(name, value, Asked(grants=True))


AGREES = """
import torch, keepstep
session = keepstep.init()
print(session.agree("x", "first"), session.agree("x", "second"))
model = torch.nn.Linear(1, 1)
session.protect(model=model)
for step in session.steps(1):
    print(session.agree("y", 1))
    with step:
        try:
            session.agree("x", "third")
        except keepstep.UsageError as error:
            print(error)
"""


def test_alone_the_first_value_counts_and_no_step_asks() -> None:
    run = subprocess.run([sys.executable, "-c", AGREES], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines()[:2] == ["first first", "1"]
    assert run.stdout.splitlines()[2].startswith("step 0: agree('x') inside of a step")
