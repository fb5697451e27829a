"""Entry of a worker: runs the user's script as ``__main__`` and reports the error that ends it, if any."""

from __future__ import annotations

import io
import runpy
import sys
import traceback

from keepstep.config import has_no_rank, rank_environment, spare_to_park
from keepstep.errors import ConfigurationError, StepInterrupted, UsageError
from keepstep.protocol.messages import WorkerFailed, text
from keepstep.worker.parking import park
from keepstep.worker.session import current_session

EXIT_EXCEPTION = 1
_left_behind: list[object] = []
"""Objects that the script left behind, kept until the process ends. Plain Python frees them when no other thread can
hold the GIL any more. A DDP that is freed earlier may hang: its process group waits, with the GIL held, for a thread
that waits for the GIL (torch 2.13)."""


def run_script(command: tuple[str, ...], module: bool) -> int:
    """Runs a script or module with its arguments and returns the exit code of the process.

    Args:
        command: the script's path or the module's name, then its arguments.
        module: whether to run a module, as for ``python -m``.
    """
    if (spare := spare_to_park()) is not None:
        park(spare)
    sys.argv = list(command)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on a terminal: a line is written before its rank is killed, and as a whole among those of other ranks.
        # PYTHONUNBUFFERED would write each argument of a print() separately.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        if module:
            sys.path.insert(0, "")
            _left_behind.append(runpy.run_module(command[0], run_name="__main__", alter_sys=True))
        else:
            sys.path.insert(0, command[0].rpartition("/")[0] or ".")
            _left_behind.append(runpy.run_path(command[0], run_name="__main__"))
    except SystemExit as ending:
        _left_behind.append(ending)
        return _exit_code(ending.code)
    except StepInterrupted as interruption:
        _left_behind.append(interruption)
        error = UsageError(
            "a step was interrupted by a failure, and the interruption left the script instead of ending at its "
            "'with step:'. The code that computes a step must run inside 'with step:'; a framework that runs the loop "
            "by itself (a Trainer) is not supported yet"
        )
        error.__cause__ = interruption
        _report(error)
        sys.excepthook(type(error), error, interruption.__traceback__)
        return EXIT_EXCEPTION
    except BaseException as error:  # any error that ends the script is reported, then the process ends
        _left_behind.append(error)
        _report(error)
        _explain(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_EXCEPTION
    return 0


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return EXIT_EXCEPTION


def _report(error: BaseException) -> None:
    session = current_session()
    if session is None:
        return
    link = session._coordination.link
    fatal = isinstance(error, (ConfigurationError, UsageError))
    trace = "".join(traceback.format_exception(error))[-16000:]
    link.send(WorkerFailed(link.worker, text(f"{type(error).__name__}: {error}"), text(trace, 16000), fatal))


def _explain(error: BaseException) -> None:
    """Prints a hint if the script has read the rank from the environment of a spare, which has no rank yet."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if name in rank_environment(0, 0, 1) and has_no_rank():
        print(
            f"keepstep: this is a spare, which has no {name} yet: ask session.rank or session.local_rank "
            "inside the loop, or start the job with --park-spares",
            file=sys.stderr,
        )


def main() -> None:
    """Entry of a worker started as a fresh interpreter: ``python -m keepstep.worker.process.bootstrap [-m] ...``."""
    module = sys.argv[1] == "-m"
    command = tuple(sys.argv[2:] if module else sys.argv[1:])
    code = run_script(command, module)
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
