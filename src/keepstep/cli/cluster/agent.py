"""``keepstep agent``, and ``keepstep run`` on several nodes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from keepstep.agent.settings import NodePlace
from keepstep.cli.dashboard import showing
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.flags import NO_ENGINE, Shape, endpoint_of, grace_of, owns, place_of, shape_of
from keepstep.launcher.cluster.hosting import HostedController
from keepstep.launcher.cluster.node import NodeOptions, run_node
from keepstep.launcher.cluster.trust import credentials_of, secret_of
from keepstep.launcher.cluster.weights import HostedWeights
from keepstep.launcher.console import tell_folder
from keepstep.launcher.flags import LOOPBACK, MASTER_PORT, agent_settings, make_parser, parse_flags, ranks_per_node
from keepstep.launcher.job import clear_up_folder
from keepstep.programs import END_AT_ONCE, end_with_parent, own_command
from keepstep.protocol.messages import printable
from keepstep.trust.tokens import Secret


def main(arguments: list[str]) -> int:
    """Serves one node of a job whose controller runs elsewhere, and returns the job's exit code."""
    parser = make_parser("keepstep agent")
    parser.add_argument(
        "--controller", required=True, metavar="HOST:PORT[,HOST:PORT]",
        help="endpoint of the controller, and of its standby",
    )  # fmt: skip
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    chosen = parse_flags(parser, arguments)
    if chosen.parent is not None:
        end_with_parent(chosen.parent, END_AT_ONCE)
    if chosen.engine != NO_ENGINE:
        raise ConfigurationError(f"--engine {chosen.engine}: the engine has started this agent, so leave it out")
    endpoints = tuple(endpoint_of("--controller", each) for each in chosen.controller.split(","))
    return serve_node(chosen, endpoints, may_host=False)


def run_one_of_several(arguments: argparse.Namespace) -> int:
    """Runs ``keepstep run`` on one of several nodes. Returns the job's exit code."""
    if arguments.rdzv_endpoint:
        endpoint = endpoint_of("--rdzv-endpoint", arguments.rdzv_endpoint)
    elif arguments.master_addr != LOOPBACK:  # torchrun's default, which no other node can reach
        endpoint = endpoint_of("--master-addr", f"{arguments.master_addr}:{arguments.master_port or MASTER_PORT}")
    else:
        raise ConfigurationError(f"--nnodes {arguments.nnodes}: set their rendezvous with --rdzv-endpoint HOST:PORT")
    return serve_node(arguments, (endpoint,), may_host=True)


def serve_node(arguments: argparse.Namespace, endpoints: tuple[str, ...], *, may_host: bool) -> int:
    """Serves this node until the job has ended, and hosts the controller if it must. Returns the job's exit code.

    Args:
        arguments: the parsed command line.
        endpoints: HOST:PORT of the controller and its standbys. The route to the first one decides this node's address.
        may_host: whether this node hosts the controller if the first endpoint is its own.
    """
    endpoint = endpoints[0]
    shape = shape_of(arguments.nnodes, ranks_per_node(arguments), arguments.spares)
    place = place_of(arguments, shape, endpoint)
    credentials, host_name = credentials_of(arguments, place.node)
    settings = agent_settings(arguments, place)
    weights = None if arguments.weights is None else hosted_weights(arguments, place, endpoints)
    options = NodeOptions(
        settings, endpoints, credentials, host_name, arguments.controller_timeout, grace_of(arguments), weights
    )
    hosted = None
    if may_host and place.position == 0 and owns(endpoint):
        secret = secret_of(arguments)
        if secret is None:
            raise ConfigurationError("the node that hosts the controller needs the job's secret, not only a token")
        hosted = hosted_controller(arguments, shape, endpoint, settings.run_dir, secret)
    with showing(settings.run_dir, arguments.dashboard if hosted is not None else None):
        ended = run_node(options, hosted)
    if arguments.run_dir is None:
        clear_up_folder(settings.run_dir)
    if hosted is not None:
        tell_folder(settings.run_dir)
    elif ended.exit_code != 0:
        print(f"keepstep: {printable(ended.reason)}", file=sys.stderr, flush=True)
    return ended.exit_code


def hosted_weights(arguments: argparse.Namespace, place: NodePlace, endpoints: tuple[str, ...]) -> HostedWeights:
    """Returns ``keepstep weights serve`` for this node's publishers, as a child process that is not started yet."""
    secret = secret_of(arguments)
    if secret is None:
        raise ConfigurationError("--weights needs the job's secret, not only a token: other nodes are known by it")
    host = f"[{place.address}]" if ":" in place.address else place.address
    command = own_command("keepstep.cli.main", "weights", "serve", arguments.weights)
    command += ["--parent", str(os.getpid()), "--node", place.node, "--listen", arguments.weights_listen or f"{host}:0"]
    command += ["--job", ",".join(endpoints), "--job-tls", arguments.tls, "--deadline", str(arguments.weights_deadline)]
    command += ["--tls"] if arguments.weights_tls else []
    return HostedWeights(tuple(command), secret.text())


def hosted_controller(
    arguments: argparse.Namespace, shape: Shape, endpoint: str, run_dir: Path, secret: Secret
) -> HostedController:
    """Returns the job's controller, as a child process that is not started yet."""
    command = own_command("keepstep.cli.main", "controller", "--parent", str(os.getpid()))
    command += ["--listen", endpoint, "--nnodes", arguments.nnodes, "--nproc-per-node", str(shape.ranks_per_node)]
    command += ["--spares", str(shape.num_spares), "--lease", str(arguments.lease), "--tls", arguments.tls]
    command += ["--grace", str(grace_of(arguments)), "--hang-after", arguments.hang_after]
    command += ["--run-dir", str(run_dir)]
    for flag in ("max_restarts", "min_nodes", "give_up_after", "quarantine", "compare", "report", "trace", "log_json"):
        if getattr(arguments, flag) is not None:
            command += [f"--{flag.replace('_', '-')}", str(getattr(arguments, flag))]
    return HostedController(tuple(command), run_dir, secret.text())
