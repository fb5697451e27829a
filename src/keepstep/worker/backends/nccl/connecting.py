"""The store of a group, usable only while the group connects."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store


class ConnectingStore(Store):
    """Passes on what connecting asks of a store, until that is over, and raises from then on.

    Torch keeps a group's store, and its watchdog writes there when an operation has failed, for other ranks to write
    what they know to files (``ProcessGroupNCCL::broadcastDumpSignal``). keepstep has ended the generation by then, and
    no rank reads it; a watchdog that waits for an answer would keep the group from being given up. Torch catches what
    is raised here, and writes it to its log. Where TORCH_DISTRIBUTED_DEBUG=DETAIL has the watchdog note every
    operation in the store, the first error ends that (``DesyncDebugger::logWorkStart``), which must be: its report asks
    the store under a lock that `get_error` waits for.
    """

    def __init__(self, store: Store) -> None:
        """Args:
        store: where the members find each other. It is kept alive, which C++ alone would not do.
        """
        super().__init__()
        self._store: Store | None = store

    def close(self) -> None:
        """The group is connected, or has given up: from here on nothing is there, and nothing can be set."""
        self._store = None

    def _open(self, key: str) -> Store:
        if self._store is None:
            raise RuntimeError(f"{key} was asked of a group's store after the group was connected")
        return self._store

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key.

        Raises:
            RuntimeError: the group is connected.
        """
        self._open(key).set(key, value if isinstance(value, str) else bytes(value))  # type: ignore[arg-type]  # torch's stub knows str alone

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value.

        Raises:
            RuntimeError: the group is connected.
        """
        return self._open(key).get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._store is not None and self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there.

        Raises:
            RuntimeError: the group is connected.
        """
        store = self._open(keys[0])
        if timeout is None:
            store.wait(keys)
        else:
            store.wait(keys, timeout)
