"""``keepstep run``."""

from __future__ import annotations

from keepstep.launcher.console import follow
from keepstep.launcher.flags import job_options, make_parser
from keepstep.launcher.job import announce, run_job


def main(arguments: list[str]) -> int:
    """Runs a job and returns its exit code."""
    options = job_options(make_parser("keepstep run").parse_args(arguments))
    return announce(run_job(options, follow), options)
