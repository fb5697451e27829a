"""Compares the files that two runs of a drill have written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from keepstep.drill.formats import (
    DCP_METADATA,
    DCP_SUFFIX,
    EVENTS,
    SAFETENSORS,
    read_dcp,
    read_events,
    read_safetensors,
)
from keepstep.drill.saved import SUFFIXES, describe_difference

_CHUNK_BYTES = 1 << 20
_MAX_TEXT_BYTES = 16 << 20
"""Larger files are not treated as text, in which paths of the working directory are replaced."""


@dataclasses.dataclass(frozen=True, slots=True)
class ComparedFile:
    """The result of comparing one file, or a pattern that matches no file."""

    file: str
    """Path relative to the working directory, or the pattern."""
    difference: str | None
    """None if the two runs have written the same."""


def compare_files(first: Path, second: Path, patterns: Sequence[str]) -> list[ComparedFile]:
    """Compares the files of two working directories. It ignores that each run writes its own directory's path.

    Args:
        first: working directory of the run without failures.
        second: working directory of the other run.
        patterns: glob patterns relative to the directories. A folder means all files in it.
    """
    first, second = first.resolve(), second.resolve()
    compared: dict[str, ComparedFile] = {}
    for pattern in patterns:
        here, there = set(_matches(first, pattern)), set(_matches(second, pattern))
        for file in sorted(here | there):
            compared[file] = ComparedFile(file, _difference(file, first, second))
        if not here | there:
            compared[pattern] = ComparedFile(pattern, "neither run has written such a file")
    return list(compared.values())


def first_written_s(folder: Path, patterns: Sequence[str]) -> float | None:
    """When the oldest of the compared files was last written, in monotonic seconds; None if there is none.

    Args:
        folder: the working directory of a run.
        patterns: see `compare_files`.
    """
    files = [folder / name for pattern in patterns for name in _matches(folder, pattern)]
    written = [file.lstat().st_mtime for file in files if file.exists()]
    return min(written) - time.time() + time.monotonic() if written else None


def _matches(folder: Path, pattern: str) -> Iterator[str]:
    """Yields the names of what is compared: files and links, a DCP folder as a whole, and a folder's event files."""
    for match in folder.glob(pattern):
        for path in match.rglob("*") if match.is_dir() and not match.is_symlink() else [match]:
            if path.is_symlink() or path.is_file():
                yield _unit(path).relative_to(folder).as_posix()


def _unit(path: Path) -> Path:
    if path.is_symlink():
        return path
    if fnmatchcase(path.name, EVENTS):
        return path.parent / EVENTS
    is_part = path.suffix == DCP_SUFFIX or path.name == DCP_METADATA
    return path.parent if is_part and (path.parent / DCP_METADATA).is_file() else path


def _difference(name: str, *folders: Path, follows: bool = True) -> str | None:
    first, second = (folder / name for folder in folders)
    written, other = _files(first), _files(second)
    if first.is_symlink() or second.is_symlink():
        return _link_difference(name, *folders, follows=follows)
    if not written:
        return "only the second run has written it"
    if not other:
        return "only the first run has written it"
    bytes_at = (_first_differing_byte(*pair) for pair in zip(written, other, strict=False))
    at = next((at for at in bytes_at if at is not None), None)
    if at is None and len(written) == len(other):
        return None
    places = [str(folder) for folder in folders]
    if first.name == EVENTS:
        return describe_difference(first, second, places, read_events, "tensorboard")
    if first.is_dir() and second.is_dir():
        return describe_difference(first, second, places, read_dcp, "torch.distributed.checkpoint")
    if first.suffix == SAFETENSORS:
        return describe_difference(first, second, places, read_safetensors, "the format of safetensors")
    if first.suffix in SUFFIXES:
        return describe_difference(first, second, places)
    return None if _is_same_text(name, *folders) else f"differs from byte {at} on"


def _files(path: Path) -> list[Path]:
    """Returns the files behind a name from `_matches`, in the order of their names."""
    if path.name == EVENTS:
        return sorted(path.parent.glob(EVENTS))
    if path.is_dir():
        return sorted([*path.glob(DCP_METADATA), *path.glob(f"*{DCP_SUFFIX}")])
    return [path] if path.is_file() else []


def _link_difference(name: str, *folders: Path, follows: bool) -> str | None:
    """Compares symbolic links: the places they lead to, and what is there. Those in there are not followed again."""
    targets: list[str] = []
    for folder, run in zip(folders, ("first", "second"), strict=True):
        link = folder / name
        if not link.is_symlink():
            return f"is a symbolic link in only one of the runs, and not in the {run} one"
        try:
            target = link.resolve()
        except RuntimeError:  # Python 3.11 and 3.12 raise it where links form a circle
            return "is a symbolic link that leads to itself"
        if not target.is_relative_to(folder):
            return f"is a symbolic link out of the working directory, to {target}, and is not followed"
        targets.append(target.relative_to(folder).as_posix())
    if targets[0] != targets[1]:
        return f"is a symbolic link to {targets[0]} and {targets[1]}"
    if not follows or (folders[0] / name).parent.is_relative_to(folders[0] / targets[0]):
        return None
    for inside in sorted({each for folder in folders for each in _matches(folder, escape(targets[0]))}):
        if (found := _difference(inside, *folders, follows=False)) is not None:
            return f"{inside}: {found}"
    return None


def _is_same_text(name: str, *folders: Path) -> bool:
    if any((folder / name).stat().st_size > _MAX_TEXT_BYTES for folder in folders):
        return False
    one, other = ((folder / name).read_bytes().replace(str(folder).encode(), b".") for folder in folders)
    return one == other


def _first_differing_byte(first: Path, second: Path) -> int | None:
    at = 0
    with first.open("rb") as one, second.open("rb") as other:
        while True:
            mine, theirs = one.read(_CHUNK_BYTES), other.read(_CHUNK_BYTES)
            if mine != theirs:
                pairs = enumerate(zip(mine, theirs, strict=False))
                return at + next((n for n, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
            if not mine:
                return None
            at += len(mine)
