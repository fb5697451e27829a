"""Entry of a worker: runs the user's script as ``__main__`` and reports the error that ends it, if any."""

from __future__ import annotations

import builtins
import ctypes
import gc
import io
import os
import runpy
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import FunctionType, GeneratorType, ModuleType, TracebackType
from typing import Any

import torch

from keepstep.config import has_no_rank, has_safe_path, rank_environment, spare_to_park, worker_config
from keepstep.errors import CallRefused, ConfigurationError, LimitReached, StepInterrupted, UsageError
from keepstep.programs import begin, first_on_path, flush, is_container
from keepstep.protocol.messages import WorkerFailed, text
from keepstep.systemcalls import own_refusal
from keepstep.worker.link import Link
from keepstep.worker.parking import park
from keepstep.worker.process.excepthook import is_usual
from keepstep.worker.session import current_session

EXIT_EXCEPTION = 1
_LIVES_ON = (torch.nn.Module, torch.optim.Optimizer)
_STAYS = (ModuleType, FunctionType, type, GeneratorType, *_LIVES_ON)
_KEPT_PACKAGES = ("torch", "keepstep")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
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
    run = _as_python(command, module)
    if (spare := spare_to_park()) is not None:
        park(spare)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on a terminal: a line is written before its rank is killed, and as a whole among those of other ranks.
        # PYTHONUNBUFFERED would write each argument of a print() separately.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        run()
    except SystemExit as ending:
        _left_behind.append(ending)
        return _exit_code(ending.code)
    except StepInterrupted as interruption:
        failure: BaseException = UsageError(
            "a step was interrupted by a failure, and the interruption left the script instead of ending at its "
            "'with step:'. The code that computes a step must run inside 'with step:'; a framework that runs the loop "
            "by itself (a Trainer) is not supported yet"
        )
        failure.__cause__ = interruption
        interruption.__traceback__ = _of_the_script(interruption.__traceback__)
        failure.__traceback__ = interruption.__traceback__
    except BaseException as error:  # any error that ends the script is reported, then the process ends
        if (session := current_session()) is not None and session.drains_after(error):
            _left_behind.append(error)
            return 0
        failure = error.with_traceback(_of_the_script(error.__traceback__))
    else:
        return 0
    _fail(failure)
    return EXIT_EXCEPTION


def free_what_the_script_holds() -> None:
    """Frees the objects in the script's own modules, as Python does at its end: some complete a file only then.

    These are an archive of `zipfile`, a shelf, a file of h5py, a writer of Parquet. The models and optimizers, and with
    them torch's process groups, live on: see `_left_behind`. Threads that still run find None in place of what they
    use, and end in silence; Python stops them before.
    """
    threading.excepthook = lambda _arguments: None
    _left_behind.extend(each for each in gc.get_objects() if issubclass(type(each), _LIVES_ON))
    for held in _modules_of_the_script():
        for name, value in list(held.items()):
            if not (issubclass(type(value), _STAYS) or type(value).__module__.partition(".")[0] in _KEPT_PACKAGES):
                held[name] = None
    gc.collect()


def _modules_of_the_script() -> list[dict[str, Any]]:
    """The contents of the main module, and of those that lie in its folder and are not installed."""
    main = vars(sys.modules["__main__"])
    folder = os.path.join(os.path.dirname(os.path.abspath(main.get("__file__") or "")), "")
    found = [main]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_near = isinstance(file, str) and file.startswith(folder) and not file.startswith(_INSTALLED)
        if is_near and name.partition(".")[0] not in ("__main__", *_KEPT_PACKAGES):
            found.append(vars(module))
    return found


def _as_python(command: tuple[str, ...], module: bool) -> Callable[[], None]:
    """Makes this process the one that ``python script.py`` or ``python -m module`` would be, and returns what runs it.

    CPython does the same in C (Modules/main.c). The script is the main module from now on, also after its last line,
    when its threads and exit handlers still run.
    """
    name, *arguments = command
    if sys.flags.safe_path and not has_safe_path():
        _unset_safe_path()
    if (first := first_on_path(None if module else name, os.getcwd())) is not None:
        sys.path.insert(0, first)
    sys.argv = ["-m" if module else name, *arguments]
    sys.orig_argv = [sys.executable, *(["-m"] if module else []), *command]
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    _left_behind.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    if module:
        return lambda: runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` itself calls
    if is_container(file := os.path.join(os.getcwd(), name)):
        return lambda: runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # as Python calls it
    return lambda: _run_file(file, main)


def _unset_safe_path() -> None:
    """Clears the flag ``-P``, which is this program's and not the script's: `multiprocessing` passes its flags on."""
    set_item = ctypes.pythonapi.PyStructSequence_SetItem
    set_item.argtypes, set_item.restype = [ctypes.py_object, ctypes.c_ssize_t, ctypes.py_object], None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(False))  # the item owns a reference
    set_item(sys.flags, type(sys.flags).__match_args__.index("safe_path"), False)


def _run_file(file: str, main: ModuleType) -> None:
    """Runs a file as Python's main program. ``file`` is absolute."""
    if file.endswith(".pyc"):
        loader: SourceFileLoader | SourcelessFileLoader = SourcelessFileLoader("__main__", file)
        code = loader.get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", file)
        with io.open_code(file) as source:
            code = compile(source.read(), file, "exec", dont_inherit=True)
    main.__file__, main.__loader__ = file, loader
    main.__dict__["__cached__"] = None
    assert code is not None
    exec(code, main.__dict__)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the calls of this module in front, as Python prints it."""
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return trace


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return EXIT_EXCEPTION


def _fail(error: BaseException) -> None:
    """Prints the error that has ended the script, as Python does, and only then reports it.

    The report may end the job, and the agent then kills this process.
    """
    _left_behind.append(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    refused = own_refusal(error)
    try:
        if refused is not None and is_usual(sys.excepthook):
            print(f"keepstep: {refused}", file=sys.stderr)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as failure:  # as Python prints it where a script's own hook fails
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(failure.with_traceback(_of_the_script(failure.__traceback__)))
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)
    _explain(error)
    flush()
    _report(refused or error)


def _report(error: BaseException) -> None:
    session = current_session()
    if session is not None:
        link = session._coordination.link
    elif isinstance(error, CallRefused | LimitReached) and (settings := worker_config()) is not None:
        link = Link(socket.socket(fileno=settings.link_fd), settings.worker)  # init() has failed
    else:
        return
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
    begin()
    module = sys.argv[1] == "-m"
    command = tuple(sys.argv[2:] if module else sys.argv[1:])
    sys.exit(run_script(command, module))


if __name__ == "__main__":
    main()
