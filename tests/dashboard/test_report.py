"""The report of a run: one file with the page and its data, and no text of a script can do harm in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from graphlib import TopologicalSorter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.recorded import overtaken_run, recorded_run

from keepstep.dashboard import report
from keepstep.dashboard.report import STATIC, html_report, page_data
from keepstep.protocol.controller import JournalEntry
from keepstep.sim.run import case_of, run
from keepstep.trace.record import journal, runfolder
from keepstep.trace.timeline.describe import describe_recovery
from keepstep.trace.timeline.run import Run, opened

VOID = {"meta", "br", "hr", "img", "link", "input"}
SEEDS = range(1, 25)
"""Among them: nodes that are lost, clocks that disagree, failures that overtake each other, jobs that end badly."""


def test_the_pages_modules_can_be_one() -> None:
    """As which a report holds them: no name stands in two of them, and none imports one that imports it."""
    texts = {path.stem: path.read_text("utf-8") for path in STATIC.glob("*.js")}
    names = [
        name
        for text in texts.values()
        for name in re.findall(r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)", text, re.MULTILINE)
    ]
    assert len(names) > 50
    assert [name for name, num in Counter(names).items() if num > 1] == []
    imports = {name: re.findall(r'from "\./(\w+)\.js"', text) for name, text in texts.items()}
    assert tuple(TopologicalSorter(imports).static_order())[-1] == "app"


class Reader(HTMLParser):
    """Reads a page: its elements, and what scripts and styles hold."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.held: dict[str, str] = {}
        """By the element's id, or the type of a script, or its name."""
        self._at = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        self._at = attributes.get("id") or attributes.get("type") or tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.held[self._at] = self.held.get(self._at, "") + data


def read(html: str) -> Reader:
    """A page, which is checked: everything is closed, nothing comes from elsewhere, only the page's own script runs."""
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    for tag, attributes in reader.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert tag != "link" or str(attributes["href"]).startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
        assert "src" not in attributes
        assert "style" not in attributes, "the security policy would refuse it"
    scripts = [attributes.get("type") for tag, attributes in reader.elements if tag == "script"]
    assert scripts == ["application/json", "application/json", "module"]
    (policy,) = [attributes["content"] for _, attributes in reader.elements if "http-equiv" in attributes]
    for held in ("module", "style"):
        digest = base64.b64encode(hashlib.sha256(reader.held[held].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in str(policy)
    assert "unsafe" not in str(policy)
    return reader


def numbers(reader: Reader) -> dict[str, Any]:
    return dict(json.loads(reader.held["report"]))


def test_a_real_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened(recorded_run(tmp_path_factory.getbasetemp()).folder) as real:
        reader = read(html_report(real))
        described = describe_recovery(real.scenes[0].record)
        num_changes = real.history.num
    found, page = numbers(reader), json.loads(reader.held["page"])
    assert (found["steps"], found["num_failures"], found["spares_used"], found["exit_code"]) == (30, 1, 1, 0)
    (recovery,) = found["recoveries"]
    assert {name: recovery[name] for name in described} == json.loads(msgspec.json.encode(described))
    assert sum(found["steps_per_bucket"]) == 30
    (window,) = page["windows"]
    assert len(window["phases"]["t"]) == num_changes
    assert [each["number"] for each in page["snapshot"]["recoveries"]] == [1]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kind_of_run(tmp_path: Path, seed: int) -> None:
    run(case_of(seed), record=tmp_path)
    with opened(tmp_path) as simulated:
        found = numbers(read(html_report(simulated)))
        assert len(found["recoveries"]) == len(simulated.scenes)
    assert all(begin <= end for begin, end in found["lost"])


def test_nothing_that_a_script_says_gets_out(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    evil = "</script></style></svg><script>alert(1)</script><img src=x onerror=\"alert('&')\">\x00\x1b"
    source = recorded_run(tmp_path_factory.getbasetemp()).folder
    entries = msgspec.json.encode(journal.read(source / runfolder.JOURNAL)).decode()
    was = "killed by SIGKILL"
    assert was in entries
    with journal.Journal(tmp_path / runfolder.JOURNAL) as changed:
        changed.write(msgspec.json.decode(entries.replace(was, json.dumps(evil)[1:-1]), type=list[JournalEntry]))
    info = runfolder.read_info(source)
    ended = runfolder.Ended(1, evil, info.ended.at_ns if info.ended else 0)
    runfolder.write(tmp_path, msgspec.structs.replace(info, command=("train.py", evil), node=evil, ended=ended))
    with opened(tmp_path) as said:
        html = html_report(said)
    reader = read(html)
    assert numbers(reader)["reason"] == evil
    assert html.count("<script") == 3


def test_a_long_run_keeps_the_phases_around_its_recoveries(shown: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown.history.num > 600
    monkeypatch.setattr(report, "MAX_CHANGES", 600)
    monkeypatch.setattr(report, "MAX_EVENTS", 5)
    found = page_data(shown)
    *around, end = found["windows"]
    assert len(around) == len(shown.scenes) > 1
    assert all(len(window["phases"]["t"]) <= 600 // len(found["windows"]) for window in found["windows"])
    for window, scene in zip(around, found["snapshot"]["recoveries"], strict=True):
        assert window["begin"] < scene["since"] < window["end"]
    assert end["end"] >= found["snapshot"]["now"]
    assert len(found["snapshot"]["events"]) == 10 == len(shown.events) - found["num_hidden_events"]


def test_of_very_many_recoveries_the_first_and_the_last_are_kept(shown: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_CHANGES", 600)
    monkeypatch.setattr(report, "MAX_RECOVERIES", 1)
    shown.scenes.extend(shown.scenes[-1:] * 5)
    first, last, _end = page_data(shown)["windows"]
    starts = [(scene.since_s - shown.info.started_ns / 1e9) * 1e6 for scene in shown.scenes]
    assert first["begin"] < starts[0] < first["end"]
    assert last["begin"] < starts[-1] < last["end"]


def test_a_run_that_ended_badly(tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened(overtaken_run(tmp_path_factory.getbasetemp()).folder) as overtaken:
        found = numbers(read(html_report(overtaken)))
    assert found["exit_code"] == 76
    assert [each["overtaken"] for each in found["recoveries"]] == [True, False]


def test_no_name_stands_in_two_modules() -> None:
    """The report holds all of them as one."""
    declared = re.compile(r"^(?:export )?(?:async )?(?:const|let|function|class) (?:\[.*?\]|(\w+))", re.MULTILINE)
    names = [name for path in STATIC.glob("*.js") for name in declared.findall(path.read_text("utf-8")) if name]
    assert sorted(set(names)) == sorted(names)
