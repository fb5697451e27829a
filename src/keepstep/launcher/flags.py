"""torchrun's command line with keepstep's own flags, and the settings derived from it.

The parser extends torchrun's, so command lines for torchrun work. keepstep refuses the flags that it does not support.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std

from keepstep.agent.settings import AgentSettings, HealthMode, HealthSettings, NodePlace, OutputSettings
from keepstep.config import inherited_environment, job_environment, numbers_devices_by_bus, visible_devices
from keepstep.devices import names_of
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.flags import (
    NO_ENGINE,
    WARN,
    Shape,
    add_node_flags,
    add_recovery_flags,
    deadlines_of,
    split,
)
from keepstep.launcher.job import JobOptions, fresh_run_dir
from keepstep.launcher.recording import add_output_flags, make_folder, outputs_of
from keepstep.programs import DRAIN_ON
from keepstep.protocol.deadlines import DEADLINES
from keepstep.systemcalls import bound, check_system, loopback

LOOPBACK = "127.0.0.1"
SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
"""torchrun's default for ``--signals-to-handle``."""
MASTER_PORT = 29500
"""torchrun's default port."""
NOT_DONE_YET = ("numa_binding", "virtual_local_rank", "event_log_handler")
"""torchrun's flags that keepstep refuses unless they have torchrun's default."""


def make_parser(program: str) -> argparse.ArgumentParser:
    """Returns torchrun's parser with keepstep's own flags. ``program`` is the command's name in its help."""
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog = program
    # Python 3.11 would refuse an option of the script that is an abbreviation of two of these flags.
    parser.allow_abbrev = False
    parser.description = "Runs a training script on several ranks and keeps the step when one is lost."
    parser.set_defaults(max_restarts=None, start_method="forkserver", compare=WARN)
    own = parser.add_argument_group("keepstep")
    own.add_argument("--spares", type=int, default=1, help="warm workers that hold no rank yet (default: 1)")
    own.add_argument(
        "--park-spares", action="store_true",
        help="spares wait before the script's first line: for scripts that read their rank while they start",
    )  # fmt: skip
    own.add_argument(
        "--share-gpus", action="store_true",
        help="a node may have more ranks and spares than GPUs: they share GPUs (NCCL 2.30 and newer)",
    )  # fmt: skip
    own.add_argument(
        "--preload", action="append", default=[], metavar="MODULE[,MODULE]",
        help="import modules before the script, with torch; may be repeated",
    )  # fmt: skip
    add_recovery_flags(own)
    own.add_argument("--run-dir", help="folder for the journal and the status socket (default: a fresh temporary one)")
    add_output_flags(own)
    own.add_argument(
        "--dashboard", nargs="?", const="", type=_address, metavar="HOST:PORT",
        help="serve a page that shows the run (default: on this machine only, at 127.0.0.1:7117 or any free port)",
    )  # fmt: skip
    own.add_argument(
        "--health", choices=[str(mode) for mode in HealthMode], default=str(HealthMode.WARN),
        help="what to do about an unhealthy NVIDIA GPU: off, warn, or act: replace its rank (default: %(default)s)",
    )  # fmt: skip
    own.add_argument(
        "--explain-after", type=float, default=DEADLINES.explain_s, metavar="SECONDS",
        help="report ranks that have waited for others for this long, and where they wait (default: %(default)s)",
    )  # fmt: skip
    add_node_flags(parser)
    return parser


class _NoAddress(Exception):
    """``--dashboard`` is followed by something other than an address: the script."""


def _address(text: str) -> str:
    if text and not re.fullmatch(r"[\w.:\-\[\]]*:\d+", text):
        raise _NoAddress(text)
    return text


