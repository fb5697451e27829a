"""A dashboard's process for tests, and a client that lives as a page does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from keepstep.dashboard.process import serving

DEADLINE_S = 60.0
"""Ends a test that hangs; no measure of anything."""


class Client:
    """Speaks to a dashboard with its token."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.base, _, self.token = link.partition("/?token=")
        self.port = int(self.base.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.base, timeout=DEADLINE_S, trust_env=False)
        self.http.headers["authorization"] = f"Bearer {self.token}"

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.http.get(path, **more)

    @contextlib.contextmanager
    def stream(self) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
        """The events that an open page gets: names and data."""
        with self.http.stream("GET", "/api/stream") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            yield _events(response.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Client]:
    """Serves a folder at any free port."""
    with serving(folder, "127.0.0.1:0", "--dashboard") as link:
        client = Client(link)
        with client.http:
            yield client
