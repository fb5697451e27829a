"""The store in which the members of a group find each other, spoken over the worker's own line to its agent.

It lives with the controller: no worker hosts it, so none takes it along when it dies, nothing listens on a port, and
every key belongs to one generation.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

from keepstep.worker.link import Link


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
        names = tuple(f"{self._prefix}/{key}" for key in keys)
        return self._link.request(self._generation, operation, names, value, timeout_s or self._timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        self._call("set", [key], value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        return self._call("get", [key])[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns it."""
        return int(self._call("add", [key], str(amount).encode())[0])

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._call("check", keys)[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there."""
        self._call("get", keys, timeout_s=timeout.total_seconds() if timeout else None)

    def delete_key(self, key: str) -> bool:
        """Removes a key; whether it was there."""
        return self._call("delete", [key])[0] == b"1"
