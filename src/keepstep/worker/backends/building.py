"""Creates a torch group in another thread, so that the caller can stop waiting.

Torch's constructors wait for the other members, and cannot be interrupted. The thread is then abandoned: it ends when
torch gives up, and drops the group that it may have created.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

from keepstep.worker.backends.communicator import CommunicatorAborted

Built = TypeVar("Built")
Run = Callable[..., None]
"""Runs a function with its arguments in another thread."""


def built(
    build: Callable[[], Built],
    run: Run,
    who: tuple[str, int, int],
    deadline: timedelta,
    changed: threading.Condition,
    is_down: Callable[[], bool],
) -> Built:
    """Runs ``build`` in another thread and returns its result.

    Args:
        build: builds the group; its exceptions are raised here.
        run: runs it in another thread.
        who: the group's name, this process's rank and the number of members, for messages.
        deadline: how long to wait for the other members.
        changed: is notified when the communicator is aborted.
        is_down: whether the communicator is aborted.

    Raises:
        CommunicatorAborted: the communicator was aborted before or meanwhile.
        RuntimeError: a member did not connect in time.
    """
    name, rank, size = who
    if is_down():
        raise CommunicatorAborted(f"group {name} was aborted before it was connected")
    building: Future[Built] = Future()
    building.add_done_callback(lambda _: _notify(changed))
    run(_build, building, build)
    deadline_s = deadline.total_seconds()
    with changed:
        changed.wait_for(lambda: is_down() or building.done(), deadline_s)
        if is_down():
            raise CommunicatorAborted(f"group {name} was aborted while it was being connected")
    if not building.done():
        raise RuntimeError(f"group {name}, rank {rank}: not all {size} members connected in {deadline_s:g} s")
    return building.result()


def _notify(changed: threading.Condition) -> None:
    with changed:
        changed.notify_all()


def _build(building: Future[Built], build: Callable[[], Built]) -> None:
    try:
        result = build()
    except BaseException as error:  # of any kind: it is raised where the result is awaited
        building.set_exception(error)
        del building  # the error's traceback holds this frame, and would keep gloo's listening socket open with it
    else:
        building.set_result(result)
