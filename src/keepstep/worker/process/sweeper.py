"""The process that kills the workers' own children when no agent is left to do it.

The kernel kills a worker when its spawner dies, and the spawner when the agent dies. It does not kill the worker's
children, such as its data loader's processes. A worker leads a process group that contains its children. The sweeper
knows these groups, and outlives all other processes for a moment.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import time

from keepstep.programs import begin

EXIT_DEADLINE_S = 5.0
"""How long to wait for the spawner's exit after it has closed its files. It has nothing else left to do."""
LOOK_S = 0.01
"""How often to look for that exit, if the kernel does not report it."""
_NUMBER = "i"
"""A PID as a C int. A pipe transfers a few bytes in one piece (`man 7 pipe`)."""


class Sweeper:
    """The spawner's end of the pipe to the sweeper. When all copies of it are closed, the sweeper kills the groups."""

    def __init__(self) -> None:
        """Starts the sweeper by forking this process."""
        spawner = os.getpid()
        read, self.descriptor = os.pipe()
        if os.fork():
            os.close(read)
            return
        try:
            os.setsid()
            os.dup2(read, 0)
            _close_all_above(0)  # among them this process's own copy of the other end
            begin()
            _sweep(0, spawner)
        finally:
            os._exit(0)

    def group_began(self, group: int) -> None:
        """Reports a new group. The worker that leads it calls this before it runs anything."""
        self._tell(group)

    def group_ended(self, group: int) -> None:
        """Reports that a group has been killed. The spawner calls this, since the PID may soon be reused."""
        self._tell(-group)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the sweeper was killed
            os.write(self.descriptor, array.array(_NUMBER, [number]).tobytes())


def kill_group(leader: int) -> None:
    """Kills every process of a group, if any is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _close_all_above(highest: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > highest:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(name))


def _sweep(line: int, spawner: int) -> None:
    groups: set[int] = set()
    while data := os.read(line, 4096):
        for number in array.array(_NUMBER, data):
            if number > 0:
                groups.add(number)
            else:
                groups.discard(-number)
    _await_exit(spawner)
    for group in groups:
        kill_group(group)


def _await_exit(spawner: int) -> None:
    """Waits until the spawner has closed all of its files.

    The kernel closes them one after the other, and the pipe is not the last one. If the sweeper killed the workers in
    between, their agent would see them die while the spawner seems to live, and report them as the cause.
    """
    try:
        process = os.pidfd_open(spawner)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel lacks the call, or a container's profile forbids it
        until_s = time.monotonic() + EXIT_DEADLINE_S
        while os.getppid() == spawner and time.monotonic() < until_s:
            select.select([], [], [], LOOK_S)
        return
    if os.getppid() == spawner:  # otherwise the PID may belong to another process by now
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll(EXIT_DEADLINE_S * 1000)
