"""``keepstep token``."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.flags import add_secret_flag
from keepstep.launcher.cluster.trust import HOW_TO_SHARE, secret_of
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, write_private


def main(arguments: list[str]) -> int:
    """Creates a secret, or the credentials of a node, and prints them or writes them to a file."""
    parser = argparse.ArgumentParser(prog="keepstep token", description="Creates the credentials of a job's nodes.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--new", action="store_true", help="a secret for a job; its holder can act as any node")
    what.add_argument("--node", metavar="NAME", help="credentials for one agent, valid for this node's name only")
    what.add_argument("--receiver", metavar="NAME", help="a token for one node that receives published weights")
    parser.add_argument("--out", metavar="FILE", help="write it to a new file that only its owner can read")
    add_secret_flag(parser)
    chosen = parser.parse_args(arguments)
    text = Secret.new().text() if chosen.new else _credentials(chosen)
    if chosen.out is None:
        print(text)
        return 0
    try:
        write_private(Path(chosen.out), text)
    except OSError as error:
        raise ConfigurationError(f"--out {chosen.out}: {error.strerror}") from error
    return 0


def _credentials(chosen: argparse.Namespace) -> str:
    secret = secret_of(chosen)
    if secret is None:
        raise ConfigurationError(f"credentials are made with the job's secret: {HOW_TO_SHARE}")
    claim = Claim(Role.AGENT, chosen.node) if chosen.receiver is None else Claim(Role.RECEIVER, chosen.receiver)
    return Credentials.of(secret, claim).text()
