"""A drill, watched in a real browser while it goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect
from tests.e2e.watched import DEADLINE_MS, GPT, card, eventually, lanes, number_in, row, view, watched

from keepstep.trace.timeline.run import Run

FAULTS = "kill@step=12,phase=backward,rank=1; kill@step=24,phase=synced,rank=2"
NUM_STEPS = 40
PARTS = ("detect", "stop", "decide", "reset", "restore", "resume", "gap")


def report_in(html: Path) -> dict[str, Any]:
    """The numbers that the report carries."""
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', html.read_text(), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_a_drill_can_be_watched(page: Page, tmp_path: Path) -> None:
    arguments = ["--nproc-per-node", 3, "--dashboard=127.0.0.1:0", "--run-dir", "drill", "--html", "report.html"]
    arguments += ["--json", "drill.json", "--faults", FAULTS, GPT, "--steps", NUM_STEPS]
    with watched("drill", *arguments, cwd=tmp_path) as drill:
        page.goto(drill.link)
        page.set_default_timeout(DEADLINE_MS)
        # Lanes move: they belong to ranks, steps are counted, and the view goes along with time.
        expect(card(page, "step")).to_have_text(re.compile("[1-9]"), timeout=DEADLINE_MS)
        assert [lane["rank"] for lane in lanes(page) if lane["kind"] == "rank"] == [0, 1, 2]
        before = view(page)
        assert before["following"]
        shown = card(page, "step").inner_text()
        expect(card(page, "step")).not_to_have_text(shown, timeout=DEADLINE_MS)
        eventually(page, lambda: view(page)["end"] > before["end"])

        # The failure, the replacement, the resumed step.
        for number, rank, spare, step in ((1, 1, 3, 12), (2, 2, 4, 25)):
            row(page, number).wait_for()
            gap = row(page, number).get_by_test_id("recovery-ms-gap")
            expect(gap).to_have_text(re.compile(r"\d"), timeout=DEADLINE_MS)
            expect(row(page, number)).to_contain_text(f"rank {rank}")
            expect(row(page, number)).to_contain_text(f"step {step}")
            for text in (f"spare {spare} takes rank {rank}", f"training continues from step {step}"):
                expect(page.get_by_test_id("event-row").filter(has_text=text)).to_have_count(1, timeout=DEADLINE_MS)
            assert holders(page)[rank] == spare

        # The jump: what is shown then is the recovery, and it stays.
        row(page, 1).click()
        recovery = page.evaluate("() => { const r = window.keepstep.model.recoveries[0]; return [r.since, r.resumed] }")
        found = view(page)
        assert not found["following"]
        assert found["begin"] < recovery[0] < recovery[1] < found["end"]
        assert found["end"] - found["begin"] < 10 * (recovery[1] - recovery[0])
        expect(page.locator("#live")).to_have_attribute("aria-pressed", "false")

        assert drill.finish() == 0, "".join(drill.lines)
        expect(page.get_by_test_id("connection")).to_contain_text("job ended", timeout=DEADLINE_MS)
        numbers_agree(page, tmp_path)
        seen = page.evaluate("() => window.seen")
    latencies = appeared_after_s(tmp_path / "drill" / "with-faults", seen)
    print("seconds from an event until the page showed it:", latencies)
    assert len(latencies) == 4
    assert all(latency <= 1.0 for latency in latencies)  # what the page promises, and the one time that is asserted


def holders(page: Page) -> dict[int, int]:
    """Which worker the page takes for the holder of each rank."""
    pairs = page.evaluate("() => [...window.keepstep.model.holders].map(([rank, row]) => [rank, row.worker])")
    return {int(rank): int(worker) for rank, worker in pairs}


def numbers_agree(page: Page, folder: Path) -> None:
    """What the page shows is what the report says, and what the drill itself measured."""
    report, drill = report_in(folder / "report.html"), json.loads((folder / "drill.json").read_text())
    assert drill["identical"]
    assert len(report["recoveries"]) == len(drill["recoveries"]) == 2
    for number, (told, measured) in enumerate(zip(report["recoveries"], drill["recoveries"], strict=True), start=1):
        assert told["milliseconds"] == measured["milliseconds"]
        for part in PARTS:
            shown = row(page, number).get_by_test_id(f"recovery-ms-{part}").text_content()
            rounding = 0.051 if told["milliseconds"][part] < 1000 else 0.51  # from there on the page has no decimals
            assert abs(number_in(shown or "") - told["milliseconds"][part]) <= rounding, part
    assert number_in(card(page, "step").inner_text().split("\n")[-1]) == NUM_STEPS
    assert number_in(card(page, "recoveries").inner_text().split("\n")[-1]) == 2
    assert number_in(card(page, "failures").inner_text().split("\n")[-1]) == 2


def appeared_after_s(run_dir: Path, seen: dict[str, dict[str, float]]) -> list[float]:
    """How long after each failure was known, and after each resumed step, the page showed it."""
    info = json.loads((run_dir / "run.json").read_text())
    run = Run(run_dir)
    run.poll()
    run.close()
    found = []
    for scene in run.scenes:
        note, record = seen[str(scene.number)], scene.record
        for at_s, shown_ms in ((record.begun_s, note["shown"]), (record.resumed_s, note["whole"])):
            assert at_s is not None
            happened_ms = info["started_unix_ns"] / 1e6 + (at_s - info["started_ns"] / 1e9) * 1000
            found.append(round((shown_ms - happened_ms) / 1000, 3))
    return found
