"""Working directories for the runs of a drill that compares output files.

Each run has its own. It contains symbolic links to everything in the current directory, so that the script finds its
data and modules. Folders and files that match ``--compare`` are not linked, so that a run does not see the files of the
other run or of an earlier job.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import TypeAlias

from keepstep.errors import ConfigurationError

Parts: TypeAlias = tuple[str, ...]
"""A pattern, split at its slashes."""


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of ``--compare``.

    Raises:
        ConfigurationError: a pattern leads out of the working directory, or matches all of it.
    """
    for pattern in patterns:
        parts = PurePath(pattern).parts
        if not parts or PurePath(pattern).is_absolute() or ".." in parts:
            raise ConfigurationError(
                f"--compare {pattern!r}: must name files below the working directory, such as 'out/*.pt': each run has "
                "a working directory of its own"
            )
        if parts[0] == "**":
            raise ConfigurationError(f"--compare {pattern!r}: begin it with the folder that the script writes to")
    return tuple(patterns)


def make_working_dir(path: Path, patterns: Sequence[str], source: Path) -> None:
    """Creates the working directory of one run.

    Args:
        path: the directory to create.
        patterns: patterns of the compared files. Matching files and folders are not linked.
        source: the directory whose entries are linked.
    """
    path.mkdir()
    _link(source.absolute(), path, [PurePath(pattern).parts for pattern in patterns])


def _link(source: Path, target: Path, patterns: Sequence[Parts]) -> None:
    for entry in source.iterdir():
        named = [parts for parts in patterns if fnmatchcase(entry.name, parts[0])]
        if not named:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            (target / entry.name).mkdir()
            if all(len(parts) > 2 and parts[1] != "**" for parts in named):  # the patterns match only in its subfolders
                _link(entry, target / entry.name, [parts[1:] for parts in named])
