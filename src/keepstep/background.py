"""What runs on an event loop beside its main tasks, and what its unexpected exceptions do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

_P = ParamSpec("_P")


class BackgroundTasks:
    """Tasks and callbacks of an event loop that nothing awaits.

    asyncio at most prints an exception of theirs, and the program goes on without what they would have done: it never
    reports a process that has ended, or never starts one again. Here the first such exception goes to ``on_failure``,
    which must end the program.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._on_failure(error)

    def guarded(self, callback: Callable[_P, None]) -> Callable[_P, None]:
        """Returns a function that calls ``callback`` and never raises."""

        def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
            try:
                callback(*args, **kwargs)
            except Exception as error:  # passed on, see the class
                self._on_failure(error)

        return call
