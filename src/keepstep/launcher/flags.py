"""torchrun's command line, with a few flags more, and what comes of it.

The parser is torchrun's own, so every habit of its users holds; what keepstep does not do yet is refused by name.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std

from keepstep.agent.settings import AgentSettings, OutputSettings
from keepstep.errors import ConfigurationError
from keepstep.launcher.job import JobOptions, make_run_dir
from keepstep.protocol.liveness import LivenessSettings
from keepstep.protocol.recovery import RecoverySettings

DEADLINES = LivenessSettings()


def make_parser(program: str) -> argparse.ArgumentParser:
    """torchrun's parser under another name, with keepstep's own flags."""
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog = program
    parser.description = "Runs a training script on several ranks and keeps the step when one is lost."
    parser.set_defaults(max_restarts=None, start_method="forkserver")
    own = parser.add_argument_group("keepstep")
    own.add_argument("--spares", type=int, default=1, help="warm workers that hold no rank yet (default: 1)")
    own.add_argument("--run-dir", help="folder for the journal and the status socket (default: a fresh temporary one)")
    own.add_argument("--report", help="write a JSON report of the run to this file")
    own.add_argument(
        "--hang-floor", type=float, default=DEADLINES.floor_s, metavar="SECONDS",
        help="a rank without progress is left alone for this long at least (default: %(default)s)",
    )  # fmt: skip
    own.add_argument(
        "--hang-factor", type=float, default=DEADLINES.factor, metavar="N",
        help="... and for N times the longest recent duration of the phase it is in (default: %(default)s)",
    )  # fmt: skip
    own.add_argument(
        "--between-steps", type=float, default=DEADLINES.between_steps_s, metavar="SECONDS",
        help="how long a script may evaluate or save between two steps (default: %(default)s)",
    )  # fmt: skip
    return parser


def job_options(arguments: argparse.Namespace, run_dir: Path | None = None) -> JobOptions:
    """The job that the parsed flags describe.

    Args:
        arguments: what `make_parser`'s parser returned.
        run_dir: the folder of the run, in place of the one that the flags name or of a fresh one.

    Raises:
        ConfigurationError: a flag names something that cannot be; the message names the value and what is allowed.
    """
    world_size = _world_size(arguments)
    if arguments.spares < 0:
        raise ConfigurationError(f"--spares {arguments.spares}: allowed are 0 and more")
    if arguments.max_restarts is not None and arguments.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts {arguments.max_restarts}: allowed are 0 and more")
    for name in ("hang_floor", "hang_factor", "between_steps"):
        if getattr(arguments, name) <= 0:
            raise ConfigurationError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be positive")
    _refuse_what_is_not_done_yet(arguments)
    script = arguments.training_script
    if not arguments.module and not arguments.no_python and not Path(script).is_file():
        raise ConfigurationError(f"the script {script!r} does not exist (looked in {os.getcwd()})")
    report = Path(arguments.report) if arguments.report else None
    if report is not None and not report.absolute().parent.is_dir():
        raise ConfigurationError(f"--report {report}: the folder {report.absolute().parent} does not exist")
    run_dir = run_dir or make_run_dir(arguments.run_dir)
    output = _output(arguments, world_size, run_dir)
    agent = AgentSettings(
        node=socket.gethostname(),
        command=(script, *arguments.training_script_args),
        module=arguments.module,
        raw=arguments.no_python,
        fork=arguments.start_method != "spawn",
        world_size=world_size,
        num_spares=arguments.spares,
        run_dir=run_dir,
        environment=_environment(arguments, world_size),
        liveness=LivenessSettings(
            floor_s=arguments.hang_floor, factor=arguments.hang_factor, between_steps_s=arguments.between_steps
        ),
        output=output,
    )
    recovery = RecoverySettings(world_size, arguments.spares, arguments.max_restarts)
    keep = arguments.run_dir is not None or (output.writes_files and arguments.log_dir is None)
    return JobOptions(agent, recovery, report, keep_run_dir=keep)


def _world_size(arguments: argparse.Namespace) -> int:
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
    for name in ("numa_binding", "virtual_local_rank", "event_log_handler"):
        value = getattr(arguments, name, None)
        if value not in (None, False, "null"):
            raise ConfigurationError(f"--{name.replace('_', '-')} {value}: not supported yet; leave it out")
    if arguments.nnodes not in ("1", "1:1"):
        raise ConfigurationError(f"--nnodes {arguments.nnodes}: only one node is supported yet, so 1")
    if arguments.node_rank not in (0, "0"):
        raise ConfigurationError(f"--node-rank {arguments.node_rank}: only one node is supported yet, so 0")


def _environment(arguments: argparse.Namespace, world_size: int) -> dict[str, str]:
    environment = dict(os.environ)  # environ: workers inherit the launcher's, as under torchrun
    if world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, for the same reason
    address = arguments.master_addr or "127.0.0.1"
    environment["MASTER_ADDR"] = address
    if arguments.master_port is not None:
        _check_port(arguments.master_port)
        environment["MASTER_PORT"] = str(arguments.master_port)
    environment["TORCHELASTIC_RUN_ID"] = arguments.rdzv_id
    return environment


def _check_port(port: int) -> None:
    """keepstep itself opens no port; a script that was promised one shall find it free."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OverflowError:
            raise ConfigurationError(f"--master-port {port}: allowed are 1 to 65535") from None
        except OSError as error:
            raise ConfigurationError(f"--master-port {port}: {error.strerror}; choose another") from error


def _output(arguments: argparse.Namespace, world_size: int, run_dir: Path) -> OutputSettings:
    redirects, tees = Std.from_str(arguments.redirects), Std.from_str(arguments.tee)
    everyone = range(world_size + arguments.spares)
    shown = None
    if arguments.local_ranks_filter:
        try:
            shown = frozenset(int(rank) for rank in arguments.local_ranks_filter.split(","))
        except ValueError as error:
            raise ConfigurationError(f"--local-ranks-filter {arguments.local_ranks_filter}: must be numbers") from error

    def having(choice: Std | dict[int, Std], stream: Std) -> frozenset[int]:
        of = choice if isinstance(choice, dict) else dict.fromkeys(everyone, choice)
        return frozenset(rank for rank in everyone if of.get(rank, Std.NONE) & stream == stream)

    log_dir = Path(arguments.log_dir) / arguments.rdzv_id if arguments.log_dir else run_dir / "logs"
    return OutputSettings(
        log_dir=log_dir,
        redirect_stdout=having(redirects, Std.OUT),
        redirect_stderr=having(redirects, Std.ERR),
        tee_stdout=having(tees, Std.OUT),
        tee_stderr=having(tees, Std.ERR),
        shown=shown,
        role=arguments.role,
    )
