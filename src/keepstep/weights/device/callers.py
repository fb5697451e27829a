"""Connections from other devices to this one, for one purpose each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from keepstep.cancel import CancelToken
from keepstep.protocol.transfer.messages import DeviceCalled, UpdateOffered
from keepstep.weights.channels.connection import Connection, ConnectionEnded

Introduction = TypeVar("Introduction", DeviceCalled, UpdateOffered)


class Callers(Generic[Introduction]):
    """The latest connection from each other device, with its introduction. Any thread may call the methods.

    Only one thread, the publishing one or its coordinator, uses the connections and closes replaced ones.
    """

    def __init__(self) -> None:
        self.changed = CancelToken()
        """Set when a connection was added."""
        self._present: dict[int, tuple[Introduction, Connection]] = {}
        self._replaced: list[Connection] = []
        """Replaced connections, shut down but not closed yet."""
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, introduction: Introduction, connection: Connection, welcome: Callable[[], None]) -> None:
        """Adds a connection. It replaces an earlier connection of the same rank, and shuts that down.

        Args:
            introduction: the caller's first message: its rank and purpose.
            connection: the connection. This object owns it from now on.
            welcome: sends the answer. No other message is sent before it.

        Raises:
            PeerLost: from ``welcome``, or because this object is closed. The connection is not added then.
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
        """The current connections by rank, with their introductions. Closes replaced ones."""
        with self._lock:
            for connection in self._replaced:
                connection.close()
            self._replaced.clear()
            return dict(self._present)

    def connections(self) -> dict[int, Connection]:
        """The current connections by rank."""
        return {rank: connection for rank, (_introduction, connection) in self.present().items()}

    def take(self, rank: int, connection: Connection) -> bool:
        """Transfers a connection to the caller of this method. Returns False if another one has replaced it."""
        with self._lock:
            if (present := self._present.get(rank)) is None or present[1] is not connection:
                return False
            del self._present[rank]
            return True

    def close(self) -> None:
        """Closes all connections, and refuses new ones from now on."""
        with self._lock:
            self._is_closed = True
        for rank, connection in self.connections().items():
            self.take(rank, connection)
            connection.close()
        self.changed.close()
