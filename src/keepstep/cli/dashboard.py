"""``keepstep dashboard``."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from keepstep import eventloop
from keepstep.cli.arguments import add_run
from keepstep.dashboard.process import DEFAULT, serving
from keepstep.launcher.signals import stop_signal
from keepstep.trace.record.runfolder import newest_run


def main(arguments: list[str]) -> int:
    """Serves the page of a running or ended run until a signal ends it."""
    parser = argparse.ArgumentParser(
        prog="keepstep dashboard", description="Shows a run in the browser, while it runs or afterwards."
    )
    add_run(parser)
    parser.add_argument("--listen", default=DEFAULT, metavar="HOST:PORT", help="where (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    newest_run(chosen.run)
    with _shown(chosen.run, chosen.listen, "--listen"):
        eventloop.run(_until_told_to_end())
    return 0


async def _until_told_to_end() -> None:
    with stop_signal() as told:
        await told


def showing(folder: Path, address: str | None) -> AbstractContextManager[None]:
    """Serves the page of a job while the block runs, if ``--dashboard`` is given.

    Args:
        folder: the folder of the run, or that of both runs of a drill.
        address: the flag's value: None without the flag, empty if the flag has no address.
    """
    if address is None:
        return contextlib.nullcontext()
    return _shown(folder, address or DEFAULT, "--dashboard")


@contextlib.contextmanager
def _shown(folder: Path, address: str, flag: str) -> Iterator[None]:
    with serving(folder, address, flag) as link:
        print(f"keepstep: dashboard: {link}", file=sys.stderr, flush=True)
        yield
