"""A parked spare, which waits before its script's first line, for scripts that read their rank at import time.

For the controller it is a spare whose script waits for a rank. Once it has one, the script runs from its beginning with
all variables set, like that of a process that was started with a rank.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import socket

from keepstep.config import WorkerConfig, leave_park
from keepstep.protocol.messages import AnyMessage, Assign, RankAwaited
from keepstep.shared.tagpage import TagWriter
from keepstep.transports.framing import FrameDecoder, frame
from keepstep.worker.link import EXIT_ORPHANED

_RECEIVE_BYTES = 1 << 16


@dataclasses.dataclass(slots=True)
class Parked:
    """Messages that arrived while the spare was parked, for the session that takes over the link."""

    decoder: FrameDecoder = dataclasses.field(default_factory=FrameDecoder)
    """May hold the beginning of an incomplete message."""
    orders: list[AnyMessage] = dataclasses.field(default_factory=list)
    """The assignment, and the orders that arrived together with it."""


_parked: Parked | None = None


def park(settings: WorkerConfig) -> None:
    """Waits until this spare gets a rank. Ends the process if its agent is gone."""
    global _parked
    for module in settings.preload:
        importlib.import_module(module)
    page, parked = TagWriter(settings.page_fd), Parked()
    page.set_waiting(True)
    with socket.socket(fileno=os.dup(settings.link_fd)) as link:
        link.sendall(frame(RankAwaited(settings.worker)))
        while (mine := next((order for order in parked.orders if isinstance(order, Assign)), None)) is None:
            data = link.recv(_RECEIVE_BYTES)
            if not data:
                os._exit(EXIT_ORPHANED)
            parked.orders += parked.decoder.feed(data)
    page.set_waiting(False)
    leave_park(settings, mine.rank, mine.local_rank, mine.local_world_size, mine.device)
    _parked = parked


def take_parked() -> Parked | None:
    """Returns the messages of the time in the park, once; None if this process was not parked."""
    global _parked
    parked, _parked = _parked, None
    return parked
