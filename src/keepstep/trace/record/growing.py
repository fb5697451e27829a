"""A file to which a controller appends, and with which a restarted one goes on."""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from pathlib import Path

from keepstep.errors import ConfigurationError
from keepstep.trace.targets import private

_OF_ALL = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class GrowingFile:
    """An open file that only grows, until it cannot be written any more.

    A full disk must not end the job that is recorded there. So the file is given up then: it takes nothing more, and
    loses its write permission, which needs no space. `check_whole` refuses it.
    """

    def __init__(self, path: Path, *, is_durable: bool = False, is_empty: bool = False) -> None:
        """Args:
        path: the file, which need not exist yet. A new one is for this user only.
        is_durable: whether what is appended survives a crash of the machine; otherwise a crash of the process.
        is_empty: whether to empty it.

        Raises:
            OSError: it cannot be opened.
        """
        self.error: OSError | None = None
        """Why it was given up; None if it was not."""
        self._is_durable = is_durable
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_empty else 0)
        self._file = private(os.fspath(path), flags)
        self._close = weakref.finalize(self, os.close, self._file)

    def append(self, data: bytes) -> None:
        """Appends. When it returns, the operating system has the data, or the disk; or the file is given up."""
        if self.error is not None:
            return
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            if self._is_durable:
                os.fdatasync(self._file)
        except OSError as error:
            self.give_up(error)

    def empty(self) -> None:
        """Removes the content, if the file is not given up."""
        if self.error is None:
            try:
                os.ftruncate(self._file, 0)
                if self._is_durable:
                    os.fdatasync(self._file)
            except OSError as error:
                self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Gives the file up, because of an error that may be that of another file of the run."""
        if self.error is None:
            self.error = error
            with contextlib.suppress(OSError):  # a file system without permissions: the missing end is all there is
                os.fchmod(self._file, stat.S_IRUSR)

    def is_at(self, path: Path) -> bool:
        """Whether a path leads to this file. Another controller may have replaced it."""
        return path.exists() and os.path.samestat(os.fstat(self._file), path.stat())

    def close(self) -> None:
        """Closes the file."""
        self._close()


def check_whole(path: Path) -> None:
    """Checks that no controller has given a file up.

    Raises:
        ConfigurationError: one has.
    """
    with contextlib.suppress(FileNotFoundError):
        if not path.stat().st_mode & _OF_ALL:
            raise ConfigurationError(
                f"{path}: what came last could not be written there (it has lost its write permission for that), so no "
                "controller can go on with this run: begin a new one, from the newest checkpoint"
            )
