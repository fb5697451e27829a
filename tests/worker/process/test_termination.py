"""Signals to all processes of a job, in a worker: what it outlives and its children do not, what the script sees."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
import multiprocessing, os, signal, subprocess, sys, threading
from keepstep.worker.process import termination
number = signal.Signals[sys.argv[1]]
signal.signal(number, signal.SIG_DFL)  # `nohup` may have started the tests
termination.outlive_signals(number)
"""


def outcome(program: str, number: str = "SIGTERM") -> tuple[int, str]:
    """Runs a program in a process of its own; returns its exit status and what it printed."""
    source = PREAMBLE + textwrap.dedent(program)
    ended = subprocess.run(
        [sys.executable, "-c", source, number], capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_to_all_is_outlived_and_nothing_shows_it(number: str) -> None:
    said = "os.kill(os.getpid(), number); print(signal.getsignal(number) is signal.SIG_DFL)"
    assert outcome(said, number) == (0, "True\n")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loaders_workers_are_ended_by_it(method: str) -> None:
    code, said = outcome(
        f"""
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            ready = context.Event()
            program = "import signal; ready.set(); signal.pause()"
            child = context.Process(target=exec, args=(program, {{"ready": ready}}))
            child.start()
            ready.wait(30)
            os.kill(child.pid, number)
            child.join(30)
            print(child.exitcode)
        """
    )
    assert (code, said) == (0, f"{-signal.SIGTERM}\n")


def test_programs_are_ended_by_it() -> None:
    code, said = outcome("child = subprocess.Popen(['sleep', '60']); child.terminate(); print(child.wait(30))")
    assert (code, said) == (0, f"{-signal.SIGTERM}\n")


def test_a_handler_of_the_script_takes_its_place() -> None:
    code, said = outcome(
        """
        print(signal.signal(number, lambda *_: print("handled")) is signal.SIG_DFL)
        termination.outlive_signals()
        os.kill(os.getpid(), number)
        print(termination.restore_default())
        """
    )
    assert (code, said) == (0, "True\nhandled\nFalse\n")


def test_what_is_ignored_stays_ignored() -> None:
    code, said = outcome(
        """
        termination.restore_default()
        signal.signal(number, signal.SIG_IGN)
        termination.outlive_signals()
        os.kill(os.getpid(), number)
        print(termination.restore_default())
        """
    )
    assert (code, said) == (0, "False\n")


def test_once_the_default_is_restored_it_ends_the_process() -> None:
    code, said = outcome("print(termination.restore_default(), flush=True); os.kill(os.getpid(), number)")
    assert (code, said) == (-signal.SIGTERM, "True\n")


def test_an_error_of_a_loaders_worker_is_raised_where_the_script_waits_for_the_loader_only() -> None:
    """torch's handler of SIGCHLD raises it wherever the main thread is."""
    code, said = outcome(
        """
        import torch
        from torch.utils.data import DataLoader

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                if index == 1:
                    signal.pause()
                return torch.ones(1)

        batches = iter(DataLoader(Data(), num_workers=2))
        next(batches)
        termination.hold_back_child_errors()
        for child in multiprocessing.active_children():
            subprocess.run(["kill", str(child.pid)], check=True)  # a worker ends well if its parent ends it
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        print(len(termination.held_back), termination.has_lost_child(termination.held_back[0]))
        try:
            next(batches)
        except RuntimeError as error:
            print(termination.has_lost_child(error), "exited unexpectedly" in str(error))
        """
    )
    assert (code, said) == (0, "1 True\nTrue True\n"), said


def test_a_broken_connection_is_that_of_a_child_that_is_about_to_end() -> None:
    """The kernel closes what a process had open, and only then its parent hears of the end."""
    code, said = outcome(
        """
        gone, go_on = multiprocessing.Pipe(), multiprocessing.Pipe()

        def end():
            go_on[1].close()
            gone[0].close(), gone[1].close()
            go_on[0].poll(60.0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

        child = multiprocessing.get_context("fork").Process(target=end)
        child.start()
        gone[1].close(), go_on[0].close()
        try:
            gone[0].recv()
        except EOFError as error:
            threading.Timer(0.2, go_on[1].close).start()
            print(termination.has_lost_child(error), termination.has_lost_child(ValueError()))
        """
    )
    assert (code, said) == (0, "True True\n"), said
