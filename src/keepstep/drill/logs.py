"""The end of a run's logs, for a run that did not reach its end and whose output is not on the console."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from keepstep.agent.outputs import STREAMS
from keepstep.protocol.messages import printable

LAST_LINES = 20
_LAST_BYTES = 64 << 10


def end_of_logs(folder: Path, lost: Collection[int], *, names_file: bool) -> list[str]:
    """Returns a heading and the last lines that a worker wrote: on standard error, if one of them wrote there.

    Args:
        folder: the folder of the workers' logs; need not exist.
        lost: the workers that were lost. Of these the last one to write is chosen, else of all.
        names_file: whether the heading names the file.
    """
    for stream in reversed(STREAMS):
        written = [path for path in folder.glob(f"worker_*/{stream}.log") if path.stat().st_size]
        of_lost = [path for path in written if int(path.parent.name.removeprefix("worker_")) in lost]
        if written:
            last = max(of_lost or written, key=lambda path: path.stat().st_mtime_ns)
            return [f"the last lines of {last if names_file else f'its {stream}'}:", *_last_lines(last)]
    return []


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").rstrip().split("\n")[-LAST_LINES:]
    return [f"  {printable(line.rstrip().rpartition(chr(13))[2])}" for line in lines]  # a bar: what is seen of it
