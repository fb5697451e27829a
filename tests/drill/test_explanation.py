"""Why a drill says NO, from what was recorded: no job is needed for that."""

import dataclasses
from typing import Any

import pytest

from keepstep.drill.explanation import (
    Difference,
    Explanation,
    Kind,
    RecordedRun,
    began_later,
    explain,
    first_difference,
)
from keepstep.drill.records import States, StepState

NAMES = ("model.fc1.weight", "model.fc1.bias", "optimizer/0/exp_avg", "host: scheduler['last_epoch']")
STEPS = 6


def run(
    differs: dict[tuple[int, int], tuple[str, ...]] | None = None, num_ranks: int = 2, steps: int = STEPS
) -> States:
    """States of a run of five steps, one each second; ``differs`` says in what, by rank and step."""
    differs = differs or {}
    return {
        rank: {
            step: StepState(
                float(step), NAMES, tuple(f"{step}{'!' * (n in differs.get((rank, step), ()))}" for n in NAMES)
            )
            for step in range(steps)
        }
        for rank in range(num_ranks)
    }


def recorded(states: States, digest: str = "d", reason: str = "all ranks have finished") -> RecordedRun:
    return RecordedRun(states, {str(rank): digest for rank in states} if digest else {}, reason)


def fault(
    at_s: float, resume_step: int | None, specification: str = "kill@step=2,phase=backward,rank=1"
) -> dict[str, Any]:
    return {"specification": specification, "at_s": at_s, "resume_step": resume_step, "rank": 1}


def explained(second: States, faults: list[dict[str, Any]], first: States | None = None) -> Explanation:
    return explain(recorded(first or run()), recorded(second, "e"), faults)


def test_the_first_step_that_differs_on_any_rank_is_found() -> None:
    second = run({(1, 3): NAMES[:1], (0, 4): NAMES, (1, 4): NAMES})
    assert first_difference(run(), second) == Difference(3, (1,), NAMES[:1], 3.0)
    assert first_difference(run(), run()) is None


def test_a_step_that_only_one_run_recorded_is_passed_over() -> None:
    """A rank that was restored at a step which it never began has no record of the one before."""
    second = run({(0, 2): NAMES, (0, 4): NAMES[3:]})
    del second[0][2]
    assert first_difference(run(), second) == Difference(4, (0,), NAMES[3:], 4.0)
    first = run()
    del first[0][4]
    assert first_difference(first, second) is None


def test_what_the_step_after_the_resume_step_computed_points_to_unprotected_state() -> None:
    found = explained(run({(0, 3): NAMES, (1, 3): NAMES}), [fault(1.5, 1), fault(2.5, 2), fault(4.5, 4)])
    assert (found.kind, found.fault) == (Kind.COMPUTED, "kill@step=2,phase=backward,rank=1")
    assert found.sentences[:2] == (
        "first difference: at the start of step 3, on all ranks, in model.fc1.weight, model.fc1.bias, "
        "optimizer/0/exp_avg and 1 more",
        "the last fault before it: kill@step=2,phase=backward,rank=1",
    )
    assert "resumed at step 2 with its protected state intact, and step 2 computed something else" in found.sentences[2]
    assert "--faults none" in found.sentences[3]


@pytest.mark.parametrize(
    ("by", "names", "kind"),
    [
        (3e-6, NAMES[:3], Kind.ROUNDED),
        (0.0, NAMES[:1], Kind.ROUNDED),
        (1e-4, NAMES[:3], Kind.COMPUTED),
        (-1e-2, NAMES[:1], Kind.COMPUTED),
        (3e-6, NAMES, Kind.COMPUTED),
    ],
)
def test_what_differs_by_rounding_does_not_point_to_what_starts_over(
    by: float, names: tuple[str, ...], kind: Kind
) -> None:
    """The last name is that of a host value, which differs or does not."""
    first, second = run(), run({(rank, step): names for rank in (0, 1) for step in (3, 4, 5)})
    for states, value in ((first, 1.0), (second, 1.0 + by)):
        for steps in states.values():
            for step, state in steps.items():
                sketch = (value, 1.0, 2.0**-23)
                steps[step] = dataclasses.replace(state, sketches=(sketch, sketch, sketch, None))
    found = explain(recorded(first), recorded(second, "e"), [fault(2.5, 2)])
    assert found.kind is kind
    assert ("but for rounding" in found.sentences[2]) == (kind is Kind.ROUNDED)


def test_a_difference_at_the_resume_step_points_to_what_was_restored() -> None:
    found = explained(run({(1, 2): NAMES[3:]}), [fault(1.9, 2)])
    assert found.kind is Kind.RESUMED
    assert found.sentences[0] == "first difference: at the start of step 2, on rank 1, in host: scheduler['last_epoch']"
    assert "resumed at step 2, from another state" in found.sentences[2]


def test_a_rank_that_chance_has_chosen_is_named() -> None:
    found = explained(run({(0, 5): NAMES[:1]}, 3), [fault(2.5, 2, "kill@phase=random")], run(num_ranks=3))
    assert found.sentences[:2] == (
        "first difference: after the last step (4), on rank 0, in model.fc1.weight",
        "the last fault before it: kill@phase=random, which hit rank 1",
    )


