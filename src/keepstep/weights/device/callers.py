"""The other devices that have opened connections to this one, for one purpose each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from keepstep.cancel import CancelToken
from keepstep.protocol.transfer.messages import DeviceCalled, UpdateOffered
from keepstep.weights.channels.connection import Connection, ConnectionEnded

Introduction = TypeVar("Introduction", DeviceCalled, UpdateOffered)


class Callers(Generic[Introduction]):
    """Lines that others have opened to this process, the latest of each, and what they said they are for. Any thread.

    One thread, that which publishes or its coordinator, uses the connections and closes those that were replaced.
    """

    def __init__(self) -> None:
        self.changed = CancelToken()
        """Set when one was added."""
        self._present: dict[int, tuple[Introduction, Connection]] = {}
        self._replaced: list[Connection] = []
        """The threads that wait on them have been woken."""
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, introduction: Introduction, connection: Connection, welcome: Callable[[], None]) -> None:
        """A connection was opened; the one that this rank had before is closed.

        Args:
            introduction: whose it is, and what for.
            connection: belongs to this object from now on.
            welcome: answers it. Once it knows it is here, and it is told nothing else before.

        Raises:
            PeerLost: from ``welcome``, or because no caller is let in any more; the connection is not here then.
        """
        with self._lock:
            if self._is_closed:
                raise ConnectionEnded(connection.who, "came when all was over")
            welcome()
            if (former := self._present.pop(introduction.rank, None)) is not None:
                former[1].hang_up()
                self._replaced.append(former[1])
            self._present[introduction.rank] = introduction, connection
            self.changed.set()

    def present(self) -> dict[int, tuple[Introduction, Connection]]:
        """Those that are there, by rank."""
        with self._lock:
            for connection in self._replaced:
                connection.close()
            self._replaced.clear()
            return dict(self._present)

    def connections(self) -> dict[int, Connection]:
        """The connections alone."""
        return {rank: connection for rank, (_introduction, connection) in self.present().items()}

    def take(self, rank: int, connection: Connection) -> bool:
        """The connection belongs to the caller from now on, unless another one has taken its place."""
        with self._lock:
            if (present := self._present.get(rank)) is None or present[1] is not connection:
                return False
            del self._present[rank]
            return True

    def close(self) -> None:
        """Closes all of them; no caller is let in any more."""
        with self._lock:
            self._is_closed = True
        for rank, connection in self.connections().items():
            self.take(rank, connection)
            connection.close()
        self.changed.close()
