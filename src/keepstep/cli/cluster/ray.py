"""``keepstep run --engine ray``: the whole job from one command, on nodes that Ray finds."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from types import ModuleType

from keepstep.cli.cluster.agent import hosted_controller
from keepstep.cli.dashboard import showing
from keepstep.config import ray_address, script_environment
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.flags import DEFAULT_PORT, NO_ENGINE, Shape, endpoint_of, owns, shape_of
from keepstep.launcher.console import tell_folder
from keepstep.launcher.flags import ranks_per_node
from keepstep.launcher.job import clear_up_folder, fresh_run_dir
from keepstep.launcher.recording import make_folder
from keepstep.trust.tokens import Secret

NUM_PORTS = 100
"""Number of ports that controllers on one driver node may use, from torchrun's default upwards. They are below the
kernel's ephemeral ports, so that a restarted controller finds its port free."""
OF_ONE_NODE = (
    "node_rank", "node_name", "domain", "local_addr", "master_addr", "master_port", "rdzv_endpoint", "secret_file",
    "token_file",
)  # fmt: skip
"""Flags that are refused, because Ray or this command sets these values."""


def run_on_ray(chosen: argparse.Namespace, parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Runs a job on a Ray cluster, with the controller here, and returns the job's exit code.

    Args:
        chosen: the parsed arguments.
        parser: the parser of ``keepstep run``.
        arguments: the unparsed arguments.

    Raises:
        ConfigurationError: the job cannot run with these flags, or not on this cluster.
    """
    engine = _engine()
    _refuse_what_has_no_meaning(chosen, parser)
    shape = shape_of(chosen.nnodes, ranks_per_node(chosen), chosen.spares)
    slots = shape.slots(chosen.slots_per_node)
    bundle = chosen.ray_bundle or {"CPU": float(slots)}
    secret = Secret.new()
    with engine.connected(chosen.ray_address or ray_address() or engine.OF_THIS_NODE) as address:
        endpoint = _free_endpoint(address)
        run_dir = _run_dir(chosen)
        job = engine.RayJob(
            num_nodes=shape.max_nodes,
            bundle=bundle,
            command=engine.AgentCommand(
                flags=_agent_flags(chosen, arguments, shape, endpoint),
                script=(chosen.training_script, *chosen.training_script_args),
                folder=os.getcwd(),
                num_threads=_num_threads(bundle, slots),
                run_dir=None if chosen.run_dir is None else str(run_dir.absolute()),
            ),
            secret=secret,
            timeout_s=chosen.ray_timeout,
        )
        try:
            with showing(run_dir, chosen.dashboard):
                code = int(engine.run_on_ray(job, lambda: hosted_controller(chosen, shape, endpoint, run_dir, secret)))
        finally:
            if chosen.run_dir is None:
                clear_up_folder(run_dir)
        tell_folder(run_dir)
        return code


def _engine() -> ModuleType:
    try:
        from keepstep.integrations import ray
    except ImportError as error:
        raise ConfigurationError(
            f"--engine ray: Ray is not installed ({error}); install it with: pip install 'keepstep[ray]'"
        ) from error
    return ray


def _refuse_what_has_no_meaning(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name in OF_ONE_NODE:
        if str(getattr(chosen, name)) != str(parser.get_default(name)):
            raise ConfigurationError(
                f"--{name.replace('_', '-')}: --engine ray finds and names the nodes, and has its own secret, so "
                "leave it out"
            )
    if not str(chosen.nproc_per_node).isdecimal():
        raise ConfigurationError(
            f"--nproc-per-node {chosen.nproc_per_node}: this machine may differ from Ray's nodes, so give a number"
        )
    if not chosen.ray_timeout > 0:
        raise ConfigurationError(f"--ray-timeout {chosen.ray_timeout}: must be positive")


def _free_endpoint(address: str) -> str:
    for port in range(DEFAULT_PORT, DEFAULT_PORT + NUM_PORTS):
        endpoint = endpoint_of("Ray's address of this node", f"{address}:{port}")
        if owns(endpoint):
            return endpoint
    raise ConfigurationError(
        f"the controller finds no free port on {address} from {DEFAULT_PORT} to {DEFAULT_PORT + NUM_PORTS - 1}"
    )


def _run_dir(chosen: argparse.Namespace) -> Path:
    return fresh_run_dir() if chosen.run_dir is None else make_folder("--run-dir", Path(chosen.run_dir), 0o700)


def _agent_flags(chosen: argparse.Namespace, arguments: list[str], shape: Shape, endpoint: str) -> tuple[str, ...]:
    """Returns the flags of ``keepstep run`` followed by those of an agent. The last of two equal flags counts."""
    given = arguments[: len(arguments) - 1 - len(chosen.training_script_args)]
    if given and given[-1] == "--":
        given.pop()
    own = ["--engine", NO_ENGINE, "--controller", endpoint, "--nproc-per-node", str(shape.ranks_per_node)]
    return (*given, *own)


def _num_threads(bundle: dict[str, float], slots: int) -> str:
    """Returns ``OMP_NUM_THREADS`` for all nodes; results may depend on it. It is this process's own value, or the CPUs
    of a node divided by its workers."""
    cpus = math.floor(bundle.get("CPU", slots))
    return script_environment().get("OMP_NUM_THREADS") or str(max(1, cpus // slots))
