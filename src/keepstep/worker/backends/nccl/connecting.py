"""The store of a group, usable only while the group connects."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store


class ConnectingStore(Store):
    """Forwards store operations while a group connects, and raises from then on.

    Torch keeps a group's store. When an operation has failed, torch's watchdog writes there, so that other ranks write
    their records to files (``ProcessGroupNCCL::broadcastDumpSignal``). keepstep has ended the generation by then, and
    no rank reads it; a watchdog that waits for an answer would keep the group from being released. Torch catches the
    error that is raised here, and writes it to its log.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL the watchdog records every operation in the store. The first error ends that
    (``DesyncDebugger::logWorkStart``). This is necessary: its report calls the store under a lock that `get_error`
    waits for.
    """

    def __init__(self, store: Store) -> None:
        """Args:
        store: the store in which the members find each other. It is kept alive here, which C++ alone would not do.
        """
        super().__init__()
        self._store: Store | None = store

    def close(self) -> None:
        """Ends the forwarding, when the group has connected or failed to. From here on no key is set or can be set."""
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
        """Whether all keys are set; False after `close`."""
        return self._store is not None and self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set.

        Raises:
            RuntimeError: the group is connected.
        """
        store = self._open(keys[0])
        if timeout is None:
            store.wait(keys)
        else:
            store.wait(keys, timeout)
