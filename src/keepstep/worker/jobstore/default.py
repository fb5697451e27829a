"""Torch's default store in a job, for `torch.distributed` and scripts; the controller executes the operations.

Values, results and error types are those of torch's own stores (`tests/worker/jobstore/test_default.py` compares them).
Queues and `list_keys` are refused, by torch itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol, SupportsInt

import msgspec
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from keepstep.protocol.messages import MAX_STORE_VALUE_BYTES

NO_TIMEOUT_S = 24 * 3600.0
"""The timeout in seconds that 0 stands for. Torch's stores then wait for ever."""


class Asking(Protocol):
    """Performs the operations of a store."""

    def ask(self, operation: str, keys: tuple[str, ...], value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Performs one operation; see `keepstep.controller.jobstore` for the names and results of operations.

        Raises:
            torch.distributed.DistStoreError: the operation was refused, or its keys were not set in time.
        """


class DefaultStore(Store):
    """A `torch.distributed.Store` of the whole job. Torch does not keep it alive: its owner must."""

    def __init__(self, asking: Asking) -> None:
        """Args:
        asking: performs the operations; may be replaced at any time.
        """
        super().__init__()
        self.asking = asking

    def _ask(
        self, operation: str, keys: Iterable[str | bytes], value: bytes = b"", timeout: timedelta | float | None = None
    ) -> tuple[bytes, ...]:
        names = _names(keys)
        if len(value) > MAX_STORE_VALUE_BYTES:  # checked here: no message could carry it to the controller
            raise dist.DistStoreError(
                f"key {names[0]!r}: a value of {len(value)} bytes, and at most {MAX_STORE_VALUE_BYTES >> 20} MiB are "
                "allowed: exchange it in a collective or a file"
            )
        limit: timedelta | float = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # not in the stub
        timeout_s = limit.total_seconds() if isinstance(limit, timedelta) else limit
        return self.asking.ask(operation, names, value, timeout_s or NO_TIMEOUT_S)

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        self._ask("job_set", [key], _bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        return self._ask("job_get", [key])[0]

    def add(self, key: str, value: SupportsInt) -> int:
        """Adds to a counter, which begins at 0, and returns its new value.

        Raises:
            TypeError: ``value`` is not a number, has a fraction, or does not fit into 64 bits.
            ValueError: the key holds no number, or one that does not fit into 64 bits.
        """
        total = self._ask("job_add", [key], str(_number(value)).encode())
        if not total:
            raise ValueError(f"add: key {key!r} of the store holds no number of 64 bits")
        return int(total[0])

    def append(self, key: str, value: bytes | str) -> None:
        """Appends to the value of a key, which is empty at first."""
        self._ask("job_append", [key], _bytes(value))

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Sets a key if it has the expected value, or if it is not set and the expected value is empty.

        Returns:
            the new value of the key; the expected one if the key is not set.
        """
        both = (_bytes(expected_value), _bytes(desired_value))
        return self._ask("job_compare_set", [key], msgspec.msgpack.encode(both))[0]

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys are set."""
        return self._ask("job_check", keys)[0] == b"1"

    def wait(self, keys: Iterable[str], timeout: timedelta | float | None = None) -> None:
        """Waits until all keys are set."""
        self._ask("job_wait", keys, timeout=timeout)

    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        """Waits for keys and returns their values."""
        names = _names(keys)
        self.wait(names)
        return [self.get(name) for name in names]

    def multi_set(self, keys: Iterable[str], values: Sequence[bytes | str]) -> None:
        """Sets keys one after the other."""
        for key, value in zip(_names(keys), values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Removes a key. Returns whether it was set."""
        return self._ask("job_delete", [key])[0] == b"1"

    def num_keys(self) -> int:
        """Number of keys."""
        return int(self._ask("job_num_keys", [])[0])

    deleteKey = delete_key  # noqa: N815 - the name that torch's C++ calls
    getNumKeys = num_keys  # noqa: N815 - the name that torch's C++ calls

    def has_extended_api(self) -> bool:
        """Whether the store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> DefaultStore:
        """Returns the same store: several threads may use it."""
        return self


# Checks arguments: a message with another type in it would break the protocol, and end this process.


def _names(keys: Iterable[str | bytes]) -> tuple[str, ...]:
    if isinstance(keys, str | bytes):
        raise TypeError(f"the keys of a store are a list of strings, not {keys!r}")
    return tuple(map(_name, keys))


def _name(key: Any) -> str:
    if not isinstance(key, str | bytes):
        raise TypeError(f"a key of a store is a string, not {key!r}")
    return key if isinstance(key, str) else key.decode()


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str | bytes | bytearray):
        raise TypeError(f"a value of a store is a string or bytes, not {type(value).__name__}: convert it with str()")
    return value.encode() if isinstance(value, str) else bytes(value)


def _number(value: Any) -> int:
    if isinstance(value, float | str | bytes) or not -(1 << 63) <= int(value) < 1 << 63:
        raise TypeError(f"a counter of a store takes whole numbers of 64 bits, not {value!r}")
    return int(value)
