"""Workers' stdout and stderr: inherited, redirected to files, or both with a prefix, as torchrun does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from keepstep.agent.settings import OutputSettings


class WorkerOutput:
    """The streams of one worker. ``descriptors`` are to be passed to it and then closed by `handed_over`."""

    def __init__(self, settings: OutputSettings, worker: int, local_rank: int, label: Callable[[], str]) -> None:
        """Args:
        settings: what goes where.
        worker: number of the worker; it names the folder, so no attempt overwrites another's logs.
        local_rank: selects the settings.
        label: what stands in front of each line shown, asked anew for each, for a spare gets its rank later.
        """
        self._settings = settings
        self._label = label
        self.redirects = [
            self._mode(local_rank, settings.tee_stdout, settings.redirect_stdout),
            self._mode(local_rank, settings.tee_stderr, settings.redirect_stderr),
        ]
        self.descriptors: list[int] = []
        self._tees: list[tuple[int, IO[bytes], IO[str]]] = []
        for name, mode, console in zip(("stdout", "stderr"), self.redirects, (sys.stdout, sys.stderr), strict=True):
            if mode:
                self._open(name, mode, console, worker)

    def _mode(self, local_rank: int, tees: frozenset[int], redirects: frozenset[int]) -> str:
        hidden = self._settings.shown is not None and local_rank not in self._settings.shown
        if local_rank in tees and not hidden:
            return "tee"
        return "file" if hidden or local_rank in tees or local_rank in redirects else ""

    def _open(self, name: str, mode: str, console: IO[str], worker: int) -> None:
        path = Path(os.devnull)
        if self._settings.log_dir is not None:
            folder = self._settings.log_dir / f"worker_{worker}"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.log"
        file = path.open("wb", buffering=0)
        if mode == "file":
            self.descriptors.append(os.dup(file.fileno()))
            file.close()
            return
        read, write = os.pipe()
        self.descriptors.append(write)
        os.set_blocking(read, False)
        self._tees.append((read, file, console))
        asyncio.get_running_loop().add_reader(read, self._copy, read, file, console, bytearray())

    def handed_over(self) -> None:
        """The worker has its own copies of the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def close(self) -> None:
        """The worker is gone: copies what is left and closes everything."""
        for read, file, console in self._tees:
            self._copy(read, file, console, bytearray())
            asyncio.get_running_loop().remove_reader(read)
            os.close(read)
            file.close()
        self._tees.clear()

    def _copy(self, read: int, file: IO[bytes], console: IO[str], rest: bytearray) -> None:
        try:
            data = os.read(read, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(read)
        file.write(data)
        rest += data
        *lines, last = rest.split(b"\n")
        rest[:] = last if data else b""
        if not data and last:
            lines.append(last)
        for line in lines:
            print(f"{self._label()}{line.decode(errors='replace')}", file=console, flush=True)
