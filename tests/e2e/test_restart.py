"""A page that is left open while its job is killed and started again: it reconnects, and disturbs no process."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

from playwright.sync_api import Page, expect
from tests.e2e.watched import DEADLINE_MS, GPT, card, watched

TRAINS = re.compile("Step[1-9]")
"""What the card of the step shows once a step is complete."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_page_left_open_shows_the_next_run(page: Page, tmp_path: Path) -> None:
    """The launcher is killed, and the dashboard ends with it. The job starts over in the same folder, at its port."""
    port = free_port()
    command = ["run", "--nproc-per-node", 2, f"--dashboard=127.0.0.1:{port}", "--run-dir", "run", GPT]
    command += ["--steps", 100_000]
    with watched(*command, cwd=tmp_path) as first:
        page.goto(first.link)
        expect(card(page, "step")).to_contain_text(TRAINS, timeout=DEADLINE_MS)
        former = page.locator("#run-id").inner_text()
        first.job.process.send_signal(signal.SIGKILL)
        first.job.wait_until_gone()
    expect(page.get_by_test_id("connection")).to_contain_text("reconnecting", timeout=DEADLINE_MS)
    with watched(*command, cwd=tmp_path) as second:
        expect(page.locator("#run-id")).not_to_have_text(former, timeout=DEADLINE_MS)
        expect(page.get_by_test_id("connection")).to_contain_text("live", timeout=DEADLINE_MS)
        expect(card(page, "step")).to_contain_text(TRAINS, timeout=DEADLINE_MS)
        second.job.process.send_signal(signal.SIGTERM)
        assert second.finish() == 1, "".join(second.lines)
    expect(page.get_by_test_id("connection")).to_contain_text("job ended", timeout=DEADLINE_MS)
    assert (tmp_path / "run" / "earlier-1" / "journal.jsonl").exists()
