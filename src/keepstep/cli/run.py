"""``keepstep run``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from keepstep.agent.spawner import SpawnerProcess
from keepstep.cli.dashboard import showing
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.flags import RAY, add_compare_flag
from keepstep.launcher.console import follow
from keepstep.launcher.flags import is_one_of_several, job_options, make_parser, parse_flags
from keepstep.launcher.job import Companion, Job, announce, clear_up, run_job


def run(arguments: list[str], spawner: SpawnerProcess | None) -> int:
    """Runs a job and returns its exit code.

    Args:
        arguments: the arguments after ``keepstep run``.
        spawner: see `run_job`.
    """
    parser = make_parser("keepstep run")
    own = parser.add_argument_group("keepstep run")
    add_compare_flag(own)
    own.add_argument(
        "--otel", action="store_true", help="send each recovery as a trace to the endpoint of the OTEL_* variables"
    )
    chosen = parse_flags(parser, arguments)
    is_on_ray = chosen.engine == RAY
    if is_on_ray and chosen.weights is not None:
        raise ConfigurationError(
            "--weights: not supported with --engine ray; start 'keepstep weights serve' on each node"
        )
    if is_on_ray or is_one_of_several(chosen):
        if chosen.otel:
            raise ConfigurationError("--otel: not supported on several nodes yet; leave it out")
        if is_on_ray:
            from keepstep.cli.cluster.ray import run_on_ray  # here, because other jobs do not need Ray

            return run_on_ray(chosen, parser, arguments)
        from keepstep.cli.cluster.agent import run_one_of_several  # here, because a job on one node does not need gRPC

        return run_one_of_several(chosen)
    if chosen.weights is not None:
        raise ConfigurationError("--weights: for several nodes; on one, start 'keepstep weights serve' beside the job")
    exporting = _otel() if chosen.otel else None
    options = job_options(chosen)
    with contextlib.ExitStack() as stack:
        stack.callback(clear_up, options)  # after the dashboard has read the run's end in the folder
        stack.enter_context(showing(options.agent.run_dir, chosen.dashboard))
        companions: list[Companion] = [lambda job: follow(job.controller.job)]
        if exporting is not None:
            companions.append(stack.enter_context(exporting(options.agent.run_dir)))
        result = run_job(dataclasses.replace(options, keep_run_dir=True), together(companions), spawner)
    return announce(result, options)


def together(companions: Sequence[Companion]) -> Companion:
    """Combines several companions into one. An error in any of them ends the job."""

    async def accompany(job: Job) -> None:
        await asyncio.gather(*(companion(job) for companion in companions))

    return accompany


def _otel() -> Callable[[Path], AbstractContextManager[Companion]]:
    try:
        from keepstep.integrations.opentelemetry import exporting
    except ImportError as error:
        raise ConfigurationError(
            f"--otel: OpenTelemetry is not installed ({error}); install it with: pip install 'keepstep[otel]'"
        ) from error
    return exporting
