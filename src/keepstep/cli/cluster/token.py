"""``keepstep token``."""

from __future__ import annotations

import argparse

from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.flags import HOW_TO_SHARE, add_secret_flag, secret_of
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret


def main(arguments: list[str]) -> int:
    """Prints a new secret, or credentials made with one."""
    parser = argparse.ArgumentParser(
        prog="keepstep token", description="Makes what the nodes of a job need to trust one another."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--new", action="store_true", help="a secret for a job; whoever has it can speak for any node")
    what.add_argument("--node", metavar="NAME", help="credentials for one agent, good for this node's name only")
    add_secret_flag(parser)
    chosen = parser.parse_args(arguments)
    if chosen.new:
        print(Secret.new().text())
        return 0
    secret = secret_of(chosen)
    if secret is None:
        raise ConfigurationError(f"credentials are made with the job's secret: {HOW_TO_SHARE}")
    print(Credentials.of(secret, Claim(Role.AGENT, chosen.node)).text())
    return 0
