"""The beginning of ``keepstep run``: starts the spawner before anything else.

The spawner imports torch, and so does the launcher for torchrun's parser. In parallel they take half the time. The
flags are guessed. A wrong guess costs only time: the job then ends that spawner and starts one with the right flags.
"""

from __future__ import annotations

import gc

from keepstep.agent.spawner import SpawnerProcess, SpawnerSettings
from keepstep.config import inherited_environment

NUM_RANKS = ("--nproc-per-node", "--nproc_per_node")
NEEDS_ANOTHER = ("-h", "--help", "--nnodes", "--engine", "--start-method", "--start_method", "--preload", "--no-python")
"""Flags that need no spawner, another program's spawner, or other settings of it than the guessed ones."""


def main(arguments: list[str]) -> int:
    """Runs a job and returns its exit code."""
    settings = guessed(arguments)
    spawner = None if settings is None else SpawnerProcess(settings)
    try:
        gc.disable()  # imports make no garbage, and the collector takes a quarter of their time
        from keepstep.cli.run import run  # here, because it imports torch

        gc.enable()
        return run(arguments, spawner)
    finally:
        if spawner is not None:
            spawner.kill()


def guessed(arguments: list[str]) -> SpawnerSettings | None:
    """Returns the spawner settings that a command line most likely needs; None if no spawner is to be started ahead.

    Args:
        arguments: the arguments after ``keepstep run``: flags, then the script and its arguments.
    """
    names = [argument.partition("=")[0] for argument in arguments]
    if any(name in NEEDS_ANOTHER for name in names):
        return None
    at = next((number for number, name in enumerate(names) if name in NUM_RANKS), None)
    said = "" if at is None else (arguments[at].partition("=")[2] or "".join(arguments[at + 1 : at + 2]))
    return SpawnerSettings(fork=True, environment=inherited_environment(is_alone=said in ("", "1")))
