"""Workers' stdout and stderr: inherited, redirected to files, or both with a prefix, as in torchrun."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from keepstep.agent.settings import OutputSettings

STREAMS = ("stdout", "stderr")
PIPE_BYTES = 16 * mmap.PAGESIZE
"""Capacity of a pipe (`man 7 pipe`). So one read gets everything that is left in a dead worker's pipe."""


class WorkerOutput:
    """The output streams of one worker. Pass ``descriptors`` to the worker, then call `handed_over`."""

    def __init__(self, settings: OutputSettings, worker: int, local_rank: int, label: Callable[[], str]) -> None:
        """Args:
        settings: the destinations by local rank.
        worker: number of the worker. It names the log folder, so no worker overwrites another one's logs.
        local_rank: selects the destinations.
        label: returns the prefix of a line on the console. It is called for each line, because a spare gets its rank
            later.
        """
        self._settings = settings
        self._label = label
        self.redirects = [
            self._mode(local_rank, settings.tee_stdout, settings.redirect_stdout),
            self._mode(local_rank, settings.tee_stderr, settings.redirect_stderr),
        ]
        self.descriptors: list[int] = []
        self._tees: list[_Tee] = []
        for name, mode, console in zip(STREAMS, self.redirects, (sys.stdout, sys.stderr), strict=True):
            if mode:
                self._open(name, mode, console, worker)

    def _mode(self, local_rank: int, tees: frozenset[int], redirects: frozenset[int]) -> str:
        """Returns where a stream goes, as in torchrun: a hidden worker writes to its file, or nowhere without one."""
        hidden = self._settings.shown is not None and local_rank not in self._settings.shown
        if local_rank in tees and not hidden:
            return "tee"
        if local_rank in tees or local_rank in redirects:
            return "file"
        return "nowhere" if hidden else ""

    def _open(self, name: str, mode: str, console: IO[str], worker: int) -> None:
        path = Path(os.devnull)
        if self._settings.log_dir is not None and mode != "nowhere":
            path = self._settings.log_dir / f"worker_{worker}" / f"{name}.log"
        file = _emptied(path)
        if mode == "tee":
            read, write = os.pipe()
            self.descriptors.append(write)
            self._tees.append(_Tee(read, file, console, self._label))
        else:
            self.descriptors.append(os.dup(file.fileno()))
            file.close()

    def handed_over(self) -> None:
        """Closes the descriptors. Call it when the worker has its own copies."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def is_unread(self) -> bool:
        """Whether the terminal or pipe that the worker shares with this process takes no more output now.

        Ctrl-S, a pager and a log shipper that stalls do that. Streams that go elsewhere do not count, nor does one
        that is closed, or whose reader has left: a write there fails at once.
        """
        poll = select.poll()
        inherited = [number for number, mode in enumerate(self.redirects, start=1) if not mode]
        for number in inherited:
            poll.register(number, select.POLLOUT)
        return len(poll.poll(0)) < len(inherited)

    def close(self) -> None:
        """Copies the rest of the output and closes everything. Call it when the worker is gone."""
        for tee in self._tees:
            tee.close()
        self._tees.clear()


def _emptied(path: Path) -> IO[bytes]:
    """Opens a file, or the null device: a full disk must not keep a replacement from starting."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb", buffering=0)
    except OSError as error:
        _tell_not_kept(path, error)
        return Path(os.devnull).open("wb", buffering=0)


def _tell_not_kept(path: str | Path, error: Exception) -> None:
    print(f"keepstep: {path} cannot be written, training continues: {error}", file=sys.stderr, flush=True)


class _Tee:
    """Copies a stream from its pipe to its file, and line by line to the console. Runs on the event loop."""

    def __init__(self, read: int, file: IO[bytes], console: IO[str], label: Callable[[], str]) -> None:
        self._read, self._file, self._console, self._label = read, file, console, label
        self._rest = b""
        """The last line, which is not complete yet."""
        self._is_kept = True
        """Whether the file could be written so far. The worker goes on without it."""
        os.set_blocking(read, False)
        asyncio.get_running_loop().add_reader(read, self._copy)

    def _copy(self) -> None:
        try:
            data = os.read(self._read, PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._read)
        self._keep(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= PIPE_BYTES:  # a progress bar may never end its line
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._show(line)

    def _keep(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left and self._is_kept:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._is_kept = False
            _tell_not_kept(self._file.name, error)

    def _show(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # its reader has left
            print(f"{self._label()}{line.decode(errors='replace')}", file=self._console, flush=True)

    def close(self) -> None:
        self._copy()
        if self._rest:
            self._show(self._rest)
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        self._file.close()
