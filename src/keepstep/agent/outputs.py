"""Workers' stdout and stderr: inherited, redirected to files, or both with a prefix, as torchrun does."""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from keepstep.agent.settings import OutputSettings

PIPE_BYTES = 16 * mmap.PAGESIZE
"""What a pipe holds (`man 7 pipe`): one read of a dead worker's pipe takes all that is left."""


class WorkerOutput:
    """The streams of one worker. Pass ``descriptors`` to it, then close them with `handed_over`."""

    def __init__(self, settings: OutputSettings, worker: int, local_rank: int, label: Callable[[], str]) -> None:
        """Args:
        settings: what goes where.
        worker: number of the worker; it names the folder, so no attempt overwrites another's logs.
        local_rank: selects the settings.
        label: the prefix of each line shown, asked for each line, because a spare gets its rank later.
        """
        self._settings = settings
        self._label = label
        self.redirects = [
            self._mode(local_rank, settings.tee_stdout, settings.redirect_stdout),
            self._mode(local_rank, settings.tee_stderr, settings.redirect_stderr),
        ]
        self.descriptors: list[int] = []
        self._tees: list[_Tee] = []
        for name, mode, console in zip(("stdout", "stderr"), self.redirects, (sys.stdout, sys.stderr), strict=True):
            if mode:
                self._open(name, mode, console, worker)

    def _mode(self, local_rank: int, tees: frozenset[int], redirects: frozenset[int]) -> str:
        """As torchrun has it: who is not to be shown writes into its file, if it has one, and else nowhere."""
        hidden = self._settings.shown is not None and local_rank not in self._settings.shown
        if local_rank in tees and not hidden:
            return "tee"
        if local_rank in tees or local_rank in redirects:
            return "file"
        return "nowhere" if hidden else ""

    def _open(self, name: str, mode: str, console: IO[str], worker: int) -> None:
        path = Path(os.devnull)
        if self._settings.log_dir is not None and mode != "nowhere":
            folder = self._settings.log_dir / f"worker_{worker}"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.log"
        file = path.open("wb", buffering=0)
        if mode == "tee":
            read, write = os.pipe()
            self.descriptors.append(write)
            self._tees.append(_Tee(read, file, console, self._label))
        else:
            self.descriptors.append(os.dup(file.fileno()))
            file.close()

    def handed_over(self) -> None:
        """The worker has its own copies of the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def close(self) -> None:
        """The worker is gone: copies what is left and closes everything."""
        for tee in self._tees:
            tee.close()
        self._tees.clear()


class _Tee:
    """Copies one stream from its pipe into its file, and line by line to the console."""

    def __init__(self, read: int, file: IO[bytes], console: IO[str], label: Callable[[], str]) -> None:
        self._read, self._file, self._console, self._label = read, file, console, label
        self._rest = b""
        """The line that has no end yet."""
        os.set_blocking(read, False)
        asyncio.get_running_loop().add_reader(read, self._copy)

    def _copy(self) -> None:
        try:
            data = os.read(self._read, PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._read)
        self._file.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= PIPE_BYTES:  # a progress bar may go on for days without the end of a line
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._show(line)

    def _show(self, line: bytes) -> None:
        print(f"{self._label()}{line.decode(errors='replace')}", file=self._console, flush=True)

    def close(self) -> None:
        self._copy()
        if self._rest:
            self._show(self._rest)
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        self._file.close()
