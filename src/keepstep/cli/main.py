"""Entry of the command: finds the subcommand and turns errors into one message and an exit code."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the working directory there: see `keepstep.programs.own_command`

import argparse
import importlib

import keepstep
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.programs import begin
from keepstep.systemcalls import needed, tell_of_threads

EXIT_USAGE = 2
COMMANDS = {
    "run": ("ahead:main", "run a training script; takes torchrun's flags"),
    "controller": ("cluster.controller:main", "run the controller of a job on several nodes"),
    "agent": ("cluster.agent:main", "run the agent of one node of a job whose controller runs elsewhere"),
    "token": ("cluster.token:main", "create the secret of a job on several nodes, or one node's credentials"),
    "weights": ("cluster.weights:main", "send published weights to consumers on other nodes"),
    "drill": ("drill:main", "run a job without and with failures, and compare the weights"),
    "dashboard": ("dashboard:main", "show a run in the browser, while it runs or afterwards"),
    "top": ("top:main", "show a run in the terminal, while it runs"),
    "status": ("status:main", "show the workers of a running job"),
    "trace": ("views:trace", "export a run to Perfetto"),
    "report": ("views:report", "write a page about a run: what happened, and what it cost"),
    "simulate": ("simulate:main", "run whole jobs in virtual time, with faults, and check the results"),
}
"""Name -> its function and its help text. Only the chosen command is imported, so `status` does not wait for torch."""


def main(arguments: list[str] | None = None) -> int:
    """Runs ``keepstep`` and returns its exit code."""
    begin()
    tell_of_threads()
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="keepstep", description="Lose a device, keep the step.")
    parser.add_argument("--version", action="version", version=f"keepstep {keepstep.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    chosen, rest = parser.parse_known_args(arguments[:1]), arguments[1:]
    try:
        with needed():
            return _run(chosen[0].command, rest)
    except ConfigurationError as error:
        print(f"keepstep {chosen[0].command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeepstepError as error:
        print(f"keepstep {chosen[0].command}: {error}", file=sys.stderr)
        return 1


def _run(command: str, arguments: list[str]) -> int:
    module, _, function = COMMANDS[command][0].partition(":")
    return int(getattr(importlib.import_module(f"keepstep.cli.{module}"), function)(arguments))


if __name__ == "__main__":
    sys.exit(main())
