"""Threads that wait for a gloo send or recv, and are reused.

Torch's Python API cannot abort a send or recv, so a thread that waits for one in gloo cannot be released, and it gives
no future of one. Starting a thread takes longer than a small message.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

MAX_IDLE = 16
"""Threads that are kept: more than a pipeline stage has messages under way with its neighbours."""

Task = tuple[Callable[..., None], tuple[object, ...]]

_idle: list[queue.SimpleQueue[Task]] = []


def in_background(function: Callable[..., None], *arguments: object) -> None:
    """Runs it in a thread that does not keep the process from ending."""
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        threading.Thread(target=_serve, args=[tasks], name="keepstep-gloo", daemon=True).start()
    tasks.put((function, arguments))


def _serve(tasks: queue.SimpleQueue[Task]) -> None:
    while len(_idle) < MAX_IDLE:
        function, arguments = tasks.get()
        function(*arguments)
        del function, arguments  # nothing is kept alive by a thread that rests
        _idle.append(tasks)
