"""A working directory of its own for each run of a drill whose output files are compared.

Everything in the current directory is there as a symbolic link, so that the script finds its data and its modules; but
folders and files that ``--compare`` names are not, so that neither run sees what the other one, or an earlier job, has
written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import TypeAlias

from keepstep.errors import ConfigurationError

Parts: TypeAlias = tuple[str, ...]
"""A pattern, taken apart at its slashes."""


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of ``--compare``.

    Raises:
        ConfigurationError: one of them leads out of the working directory, or takes in all of it.
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
    """Makes the working directory of one run.

    Args:
        path: what is made.
        patterns: what the run's files are found by later on; what they name begins empty.
        source: what is linked to, the caller's working directory.
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
            if all(len(parts) > 2 and parts[1] != "**" for parts in named):  # only folders in it are named
                _link(entry, target / entry.name, [parts[1:] for parts in named])
