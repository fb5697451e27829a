"""The report of a run: whole, by itself, with the journal's own numbers, and harmless whatever a script said."""

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.recorded import recorded_run
from tests.trace.pictures.conftest import SEEDS, opened

from keepstep.protocol.controller import JournalEntry
from keepstep.trace.pictures import page
from keepstep.trace.pictures.page import html_report, in_words
from keepstep.trace.pictures.story import restart, story
from keepstep.trace.pictures.theme import Pattern
from keepstep.trace.record import journal, runfolder
from keepstep.trace.timeline.describe import describe_recovery
from keepstep.trace.timeline.run import Run

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Reads a page: its elements, the text outside of scripts and styles, and whether everything was closed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data += data
        elif not self.open or self.open[-1] != "style":
            self.text += data


def read(html: str) -> Reader:
    """A page, which is checked: everything is closed, and nothing comes from elsewhere."""
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    for tag, attributes in reader.elements:
        assert tag not in ("img", "link", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
        assert "src" not in attributes
    assert [attributes.get("type") for tag, attributes in reader.elements if tag == "script"] == ["application/json"]
    assert "@import" not in html
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= {f"#keepstep-{pattern}" for pattern in Pattern}
    return reader


def numbers(reader: Reader) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reader.data)
    return found


def test_a_real_run(real: Run) -> None:
    reader = read(html_report(real))
    found = numbers(reader)
    assert (found["steps"], found["num_failures"], found["spares_used"], found["exit_code"]) == (30, 1, 1, 0)
    (recovery,) = found["recoveries"]
    described = describe_recovery(real.scenes[0].record)
    assert {name: recovery[name] for name in described} == json.loads(msgspec.json.encode(described))
    assert sum(found["steps_per_bucket"]) == 30
    for part in ("detect", "stop", "decide", "reset", "restore", "resume", "gap"):
        assert f"{described['milliseconds'][part]:,.1f}" in reader.text
    assert "Ended with exit code 0" in reader.text
    assert "Rank 1 lost: killed by SIGKILL. It was in the phase “backward” of step 12." in reader.text
    assert "One step was computed again." in reader.text
    assert sum(tag == "svg" for tag, _ in reader.elements) == 3, "patterns, chart, one recovery"


def test_a_run_that_ended_badly(overtaken: Run) -> None:
    reader = read(html_report(overtaken))
    assert "Ended with exit code 76" in reader.text
    assert "Another failure came before this one was repaired." in reader.text
    assert "It was not repaired, or not yet." in reader.text


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens(simulated: Callable[[int], Run], seed: int) -> None:
    run = simulated(seed)
    found = numbers(read(html_report(run)))
    assert len(found["recoveries"]) == len(run.scenes)
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
    run = opened(tmp_path)
    html = html_report(run)
    run.close()
    reader = read(html)
    assert numbers(reader)["reason"] == evil
    assert html.count("<script") == 1
    assert evil.rstrip("\x00\x1b") in reader.text


def test_hundreds_of_recoveries_are_not_all_drawn(real: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_PICTURES", 2)
    scene = real.scenes[0]
    real.scenes.extend(dataclasses.replace(scene, number=number) for number in range(2, 8))
    reader = read(html_report(real))
    drawn = [attributes["id"] for tag, attributes in reader.elements if tag == "article"]
    assert len(numbers(reader)["recoveries"]) == 7
    assert drawn == ["recovery-1", "recovery-2", "recovery-6", "recovery-7"]


def test_what_a_restart_would_have_lost(real: Run) -> None:
    found = restart(real)
    assert found is not None
    ((begin_s, end_s),) = real.ledger.lost(real.now_s)
    assert found["lost_s"] == pytest.approx(end_s - begin_s, abs=1e-6)
    forward_ns = real.pace.first_forward_ns
    assert forward_ns is not None
    assert 0 < found["startup_s"] <= (forward_ns - real.info.started_ns) / 1e9
    for case, interval_s in zip(found["cases"], (300, 1800), strict=True):
        assert case["interval_s"] == interval_s
        assert case["lost_s"] == pytest.approx(found["startup_s"] + interval_s / 2, abs=0.01)
        assert case["ratio"] == pytest.approx(case["lost_s"] / found["lost_s"], rel=0.01)


def test_nothing_failed(simulated: Callable[[int], Run]) -> None:
    run = next(run for run in map(simulated, SEEDS) if not run.scenes)
    assert restart(run) is None
    reader = read(html_report(run))
    assert "Nothing failed." in reader.text


def test_words_for_what_came_of_it(real: Run) -> None:
    (each,) = story(real)["recoveries"]
    stuck = each | {"failed_ranks": [], "step": None, "taken_by_worker": {}, "detail": "a collective is stuck"}
    assert "No rank was lost" in in_words(stuck)
    again = each | {"steps_recomputed": 0}
    assert "No step was computed again." in in_words(again)
    assert f"Worker {real.scenes[0].replacements[1][0]} took rank 1." in in_words(each)
