"""What a drill prints when it is over, and whether that is a yes."""

from typing import Any

import pytest

from keepstep.drill.display import TABLE_COLUMNS, introduce, show
from keepstep.drill.drill import Drill, is_good
from keepstep.drill.faults import DrillFault
from keepstep.protocol.deadlines import Deadlines
from keepstep.trace.timeline.describe import PARTS

EXPLANATION = {
    "kind": "computed differently",
    "text": ["first difference: host: optimizer.param_groups[0]['lr']", "x" * 200],
}


def result(**changes: Any) -> dict[str, Any]:
    good = {"identical": True, "reference_digest": "abc", "digest": "abc", "exit_code": 0, "reason": "", "missed": []}
    good |= {"faults": [], "files": [], "raised": [], "disturbed": None, "nan": [], "step_ms": 1.5, "explanation": None}
    good |= {"log": []}
    return good | changes


def printed(capsys: pytest.CaptureFixture[str], **changes: Any) -> list[str]:
    show(result(**changes))
    return capsys.readouterr().out.splitlines()


def test_an_explanation_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, identical=False, digest="abd", explanation=EXPLANATION)
    assert lines == [
        "a step without a failure takes 1.5 ms (median).",
        "weights identical: NO",
        "  the first run     abc",
        "  the second run    abd",
        *EXPLANATION["text"],
    ]


def test_weights_that_are_nan_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    told = "Whatever is computed from NaN is NaN, so equal weights prove little."
    assert printed(capsys, nan=["model.0.weight"])[-1] == f"NaN after the last step: model.0.weight. {told}"
    assert printed(capsys, nan=["[b]", "c"])[-1] == f"NaN after the last step: [b] and 1 more. {told}"


def test_the_end_of_the_logs_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    log = ["the last lines of /run/logs/worker_1/stderr.log:", "  KeyError: '[x]'", "  " + "y" * 200]
    lines = printed(capsys, exit_code=1, reason="it failed", log=log)
    assert lines[1:5] == ["the second run ended with exit code 1: it failed", *log]


def test_files_that_differ_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    files = [{"file": "out/a.pt", "difference": None}, {"file": "out/[b].pt", "difference": "['best'] is 1 and 2"}]
    assert printed(capsys, files=files)[-2:] == [
        "files identical: NO (1 of 2)",
        "  out/[b].pt: ['best'] is 1 and 2",
    ]
    assert printed(capsys, files=files[:1])[-1] == "files identical: yes (1 of 1)"


def test_an_exception_that_nothing_has_raised_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, raised=["step 3, rank 1: exit code 1: KeyError: ['x']"])
    assert "lost by an exception that no fault has raised: step 3, rank 1: exit code 1: KeyError: ['x']" in lines


def test_what_pauses_have_cost_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no pause has cost the job a rank." in printed(capsys, disturbed=[])
    lines = printed(capsys, disturbed=["rank 1 lost: [x]"])
    assert "a pause that is nobody's fault has cost a recovery: rank 1 lost: [x]" in lines
    assert is_good(result(disturbed=[]))


@pytest.mark.parametrize(
    "changes",
    [
        {"identical": False},
        {"missed": ["kill@step=9"]},
        {"raised": ["step 3, rank 1: KeyError: 'x'"]},
        {"disturbed": ["rank 1 lost: no progress"]},
        {"files": [{"file": "a", "difference": "differs"}]},
    ],
    ids=str,
)
def test_only_a_whole_yes_is_good(changes: dict[str, Any]) -> None:
    assert is_good(result(files=[{"file": "a", "difference": None}]))
    assert not is_good(result(**changes))


def test_a_drill_without_faults_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    introduce(Drill([]), Deadlines(hang_after_s=1.5))
    assert "both times without failures" in " ".join(capsys.readouterr().err.split())
    kill = Drill([DrillFault(number=0, kind="kill")])
    introduce(kill, Deadlines(hang_after_s=1.5))
    told = " ".join(capsys.readouterr().err.split())
    assert "once with 1 fault injected" in told
    assert "after 1.5 s without progress, or 10 times its longest recent phase; under keepstep run after 60 s" in told
    assert Drill([]).second == "repeated"
    assert kill.second == Drill().second == "with-faults"


def fault(rank: int, state_from: str | None, spare: str | None = "warm") -> dict[str, Any]:
    row = {"fault": "kill", "rank": rank, "phase": "backward", "resume_step": 4, "steps_recomputed": 1}
    row["framework_step"] = None
    return row | {"state_from": state_from, "spare": spare} | {f"{part}_ms": 123.4 for part in PARTS}


def test_where_a_state_came_from_is_shown_where_it_is_no_replica(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, faults=[fault(1, "snapshot in memory"), fault(2, "replica"), fault(3, None)])
    (heading,) = [line for line in lines if line.split()[:1] == ["fault"]]
    assert heading.split()[4:7] == ["again", "state", "detect"]
    rows = [line.split() for line in lines if line.split()[:1] == ["kill"]]
    assert [row[5] for row in rows] == ["snapshot", "replica", "-"]
    assert max(map(len, lines[: lines.index(heading) + 5])) <= TABLE_COLUMNS
    assert any(line.startswith("state: where") for line in lines)


def test_where_all_states_came_from_replicas_the_table_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, faults=[fault(1, "replica"), fault(2, None)])
    assert not [line for line in lines if "state" in line.split("weights")[0]]


def test_the_number_of_a_framework_is_beside_that_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, faults=[fault(1, "replica") | {"framework_step": 2}, fault(2, "replica")])
    rows = [line.split() for line in lines if line.split()[:1] == ["kill"]]
    assert [row[3:5] for row in rows] == [["4", "(2)"], ["4", "1"]]
    assert any(line.startswith("In brackets: ") for line in lines)


def test_how_warm_spares_were_is_shown_where_they_were_not_warm(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, faults=[fault(1, "replica", "half-warm"), fault(2, "replica", "cold")])
    assert " spare " in lines[2]
    assert any("half-warm" in line and "kill" in line for line in lines)
    assert any(line.startswith("spare: warm, waiting") for line in lines)


def test_a_table_wider_than_the_terminal_is_printed_in_two(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.drill.display.TABLE_COLUMNS", 80)
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, faults=[fault(1, "snapshot in memory", "half-warm")])
    assert not [line for line in lines if "…" in line]
    headings = [line.split() for line in lines if line.split()[:1] == ["fault"]]
    assert headings == [["fault", "rank", "phase", "resume", "again", "state", "spare"], ["fault", "rank", *PARTS]]
