"""The page of a large simulated job: folded by node, and what misbehaves is on top."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from playwright.sync_api import Page, expect
from tests.e2e.watched import DEADLINE_MS, card, eventually, lanes, row

from keepstep.dashboard.process import serving

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NUM_NODES, RANKS_PER_NODE = 32, 4
UNTIL_S = 15.0


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/dashboard_feed.py`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("dashboard_feed")


@pytest.fixture
def link(feed: ModuleType, tmp_path: Path) -> Iterator[str]:
    """Of a job that has lost a rank and a node, and has a slow rank."""
    feed.simulate(tmp_path / "recorded", NUM_NODES, RANKS_PER_NODE, UNTIL_S)
    with (
        feed.Feeder(tmp_path / "recorded", tmp_path / "fed", UNTIL_S),
        serving(tmp_path / "fed", "127.0.0.1:0", "--listen") as found,
    ):
        yield found


def ranks(page: Page) -> list[int]:
    """Those that have a lane of their own."""
    return [lane["rank"] for lane in lanes(page) if lane["kind"] == "rank"]


def test_nodes_are_folded_and_what_misbehaves_is_on_top(page: Page, link: str, feed: ModuleType) -> None:
    page.set_default_timeout(DEADLINE_MS)
    page.goto(link)
    row(page, 2).wait_for()
    expect(card(page, "failures")).to_contain_text(str(1 + RANKS_PER_NODE))
    slow = page.get_by_test_id("straggler-row").filter(has_text=f"rank {feed.SLOW_RANK}")
    expect(slow.first).to_be_visible()
    shown = lanes(page)
    nodes = [lane for lane in shown if lane["kind"] == "node"]
    assert NUM_NODES - 1 <= len(nodes) <= NUM_NODES + 2
    assert not shown[0]["folded"]
    assert sum(lane["folded"] for lane in nodes) > NUM_NODES / 2
    failed = {failure["rank"] for failure in page.evaluate("() => window.keepstep.model.recoveries.at(-1).failures")}
    assert failed <= set(ranks(page))
    page.keyboard.press("f")
    everyone = list(range(NUM_NODES * RANKS_PER_NODE))
    eventually(page, lambda: sorted(ranks(page)) == everyone)
    page.keyboard.press("f")
    eventually(page, lambda: len(ranks(page)) < len(everyone))


def test_any_rank_can_be_found(page: Page, link: str) -> None:
    page.set_default_timeout(DEADLINE_MS)
    page.goto(link)
    row(page, 2).wait_for()
    folded = next(lane for lane in lanes(page) if lane["kind"] == "node" and lane["folded"])
    rank = page.evaluate(
        "(node) => window.keepstep.model.workers.find(w => w.node === node && w.rank !== null).rank", folded["name"]
    )
    assert rank not in ranks(page)
    page.keyboard.press("/")
    page.keyboard.type(str(rank))
    page.keyboard.press("Enter")
    eventually(page, lambda: rank in ranks(page))
