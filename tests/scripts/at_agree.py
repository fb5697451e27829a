"""Runs a script whose rank 0 is killed once, at its first `session.agree()`: before the request, in it, or after it.

Usage: keepstep run --nproc-per-node 2 --spares 1 tests/scripts/at_agree.py {before,in,after} FILE SCRIPT [ARGUMENT ...]

FILE is created by the process that is killed.
"""

import os
import runpy
import signal
import sys

from keepstep.protocol.messages import OnceRequested
from keepstep.worker.link import Link
from keepstep.worker.session import Session

place, mark, script = sys.argv[1:4]
agree, send = Session.agree, Link.send


def die() -> None:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def agree_and_die(session, *arguments):
    if session.is_waiting_spare or session.rank != 0:
        return agree(session, *arguments)
    if place == "before":
        die()
    if place == "in":
        Link.send = send_and_die
    value = agree(session, *arguments)
    die()
    return value


def send_and_die(link, message):
    send(link, message)
    if isinstance(message, OnceRequested):
        die()


Session.agree = agree_and_die
sys.argv = sys.argv[3:]
runpy.run_path(script, run_name="__main__")
