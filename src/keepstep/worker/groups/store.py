"""The rendezvous store of a group, over the worker's link to its agent.

The controller holds the store. So it survives the loss of any worker and needs no port. Every key belongs to one
generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from keepstep.errors import PeerLost
from keepstep.worker.link import Link

KEPT_DEADLINE_S = 3600.0
"""How long to wait until all ranks have come to their first step. The controller has its own deadline for that."""


class LinkStore(Store):
    """A `torch.distributed.Store` of one generation and group."""

    def __init__(self, link: Link, generation: int, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._link = link
        self._generation = generation
        self._prefix = prefix
        self._timeout_s = timeout.total_seconds()

    def _call(
        self, operation: str, keys: list[str], value: bytes = b"", timeout_s: float | None = None
    ) -> tuple[bytes, ...]:
        names = tuple(map(self._name, keys))
        return self._link.request(self._generation, operation, names, value, timeout_s or self._timeout_s)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key without waiting for an answer. Reading the key waits, and fails if the generation is over."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._link.post(self._generation, "set", (self._name(key),), data)

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        return self._call("get", [key])[0]

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later calls."""
        self._timeout_s = timeout.total_seconds()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits for several keys and returns their values."""
        return list(self._call("get", keys))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""
        return int(self._call("add", [key], str(amount).encode())[0])

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return self._call("check", keys)[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set."""
        self._call("get", keys, timeout_s=timeout.total_seconds() if timeout else None)

    def delete_key(self, key: str) -> bool:
        """Removes a key. Returns whether it was set."""
        return self._call("delete", [key])[0] == b"1"


class LinkKeeper:
    """Stores results of the ranks' start-up at the controller. Implements `startup_operations.Keeper`."""

    def __init__(self, link: Link, generation: Callable[[], int], set_waiting: Callable[[bool], None]) -> None:
        """Args:
        link: link of this worker.
        generation: returns the current generation.
        set_waiting: called before and after a wait for other ranks.
        """
        self._link = link
        self._generation = generation
        self._set_waiting = set_waiting

    def keep(self, name: str, value: bytes) -> bool:
        """Stores a value. Returns False if there is no room for it.

        Raises:
            PeerLost: the generation is over.
        """
        return self._link.request(self._generation(), "keep", (name,), value, KEPT_DEADLINE_S)[0] == b"1"

    def kept(self, name: str) -> bytes | None:
        """Waits until all ranks have come to their first step. Returns the value stored under a name, or None.

        Raises:
            PeerLost: the ranks have not come there in time.
        """
        until = time.monotonic() + KEPT_DEADLINE_S
        self._set_waiting(True)
        try:
            while True:
                try:
                    values = self._link.request(0, "kept", (name,), b"", max(0.0, until - time.monotonic()))
                except PeerLost:
                    if time.monotonic() >= until:
                        raise
                    continue  # the end of a generation ends every request, but this one has no generation
                return values[0] if values else None
        finally:
            self._set_waiting(False)
