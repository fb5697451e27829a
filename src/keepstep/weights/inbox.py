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
"""How long the thread waits for a version before it checks for `close`."""


class VersionInbox:
    """Receives published versions in a thread, while the caller processes an earlier one.

    It keeps one complete version, and needs memory for a second one while that arrives. A newer version replaces one
    that the caller has not taken.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: int | None = None,
        name: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        keeps_values: bool = True,
    ) -> None:
        """Starts a thread that receives versions until `close`.

        Args:
            folder, device, name, deadline_s: as for `keepstep.Subscriber`.
            keeps_values: otherwise the tensors have dtypes and shapes only (device ``meta``), and take no memory.
        """
        self._keeps_values = keeps_values
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
        """Waits for a version and removes it from the inbox.

        Returns:
            its number, and its whole tensors by name, in host memory. The caller owns them.

        Raises:
            KeepstepError: no version arrived in time; with the reason, if known.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._whole is not None, timeout_s):
                raise self.last_error or WeightsNotReady(f"no version came within {timeout_s:g} s")
            assert self._whole is not None
            whole, self._whole = self._whole, None
            return whole

    def close(self) -> None:
        """Disconnects from the publisher and ends the thread."""
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
        self._coming[name] = tensor.to("cpu", copy=True) if self._keeps_values else tensor.to("meta")

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
