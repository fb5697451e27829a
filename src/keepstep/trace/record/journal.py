"""The journal of a job: a line of JSON for each event, written before what follows from it is transmitted.

Each line ends with a checksum of the rest, as one more member of its object, so it can be read with anything that reads
JSON, and what a disk has done to it does not go unnoticed.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import msgspec
import xxhash

from keepstep.errors import ConfigurationError
from keepstep.protocol.controller import JournalEntry


class Journal:
    """Appends to a journal; a torn last line of an earlier writer is cut off first.

    What was written has left this process, so it survives the process, though not the machine: another node cannot
    know the difference, for the controller does not come back on a machine that has lost its files.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        _cut_torn_line(path)
        self._encoder = msgspec.json.Encoder()

    def write(self, entries: list[JournalEntry]) -> None:
        """Appends entries; when this returns they are with the operating system."""
        if entries:
            data = memoryview(b"".join(_sealed(self._encoder.encode(entry)) + b"\n" for entry in entries))
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        """Ends the journal."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: Path) -> list[JournalEntry]:
    """All entries of a journal, oldest first. A torn last line was never acted upon, and is left away.

    Raises:
        ConfigurationError: a line cannot be read, or the file cannot; naming file and line.
    """
    return JournalTail(path).read()


class JournalTail:
    """Reads a journal to its present end, and goes on from there when asked again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(JournalEntry)
        self._offset = 0
        self._num_lines = 0

    def read(self) -> list[JournalEntry]:
        """The whole lines that have been written since the last call.

        Raises:
            ConfigurationError: a line cannot be read, or the file cannot; naming file and line.
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
            except (ValueError, msgspec.MsgspecError) as error:
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
