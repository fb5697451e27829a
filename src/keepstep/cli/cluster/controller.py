"""``keepstep controller``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from keepstep.errors import ConfigurationError, LeaseLost
from keepstep.launcher.cluster.flags import (
    MAX_NODES_ALONE,
    MAX_RELAYS,
    NODES_PER_RELAY,
    add_compare_flag,
    add_controller_flags,
    add_recovery_flags,
    endpoint_of,
    num_relays_for,
    shape_of,
)
from keepstep.launcher.cluster.hosting import EXIT_SUPERSEDED
from keepstep.launcher.cluster.service import ControllerOptions, run_controller
from keepstep.launcher.cluster.trust import HOW_TO_SHARE, secret_of, server_files_of
from keepstep.launcher.console import tell_end, tell_folder
from keepstep.launcher.recording import add_output_flags, make_folder, outputs_of
from keepstep.programs import END_AT_ONCE, end_with_parent, leave_signals_to_parent
from keepstep.protocol.lease import HOLD_S

MIN_TAKEOVER_S, MAX_TAKEOVER_S = 1.0, 3600.0
"""The minimum is 1 s, because a process on a busy machine may stall for half a second."""


def main(arguments: list[str]) -> int:
    """Serves the agents of a job until it has ended, and returns the job's exit code."""
    chosen = _parser().parse_args(arguments)
    if chosen.parent is not None:
        end_with_parent(chosen.parent, END_AT_ONCE)
        leave_signals_to_parent()
    secret = secret_of(chosen)
    if secret is None:
        raise ConfigurationError(f"a controller needs the job's secret: {HOW_TO_SHARE}")
    if not chosen.lease > 0:
        raise ConfigurationError(f"--lease {chosen.lease}: must be positive")
    if not MIN_TAKEOVER_S <= chosen.takeover_after <= MAX_TAKEOVER_S:
        raise ConfigurationError(
            f"--takeover-after {chosen.takeover_after}: allowed are {MIN_TAKEOVER_S:g} to {MAX_TAKEOVER_S:g} s"
        )
    shape = shape_of(chosen.nnodes, chosen.nproc_per_node, chosen.spares)
    if chosen.relays is not None and not 0 <= chosen.relays <= MAX_RELAYS:
        raise ConfigurationError(f"--relays {chosen.relays}: allowed are 0 to {MAX_RELAYS}")
    options = ControllerOptions(
        recovery=shape.recovery(chosen),
        run_dir=make_folder("--run-dir", Path(chosen.run_dir), 0o700),
        listen=endpoint_of("--listen", chosen.listen),
        secret=secret,
        tls=server_files_of(chosen.tls, secret),
        lease_s=chosen.lease,
        outputs=outputs_of(chosen),
        is_continuing=chosen.is_continuing,
        drained_by=chosen.drain,
        drain_on=tuple(chosen.drain_on),
        is_child=chosen.parent is not None,
        is_standby=chosen.standby,
        takeover_s=chosen.takeover_after,
        num_relays=num_relays_for(shape.max_nodes) if chosen.relays is None else chosen.relays,
        is_durable=chosen.parent is None,  # a child is only restarted on its own machine
    )
    try:
        result = run_controller(options)
    except LeaseLost as error:
        print(f"keepstep controller: {error}", file=sys.stderr, flush=True)
        return EXIT_SUPERSEDED
    if not options.is_child:  # else its parent knows whether the folder stays
        tell_folder(options.run_dir)
    tell_end(result)
    return int(result["exit_code"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keepstep controller", description="Runs the controller of a job whose agents run elsewhere."
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where agents connect; one interface")
    parser.add_argument("--nnodes", required=True, help="nodes that hold ranks, or MIN:MAX; more than MIN hold spares")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, required=True, help="ranks on each node")
    parser.add_argument("--spares", type=int, default=1, help="warm workers that hold no rank yet (default: 1)")
    parser.add_argument("--max-restarts", "--max_restarts", type=int, help="as for keepstep run")
    parser.add_argument("--run-dir", required=True, help="folder for the journal and the status socket")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--continue", dest="is_continuing", action="store_true",
        help="continue the unfinished run in the folder, whose controller has died",
    )  # fmt: skip
    how.add_argument(
        "--standby", action="store_true",
        help="wait until the controller of the run in the folder has failed, then take over",
    )  # fmt: skip
    parser.add_argument(
        "--takeover-after", type=float, default=HOLD_S, metavar="SECONDS",
        help="another controller takes over if this one does not renew its lease for this long (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--relays", type=int, metavar="N",
        help="processes that share the connections to agents; 0: the controller holds them (default: one for "
        f"{NODES_PER_RELAY} nodes where there are more than {MAX_NODES_ALONE})",
    )  # fmt: skip
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--drain", type=int, help=argparse.SUPPRESS)
    add_recovery_flags(parser)
    add_compare_flag(parser)
    add_controller_flags(parser)
    add_output_flags(parser)
    return parser
