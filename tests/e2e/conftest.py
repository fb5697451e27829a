"""A real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
WATCH = Path(__file__).with_name("watch.js")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file; each has pages of its own.

    Playwright keeps an event loop in this thread as long as it lives, and other tests need theirs.
    """
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        # No sandbox: where tests run as root in a container, Chromium has none to offer.
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of 1280 by 800 on which any error in the console fails the test."""
    with browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light") as context:
        found = context.new_page()
        found.add_init_script(path=WATCH)
        errors: list[str] = []
        found.on("pageerror", lambda error: errors.append(_text(error)))
        found.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        yield found
        # That the server is gone is what some tests are about, and the browser itself says so.
        assert [error for error in errors if "net::ERR_" not in error and "401" not in error] == []


def _text(error: Error) -> str:
    return str(error)
