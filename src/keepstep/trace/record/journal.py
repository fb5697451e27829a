"""The journal of a job: a line of JSON for each event. The controller writes it before it sends any resulting message.

Each line ends with a checksum of the rest, as a member of its JSON object. So any JSON reader can read it, and keepstep
detects disk errors.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import msgspec
import xxhash

from keepstep.errors import ConfigurationError
from keepstep.protocol.controller import JournalEntry
from keepstep.trace.record.growing import GrowingFile, check_whole
from keepstep.trace.targets import replacing


class Journal:
    """Appends to a journal. First it removes an incomplete last line of an earlier writer."""

    def __init__(self, path: Path, *, is_durable: bool = False) -> None:
        """Args:
        path: path of the journal, which need not exist yet.
        is_durable: whether entries must survive a crash of the machine, so that another machine can read them.
            Otherwise they survive a crash of the process. That is enough if the controller is restarted on this
            machine only.
        """
        self._file = GrowingFile(path, is_durable=is_durable)
        _cut_torn_line(path)
        self._encoder = msgspec.json.Encoder()

    @property
    def error(self) -> OSError | None:
        """Why the journal was given up; None if it was not."""
        return self._file.error

    def give_up(self, error: OSError) -> None:
        """Writes nothing more, because of an error of another file without which no controller goes on."""
        self._file.give_up(error)

    def write(self, entries: list[JournalEntry]) -> None:
        """Appends entries. When it returns, the operating system has them, or the disk if the journal is durable.

        Or the journal is given up.
        """
        if entries:
            self._file.append(b"".join(_sealed(self._encoder.encode(entry)) + b"\n" for entry in entries))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def take_over(path: Path) -> list[JournalEntry]:
    """Replaces a journal by a copy, and returns its entries, oldest first.

    An earlier writer may only have been stopped. If it continues, it writes to its old file, which no process reads any
    more.

    Raises:
        ConfigurationError: it was given up, or the file or a line cannot be read; the message names file and line.
    """
    check_whole(path)
    try:
        data = path.read_bytes()
        with replacing(path, is_private=True) as file:
            file.write(data[: data.rfind(b"\n") + 1])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigurationError(f"journal {path}: {error.strerror}") from error
    return read(path)


def read(path: Path) -> list[JournalEntry]:
    """Returns all entries of a journal, oldest first. It skips an incomplete last line: no message followed from it.

    Raises:
        ConfigurationError: the file or a line cannot be read; the message names file and line.
    """
    return JournalTail(path).read()


class JournalTail:
    """Reads a journal while it grows: each call reads up to the present end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(JournalEntry)
        self._offset = 0
        self._num_lines = 0

    def read(self) -> list[JournalEntry]:
        """Returns the entries of the complete lines since the last call.

        Raises:
            ConfigurationError: the file or a line cannot be read; the message names file and line.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                *lines, torn = file.read().split(b"\n")
                self._offset = file.tell() - len(torn)
        except OSError as error:
            raise ConfigurationError(f"journal {self.path}: {error.strerror}") from error
        entries = []
        for line in lines:
            self._num_lines += 1
            try:
                entries.append(self._decoder.decode(_opened(line)))
            except (ValueError, RecursionError) as error:
                raise ConfigurationError(
                    f"journal {self.path}, line {self._num_lines}: not an entry of a journal: {error}"
                ) from error
        return entries


_SEAL = b',"xxh3":"%s"}'
_SEAL_BYTES = len(_SEAL % (b"0" * 16))


def _sealed(body: bytes) -> bytes:
    return body[:-1] + _SEAL % xxhash.xxh3_64_hexdigest(body).encode()


def _opened(line: bytes) -> bytes:
    body = line[:-_SEAL_BYTES] + b"}"
    if _sealed(body) != line:
        raise ValueError("its checksum is wrong")
    return body


def _cut_torn_line(path: Path) -> None:
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        os.truncate(path, whole)