def parse_flags(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parses a command line. It may have ``--dashboard`` without an address right before the script.

    Raises:
        ConfigurationError: the value of ``--dashboard`` is not an address.
    """
    try:
        return parser.parse_args(arguments)
    except _NoAddress as error:
        pair = ("--dashboard", str(error))
        at = next((at for at, each in enumerate(itertools.pairwise(arguments)) if each == pair), None)
        if at is None:
            raise ConfigurationError(f"--dashboard={error}: must be HOST:PORT, or nothing") from None
        return parser.parse_args([*arguments[:at], "--dashboard=", *arguments[at + 1 :]])


def is_one_of_several(arguments: argparse.Namespace) -> bool:
    """Whether the flags describe a job on several nodes."""
    return arguments.nnodes not in ("1", "1:1")


def job_options(arguments: argparse.Namespace, run_dir: Path | None = None) -> JobOptions:
    """Returns the options of the job on one node that the parsed flags describe.

    Args:
        arguments: the flags, as the parser of `make_parser` returns them.
        run_dir: the folder of the run, instead of the one in the flags or a new temporary one.

    Raises:
        ConfigurationError: a flag has an invalid value; the message names the value and the allowed ones.
    """
    if is_one_of_several(arguments):
        raise ConfigurationError(f"--nnodes {arguments.nnodes}: a drill runs on one node, so leave it out")
    if arguments.engine != NO_ENGINE:
        raise ConfigurationError(f"--engine {arguments.engine}: a drill runs on one node, so leave it out")
    if arguments.node_rank not in (0, "0"):
        raise ConfigurationError(f"--node-rank {arguments.node_rank}: there is one node, so 0")
    outputs = outputs_of(arguments)
    place = NodePlace.alone(ranks_per_node(arguments), arguments.spares)
    shape = Shape(1, 1, place.ranks_per_node, arguments.spares)
    recovery = dataclasses.replace(shape.recovery(arguments), nodes_may_join=False)
    agent = agent_settings(arguments, place, run_dir)
    return JobOptions(agent, recovery, outputs, keep_run_dir=run_dir is not None or arguments.run_dir is not None)


def agent_settings(arguments: argparse.Namespace, place: NodePlace, run_dir: Path | None = None) -> AgentSettings:
    """Returns the settings of a node's agent. Creates the folders for the run and for logs.

    Args:
        arguments: the flags, as the parser of `make_parser` returns them.
        place: the node's place in its job.
        run_dir: as for `job_options`.

    Raises:
        ConfigurationError: a flag has an invalid value.
    """
    _refuse_what_cannot_be(arguments)
    _refuse_what_is_not_done_yet(arguments)
    in_job = _job_environment(arguments, place)
    # Folders are created last, so that a refused job leaves none behind.
    output = _output(arguments, range(place.slots))
    check_system()
    if run_dir is None:
        named = arguments.run_dir is not None
        run_dir = make_folder("--run-dir", Path(arguments.run_dir), 0o700) if named else fresh_run_dir()
    return AgentSettings(
        command=(arguments.training_script, *arguments.training_script_args),
        module=arguments.module,
        raw=arguments.no_python,
        fork=arguments.start_method != "spawn",
        place=place,
        run_dir=run_dir,
        environment=inherited_environment(is_alone=place.ranks_per_node == 1),
        job_environment=in_job,
        parks_spares=arguments.park_spares,
        shares_gpus=arguments.share_gpus,
        preload=tuple(name for each in arguments.preload for name in each.split(",")),
        devices=names_of(visible_devices(), torch.cuda.device_count()),
        health=HealthSettings(HealthMode(arguments.health), numbers_devices_by_bus()),
        drain_on=tuple(arguments.drain_on),
        deadlines=dataclasses.replace(deadlines_of(arguments), explain_s=arguments.explain_after),
        output=output,
    )


def _refuse_what_cannot_be(arguments: argparse.Namespace) -> None:
    if arguments.spares < 0:
        raise ConfigurationError(f"--spares {arguments.spares}: allowed are 0 and more")
    if arguments.max_restarts is not None and arguments.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts {arguments.max_restarts}: allowed are 0 and more")
    if not arguments.explain_after > 0:  # refuses nan, too
        raise ConfigurationError(f"--explain-after {arguments.explain_after}: must be positive")
    if arguments.module and arguments.no_python:
        raise ConfigurationError("--no-python and --module cannot go together: leave one of them out")
    if arguments.park_spares and arguments.no_python:
        raise ConfigurationError("--park-spares: a spare cannot wait inside of another command; leave --no-python out")
    script = arguments.training_script
    if arguments.module or arguments.no_python or Path(script).is_file() or Path(script, "__main__.py").is_file():
        return
    why = "the folder has no __main__.py" if Path(script).is_dir() else f"looked in {os.getcwd()}"
    raise ConfigurationError(f"the script {script!r} does not exist ({why})")


def ranks_per_node(arguments: argparse.Namespace) -> int:
    """Returns the number of ranks that ``--nproc-per-node`` means on this machine.

    Raises:
        ConfigurationError: the flag has an invalid value.
    """
    try:
        count = torchrun.determine_local_world_size(arguments.nproc_per_node)
    except ValueError as error:
        raise ConfigurationError(
            f"--nproc-per-node {arguments.nproc_per_node}: allowed are a positive number, auto, cpu or gpu ({error})"
        ) from error
    if count < 1:
        raise ConfigurationError(f"--nproc-per-node {count}: allowed are 1 and more")
    return int(count)


def _refuse_what_is_not_done_yet(arguments: argparse.Namespace) -> None:
    for name in NOT_DONE_YET:
        value = getattr(arguments, name, None)
        if value not in (None, False, "null"):
            raise ConfigurationError(f"--{name.replace('_', '-')} {value}: not supported yet; leave it out")
    asked = getattr(arguments, "signals_to_handle", "")
    named = set(filter(None, asked.split(",")))
    if unknown := named - SIGNALS - {*DRAIN_ON}:
        raise ConfigurationError(
            f"--signals-to-handle {asked}: {', '.join(sorted(unknown))} is not supported; "
            f"{', '.join(sorted(SIGNALS))} are handled in any case, and {', '.join(DRAIN_ON)} drain the job if named"
        )
    arguments.drain_on += [signal.Signals[name] for name in named.intersection(DRAIN_ON)]


def _job_environment(arguments: argparse.Namespace, place: NodePlace) -> dict[str, str]:
    address, port = _master(arguments, place)
    return job_environment(
        role=arguments.role,
        run_id=arguments.rdzv_id,
        max_restarts=arguments.max_restarts,
        master_address=address,
        master_port=port,
    )


def _master(arguments: argparse.Namespace, place: NodePlace) -> tuple[str, int]:
    """Returns ``MASTER_ADDR`` and ``MASTER_PORT``, for scripts that call ``init_process_group`` themselves.

    keepstep opens no port there. On one node it chooses a free port unless the user sets one. All of several nodes need
    the same port, so there it is torchrun's default unless the user sets one. The default host is that of the
    rendezvous endpoint, which runs the first ranks unless ``--node-rank`` changes that.
    """
    port = arguments.master_port
    if place.num_nodes > 1:
        meeting = split(arguments.rdzv_endpoint)[0] if arguments.rdzv_endpoint else ""
        is_named = arguments.master_addr != LOOPBACK or not meeting
        return (arguments.master_addr if is_named else meeting), port or MASTER_PORT
    if port is not None:
        _check_port(loopback(), port)
    own = loopback()
    return (own if arguments.master_addr == LOOPBACK else arguments.master_addr), port or _free_port(own)


def _free_port(host: str) -> int:
    with bound(host, 0) as probe:
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    """Raises `ConfigurationError` if the port is in use. keepstep does not open it, but the script will."""
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"--master-port {port}: allowed are 1 to 65535")
    try:
        bound(host, port).close()
    except OSError as error:
        raise ConfigurationError(f"--master-port {port}: {error.strerror}; choose another") from error


def _output(arguments: argparse.Namespace, everyone: range) -> OutputSettings:
    """Returns where the workers' output goes. ``log_dir`` is None unless a flag sets it. Creates it only if files go
    there."""
    redirect_stdout, redirect_stderr = _streams("--redirects", arguments.redirects, everyone)
    tee_stdout, tee_stderr = _streams("--tee", arguments.tee, everyone)
    output = OutputSettings(
        log_dir=Path(arguments.log_dir) / arguments.rdzv_id if arguments.log_dir else None,
        redirect_stdout=redirect_stdout,
        redirect_stderr=redirect_stderr,
        tee_stdout=tee_stdout,
        tee_stderr=tee_stderr,
        shown=_shown(arguments.local_ranks_filter, everyone),
        role=arguments.role,
    )
    if output.writes_files and output.log_dir is not None:
        make_folder("--log-dir", output.log_dir)
    return output


def _streams(flag: str, text: str, everyone: range) -> tuple[frozenset[int], frozenset[int]]:
    """Returns two sets for a flag of torchrun: the local ranks whose stdout it names, and those whose stderr."""
    try:
        choice = Std.from_str(text)
    except ValueError:
        raise ConfigurationError(
            f"{flag} {text}: allowed are 0 (none), 1 (stdout), 2 (stderr), 3 (both), "
            f"or one of them for each of some local ranks, as in 0:3,1:2"
        ) from None
    by_rank = choice if isinstance(choice, dict) else dict.fromkeys(everyone, choice)
    _check_local_ranks(f"{flag} {text}", by_rank, everyone)
    stdout = frozenset(rank for rank, streams in by_rank.items() if Std.OUT in streams)
    return stdout, frozenset(rank for rank, streams in by_rank.items() if Std.ERR in streams)


def _shown(text: str, everyone: range) -> frozenset[int] | None:
    if not text:
        return None
    try:
        ranks = frozenset(int(rank) for rank in text.split(","))
    except ValueError:
        raise ConfigurationError(f"--local-ranks-filter {text}: must be numbers, separated by commas") from None
    _check_local_ranks(f"--local-ranks-filter {text}", ranks, everyone)
    return ranks


def _check_local_ranks(said: str, ranks: Iterable[int], everyone: range) -> None:
    for rank in ranks:
        if rank not in everyone:
            raise ConfigurationError(f"{said}: local rank {rank} is not there; allowed are 0 to {everyone[-1]}")
