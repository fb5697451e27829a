"""The newest complete version in host memory, for a process that passes it on."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from keepstep.errors import KeepstepError, WeightsNotReady
from keepstep.weights.channels.listener import RETRY_S
from keepstep.weights.subscriber import DEFAULT_DEADLINE_S, Subscriber

POLL_S = 0.2
"""How soon `close` is seen while nothing is published."""


class VersionInbox:
    """Receives all that is published, in a thread, while earlier versions are being handed on.

    It keeps one whole version, and takes memory for another one while that arrives. A newer one overtakes those that
    were not taken out.
    """

    def __init__(
        self, folder: str | Path, *, device: int = 0, name: str | None = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        """Args: see `keepstep.Subscriber`. It attends to the publisher from here until `close`."""
        self._coming: dict[str, torch.Tensor] = {}
        self._whole: tuple[int, dict[str, torch.Tensor]] | None = None
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        self._subscriber = Subscriber(folder, load=self._take, device=device, name=name, deadline_s=deadline_s)
        self._thread = threading.Thread(target=self._attend, name="keepstep-inbox", daemon=True)
        self._thread.start()

    @property
    def last_error(self) -> KeepstepError | None:
        """Why the last version failed; None after a successful one."""
        return self._subscriber.last_error

    def take(self, timeout_s: float) -> tuple[int, dict[str, torch.Tensor]]:
        """Waits for a version, and takes it out: its number, and whole tensors by name, which are the caller's now.

        Raises:
            KeepstepError: none came in time, and why if that is known.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._whole is not None, timeout_s):
                raise self.last_error or WeightsNotReady(f"no version came within {timeout_s:g} s")
            assert self._whole is not None
            whole, self._whole = self._whole, None
            return whole

    def close(self) -> None:
        """Leaves the publisher."""
        self._is_over.set()
        self._thread.join()
        self._subscriber.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        self._coming[name] = tensor.to("cpu", copy=True)

    def _attend(self) -> None:
        while not self._is_over.is_set():
            try:
                version = self._subscriber.receive(POLL_S)
            except KeepstepError:  # noted in last_error; the next version may come
                self._coming = {}
                if not self._subscriber.is_attached:
                    self._is_over.wait(RETRY_S)
                continue
            with self._changed:
                self._whole, self._coming = (version, self._coming), {}
                self._changed.notify_all()
