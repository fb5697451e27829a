"""Compares the files that two runs of a drill have written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    compared: dict[str, ComparedFile] = {}
    for pattern in patterns:
        here, there = set(_matches(first, pattern)), set(_matches(second, pattern))
        for file in sorted(here | there):
            compared[file] = ComparedFile(file, _difference(file, first, second))
        if not here | there:
            compared[pattern] = ComparedFile(pattern, "neither run has written such a file")
    return list(compared.values())


def _matches(folder: Path, pattern: str) -> Iterator[str]:
    for match in folder.glob(pattern):
        for path in match.rglob("*") if match.is_dir() else [match]:
            if path.is_file():
                yield path.relative_to(folder).as_posix()


def _difference(name: str, *folders: Path) -> str | None:
    first, second = (folder / name for folder in folders)
    if not first.is_file():
        return "only the second run has written it"
    if not second.is_file():
        return "only the first run has written it"
    at = _first_differing_byte(first, second)
    if at is None:
        return None
    if first.suffix in SUFFIXES:
        return describe_difference(first, second, [str(folder) for folder in folders])
    return None if _is_same_text(name, *folders) else f"differs from byte {at} on"


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
