"""Entry of the command: finds the subcommand and turns errors into one message and an exit code."""

from __future__ import annotations

import argparse
import sys

import keepstep
from keepstep.errors import ConfigurationError, KeepstepError

EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Runs ``keepstep`` and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="keepstep", description="Lose a device, keep the step.")
    parser.add_argument("--version", action="version", version=f"keepstep {keepstep.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in (
        ("run", "run a training script; takes torchrun's flags"),
        ("drill", "run it without and with failures, and compare the weights"),
        ("dashboard", "show a run in the browser, while it goes on or afterwards"),
        ("top", "show a run in the terminal, while it goes on"),
        ("status", "show the workers of a running job"),
        ("trace", "draw a recovery of a run, or export the run to Perfetto"),
        ("report", "write a page about a run: what happened, and what it cost"),
        ("simulate", "run whole jobs in virtual time, with faults, and check what came of it"),
    ):
        commands.add_parser(name, help=text, add_help=False)
    chosen, rest = parser.parse_known_args(arguments[:1]), arguments[1:]
    try:
        return _run(chosen[0].command, rest)
    except ConfigurationError as error:
        print(f"keepstep {chosen[0].command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeepstepError as error:
        print(f"keepstep {chosen[0].command}: {error}", file=sys.stderr)
        return 1


def _run(command: str, arguments: list[str]) -> int:
    # A subcommand is imported when it is chosen: `status` need not wait for torch.
    match command:
        case "run":
            from keepstep.cli import run

            return run.main(arguments)
        case "drill":
            from keepstep.cli import drill

            return drill.main(arguments)
        case "dashboard":
            from keepstep.cli import dashboard

            return dashboard.main(arguments)
        case "top":
            from keepstep.cli import top

            return top.main(arguments)
        case "trace":
            from keepstep.cli import pictures

            return pictures.trace(arguments)
        case "report":
            from keepstep.cli import pictures

            return pictures.report(arguments)
        case "simulate":
            from keepstep.cli import simulate

            return simulate.main(arguments)
        case _:
            from keepstep.cli import status

            return status.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
