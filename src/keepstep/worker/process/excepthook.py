"""The hook that prints what ends a script, with the rank in front of each line.

torch installs one in `init_process_group`, with the rank of that moment: on a spare a provisional one, which belongs to
another process. This one asks for the rank when it prints.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import TracebackType


class RankInFront:
    """Prints by another hook, with ``[rank3]:`` or ``[spare]:`` in front of each line."""

    def __init__(self, inner: Callable[..., object], rank: Callable[[], int | None]) -> None:
        """Args:
        inner: the hook that was there before torch's own.
        rank: returns the present rank; None: this process is a spare.
        """
        self.inner = inner
        self._rank = rank

    def __call__(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        """Prints the error. Called as `sys.excepthook`."""
        stream, sys.stderr = sys.stderr, io.StringIO()
        try:
            self.inner(kind, error, where)
        finally:
            printed, sys.stderr = sys.stderr.getvalue(), stream
            rank = self._rank()
            who = "[spare]" if rank is None else f"[rank{rank}]"
            stream.write("".join(f"{who}: {line}" if line.strip() else line for line in printed.splitlines(True)))
            stream.flush()


def is_usual(hook: object) -> bool:
    """Whether a hook for exceptions only prints them: Python's, or one that puts the rank in front of that."""
    if isinstance(hook, RankInFront):
        return is_usual(hook.inner)
    return hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch.")
