"""The comparison with other systems: what its figures mean, that it runs without them, and the table in the README."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.benchmarks.quick import BENCHMARKS, measured, table

README = BENCHMARKS.parent / "README.md"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts of benchmarks/, which import each other by their bare names."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return {name: importlib.import_module(name) for name in ("jobs", "peers", "peers_faults", "peers_systems")}


def fault(**more: Any) -> dict[str, Any]:
    """A kill that was overcome."""
    figures = {"gap_ms": 500.0, "recovery_ms": 100.0, "whole_ms": 600.0, "steps_again": 1, "survivors": 2}
    return {"rank": 1, "outcome": "overcome", **figures, **more}


def test_the_readme_shows_the_newest_page(scripts: dict[str, ModuleType]) -> None:
    newest = max((BENCHMARKS / "results").glob("*-peers.md"))
    page = newest.read_text(encoding="utf-8")
    shown = scripts["peers"].BLOCK.search(README.read_text(encoding="utf-8"))[0]
    _, *stops = table(page, "A rank is stopped")
    after_stops = {title: gap for title, _, gap, *_ in stops}
    _, *kills = table(page, "A rank is killed")
    expected = [
        [
            f"**{title}**" if title.startswith("keepstep") else title,
            survived,
            gap,
            whole,
            again,
            equal,
            after_stops[title],
        ]
        for title, survived, gap, _, whole, again, _, equal in kills
    ]
    assert [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("|")][2:] == expected
    assert scripts["peers"].INTRODUCTION in shown
    versions = re.findall(r"^\* (\S+ \d\S*)$", page, re.MULTILINE)
    assert len(versions) == 4
    for text in (newest.name, newest.name.removesuffix("-peers.md"), *versions[1:]):
        assert text in shown


def test_the_table_replaces_the_one_before(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    result = {
        "date": "2026-01-02",
        "machine": {"cores": 2},
        "versions": {"torch": "2.13"},
        "systems": {"other, default": {"kills": [fault()], "hangs": [], "jobs_equal": 0, "jobs_compared": 1}},
    }
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- made by benchmarks/peers.py -->\nold\n<!-- end -->\nafter\n")
    scripts["peers"].write_readme(readme, result)
    text = readme.read_text()
    assert re.match(r"before\n<!-- .* -->\nOne of three ranks", text)
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "| other, default | 1 of 1 | 0.50 | 0.60 | 1 (≤ 1) | 0 of 1 | - |" in text


def test_a_fault_that_is_not_overcome_counts(scripts: dict[str, ModuleType]) -> None:
    peers = scripts["peers"]
    rows = [fault(), fault(outcome="the job ended before the first step after it", said="`RuntimeError: gone`")]
    assert peers.share(rows) == "1 of 2"
    assert peers.survivors_kept(rows) == "2 of 2"
    notes = peers.not_overcome({"systems": {"other": {"kills": rows}}}, "kills")
    assert notes == [
        "1 × other, the job ended before the first step after it, 2 of 2 survivors alive; it said: `RuntimeError: gone`"
    ]


def test_the_last_messages_are_those_of_the_error(scripts: dict[str, ModuleType]) -> None:
    said = "    | Traceback\n    | RuntimeError: gone\n    | a warning of the next process"
    assert scripts["peers_faults"].last_words(said) == "`RuntimeError: gone`"


def events(scripts: dict[str, ModuleType], *lines: str) -> list[Any]:
    """Events in the order of time, each as "RANK ATTEMPT WHAT VALUE"."""
    split = [line.split() for line in lines]
    return [
        scripts["jobs"].Event(int(rank), int(attempt), what, float(value), float(number), 0.0)
        for number, (rank, attempt, what, value) in enumerate(split)
    ]


def test_the_first_step_is_that_of_all_who_train_then(scripts: dict[str, ModuleType]) -> None:
    resumed = scripts["peers_faults"].resumed
    seen = events(
        scripts,
        *(f"{rank} 1 start 100" for rank in range(3)),
        *(f"{rank} 1 step 7" for rank in range(3)),
        *("0 2 world 2", "0 2 step 8"),
    )
    assert resumed(seen, 1, 1, 3) is None  # one of two so far
    seen += events(scripts, *["2 1 step 7"] * len(seen), "2 2 world 2", "2 2 step 8")[len(seen) :]
    two = resumed(seen, 1, 1, 3)
    assert (two.at_s, two.step) == (seen[-1].at_s, 8)
    assert resumed(seen, 1, 3, 3) is None  # the world is not whole
    back = ("0 3 world 3", "0 3 step 9", "2 3 world 3", "2 3 step 9", "1 3 start 200", "1 3 step 9")
    seen += events(scripts, *["2 1 step 7"] * len(seen), *back)[len(seen) :]
    assert resumed(seen, 1, 3, 3).at_s == seen[-1].at_s


def test_digests_are_of_the_newest_attempt(scripts: dict[str, ModuleType]) -> None:
    lines = ("0 1 step 9", "0 1 digest 5", "0 2 step 9", "0 2 digest 6", "1 2 step 9", "1 2 digest 6")
    assert scripts["peers_faults"].digests(events(scripts, *lines)) == {9: {6}}


def test_a_system_that_is_not_there_is_named(tmp_path: Path) -> None:
    page = measured("peers", tmp_path)
    killed = {title: figures for title, *figures in table(page, "A rank is killed")[1:]}
    assert (killed["keepstep, default"][0], killed["keepstep, default"][-1]) == ("1 of 1", "1 of 1")
    missing = re.findall(r"^\* (.+): not measured, \S.*$", page, re.MULTILINE)
    settings = re.findall(r"^\* (.+?): ", page.partition("\n## The settings\n")[2], re.MULTILINE)
    assert settings[0] == "keepstep, default"
    assert sorted([*killed, *missing]) == sorted(settings)
