"""Reusable threads that wait for a gloo send or recv.

Torch's Python API cannot abort a send or recv, so a thread that waits for one in gloo cannot be released. The API has
no future for one either. Starting a thread takes longer than a small message, so threads are reused.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from keepstep.systemcalls import start_thread

MAX_IDLE = 16
"""Number of idle threads that are kept: more than a pipeline stage has messages in flight with its neighbours."""

Task = tuple[Callable[..., None], tuple[object, ...]]

_idle: list[queue.SimpleQueue[Task]] = []


def in_background(function: Callable[..., None], *arguments: object) -> None:
    """Runs a function in a daemon thread."""
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        start_thread(_serve, tasks, name="keepstep-gloo")
    tasks.put((function, arguments))


def _serve(tasks: queue.SimpleQueue[Task]) -> None:
    while True:
        function, arguments = tasks.get()
        function(*arguments)
        del function, arguments  # an idle thread keeps nothing alive
        if len(_idle) >= MAX_IDLE:
            return  # what stands in _idle has a thread
        _idle.append(tasks)
