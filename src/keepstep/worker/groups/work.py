"""The handles that a surviving group's collectives return."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

Outputs = list[Tensor] | list[list[Tensor]]


class EchoedWork(dist.Work):
    """A collective that a group which is down has answered by itself."""

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done."""
        return self._future

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always."""
        return True


class GroupWork(dist.Work):
    """A collective on its way in the inner group.

    It never raises while its group echoes: if the inner one fails, ``on_error`` is told, the outputs are filled by
    echo, and the caller goes on to its safe point.
    """

    def __init__(
        self,
        inner: dist.Work,
        outputs: Outputs,
        on_done: Callable[[], None],
        on_error: Callable[[Exception], bool],
    ) -> None:
        """Args:
        inner: the inner group's handle.
        outputs: what the collective's future holds when it is done.
        on_done: called once, from any thread, when the collective has ended.
        on_error: called with the inner error; True means that the outputs have been echoed.
        """
        super().__init__()
        self._inner = inner
        self._outputs = outputs
        self._on_done = on_done
        self._on_error = on_error
        self._settled: torch.futures.Future[Any] = inner.get_future().then(self._settle)

    def _settle(self, future: torch.futures.Future[Any]) -> Outputs:
        self._on_done()
        try:
            future.value()
        except RuntimeError as error:
            if not self._on_error(error):
                raise
        return self._outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the collective has ended.

        Raises:
            RuntimeError: the inner group's error, only where the group does not echo (after the last step).
        """
        try:
            return bool(self._inner.wait(timeout)) if timeout else bool(self._inner.wait())
        except RuntimeError as error:
            if not self._on_error(error):
                raise
            return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs."""
        return self._settled

    def is_completed(self) -> bool:
        """Whether the inner collective has ended."""
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether waiting would end without an error."""
        return self.is_completed()

    def source_rank(self) -> int:
        """The sender of a `recv_anysource`."""
        return int(self._inner._source_rank())