@pytest.mark.parametrize("faults", [[], [fault(2.5, 2)]])
def test_runs_that_begin_differently_are_told_so(faults: list[dict[str, Any]]) -> None:
    found = explained(run({(0, 0): NAMES[:2], (1, 0): NAMES[:2]}), faults)
    assert (found.kind, found.fault) == (Kind.BEGAN, None)
    assert found.sentences == (
        "first difference: at the start of step 0, on all ranks, in model.fc1.weight, model.fc1.bias",
        "The two runs started differently: does the script load weights? Is its start seeded, on each rank?",
    )


def test_a_run_that_began_at_a_later_step_has_loaded_what_the_first_one_wrote() -> None:
    second = run()
    for steps in second.values():
        del steps[0], steps[1]
    found = began_later(recorded(run()), recorded(second))
    assert found is not None
    assert found.sentences[0].startswith("The second run began at step 2, and the first one at step 0, because it load")
    assert "--compare" in found.sentences[0]
    assert found.as_json()["kind"] == "began at a later step"


def test_a_run_of_which_some_rank_has_no_record_of_the_first_step_did_not_begin_later() -> None:
    second = run()
    del second[1][0]
    assert began_later(recorded(run()), recorded(second)) is None
    assert began_later(recorded(run()), recorded({})) is None
    assert began_later(recorded({}), recorded(run())) is None


def test_a_difference_before_any_fault_is_the_scripts_own() -> None:
    found = explained(run({(0, 2): NAMES, (1, 2): NAMES}), [fault(2.5, 2)])
    assert (found.kind, found.fault) == (Kind.SCRIPT, None)
    assert "The script itself computes step 1 differently" in found.sentences[1]
    assert "--faults none" in found.sentences[2]


def test_without_faults_nothing_is_said_of_them() -> None:
    found = explained(run({(0, 2): NAMES}), [])
    assert found.kind is Kind.SCRIPT
    assert "--faults none" not in " ".join(found.sentences)


def test_ranks_that_differ_without_a_failure_come_first() -> None:
    first = run({(1, 3): NAMES[3:]}, 3)
    found = explain(RecordedRun(first, {"0": "a", "1": "b", "2": "a"}), recorded(run(num_ranks=3)), [fault(1.0, 1)])
    assert found.kind is Kind.RANKS
    assert found.sentences[0] == (
        "without any failure rank 1 and rank 0 are not the same: at the start of step 3, "
        "in host: scheduler['last_epoch']"
    )


def test_ranks_of_different_shards_may_differ() -> None:
    """Ranks 0 and 2 hold one shard, 1 and 3 another."""
    shards = {"0": 0, "1": 1, "2": 0, "3": 1}
    digests = {"0": "a", "1": "b", "2": "a", "3": "b"}
    other = {(1, 3): NAMES[:1], (3, 3): NAMES[:1]}
    first = RecordedRun(run(other, 4), digests, shards=shards)
    found = explain(first, recorded(run(other | {(2, 4): NAMES[:1]}, 4), "e"), [fault(1.0, 2)])
    assert found.kind is not Kind.RANKS
    assert found.difference == Difference(4, (2,), NAMES[:1], 4.0)
    torn = RecordedRun(run(other | {(3, 2): NAMES[:1]}, 4), digests | {"3": "c"}, shards=shards)
    found = explain(torn, recorded(run(num_ranks=4)), [fault(1.0, 1)])
    assert found.kind is Kind.RANKS
    assert found.sentences[0].startswith("without any failure rank 3 and rank 1 are not the same: at the start of")


def test_a_run_that_was_not_completed_names_the_step_of_each_rank() -> None:
    second = run()
    del second[1][5]
    found = explain(recorded(run()), recorded(second, "", "why it ended"), [fault(1.0, 1)])
    assert found.kind is Kind.UNFINISHED
    assert "rank 0 at step 5, rank 1 at step 4" in found.sentences[0]
    assert found.sentences[0].endswith(": why it ended")


def test_a_fault_without_a_recovery_is_named_all_the_same() -> None:
    found = explained(run({(0, 3): NAMES}), [fault(2.5, None, "spare-kill@step=2")])
    assert (found.kind, found.fault) == (Kind.UNKNOWN, "spare-kill@step=2")


def test_where_no_record_differs_the_order_is_left() -> None:
    assert explained(run(), [fault(1.0, 1)]).kind is Kind.UNKNOWN


def test_as_json() -> None:
    found = explained(run({(1, 2): NAMES[3:]}), [fault(1.9, 2)]).as_json()
    assert (found["kind"], found["step"], found["ranks"]) == ("resumed from another state", 2, [1])
    assert found["names"] == ["host: scheduler['last_epoch']"]
    empty = explained(run(), []).as_json()
    assert (empty["step"], empty["ranks"], empty["names"], empty["fault"]) == (None, [], [], None)
