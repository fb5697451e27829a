"""The flags of a job on several nodes, and the settings derived from them.

This module does not import torch, because a controller does not need it and must restart quickly. It does not import
cryptography either, because `keepstep run` on one node has these flags too.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import socket

from keepstep import config
from keepstep.agent.settings import NodePlace
from keepstep.errors import ConfigurationError
from keepstep.programs import DRAIN_ON
from keepstep.protocol.deadlines import DEADLINES, LEASE_S, Deadlines
from keepstep.protocol.messages import MAX_NAME
from keepstep.protocol.recovery import GRACE_S, RecoverySettings
from keepstep.protocol.recovery.settings import QUARANTINE_FAILURES, QUARANTINE_WINDOW_S
from keepstep.transports.interface import PATIENCE_S

DEFAULT_PORT = 29400
"""torchrun's default port of a rendezvous endpoint."""

NO_ENGINE, RAY = "none", "ray"
WARN, STRICT = "warn", "strict"
ENGINE_TIMEOUT_S = 600.0
"""A cloud takes minutes to start a machine."""


NODES_PER_RELAY = 256
"""gRPC takes about 0.1 ms of a relay's time for each message, so the agents of one relay answer within about 25 ms."""
MAX_NODES_ALONE = 1024
"""Number of nodes that a controller without relays serves; benchmarks/results has the measured times."""
MAX_RELAYS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How many ranks, nodes and spares a job has; the same on every node."""

    min_nodes: int
    max_nodes: int
    ranks_per_node: int
    num_spares: int

    @property
    def world_size(self) -> int:
        """Number of ranks. It never changes: nodes beyond the minimum hold spares."""
        return self.min_nodes * self.ranks_per_node

    def slots(self, asked: int | None) -> int:
        """Returns the number of workers that a node can hold: ``asked`` if it is given.

        Otherwise the spares use the nodes that the ranks do not need. Those that do not fit there are spread over all
        nodes.
        """
        if asked is not None:
            return asked
        room_beyond = (self.max_nodes - self.min_nodes) * self.ranks_per_node
        if room_beyond >= self.num_spares:
            return self.ranks_per_node
        return self.ranks_per_node + math.ceil((self.num_spares - room_beyond) / self.max_nodes)

    def _most_per_node(self, least_nodes: int | None) -> int:
        if least_nodes is None:
            return 0
        if not 1 <= least_nodes <= self.min_nodes:
            raise ConfigurationError(f"--min-nodes {least_nodes}: must be from 1 to the {self.min_nodes} of --nnodes")
        return math.ceil(self.world_size / least_nodes)

    def recovery(self, arguments: argparse.Namespace) -> RecoverySettings:
        """Returns the settings of the controller's recovery machine.

        Raises:
            ConfigurationError: ``--quarantine``, ``--min-nodes``, ``--grace``, ``--hang-after`` or ``--give-up-after``
                has an invalid value.
        """
        give_up_after_s = arguments.give_up_after
        if give_up_after_s is not None and not 0 < give_up_after_s < math.inf:
            raise ConfigurationError(f"--give-up-after {give_up_after_s}: must be a positive number of seconds")
        num_failures, window_s = _quarantine_of(arguments.quarantine)
        return RecoverySettings(
            self.world_size,
            self.num_spares,
            ranks_per_node=self.ranks_per_node,
            most_per_node=self._most_per_node(arguments.min_nodes),
            max_restarts=arguments.max_restarts,
            ends_apart=arguments.compare == STRICT,
            quarantine_failures=num_failures,
            quarantine_window_s=window_s,
            grace_s=grace_of(arguments),
            deadlines=deadlines_of(arguments),
            give_up_after_s=give_up_after_s,
        )


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a process that serves one of several nodes."""
    own = parser.add_argument_group("keepstep on several nodes")
    own.add_argument("--node-name", help="unique name of the node (default: the host's name, and --node-rank)")
    own.add_argument("--domain", default="", help="failure domain of this node: a rack, a switch")
    own.add_argument(
        "--slots-per-node", type=int, metavar="N", help="number of workers that the node can hold, including spares"
    )
    own.add_argument(
        "--controller-timeout", type=float, default=PATIENCE_S, metavar="SECONDS",
        help="how long a node continues without its controller (default: %(default)s)",
    )  # fmt: skip
    own.add_argument("--token-file", help="this node's credentials, as 'keepstep token' prints them")
    add_controller_flags(own)
    own.add_argument(
        "--weights", metavar="FOLDER",
        help="connect the publishers in this folder to those of the other nodes, and accept nodes with engines",
    )  # fmt: skip
    own.add_argument(
        "--weights-listen", metavar="HOST:PORT",
        help="address at which other nodes connect for that (default: this node's address, any free port)",
    )  # fmt: skip
    own.add_argument("--weights-tls", action="store_true", help="encrypt these connections; set it on all nodes")
    own.add_argument(
        "--weights-deadline", type=float, default=30.0, metavar="SECONDS",
        help="the deadline_s of publish_weights (default: %(default)s)",
    )  # fmt: skip
    own.add_argument(
        "--engine", choices=(NO_ENGINE, RAY), default=NO_ENGINE,
        help="ray: this command starts the whole job, on the nodes of a Ray cluster (default: %(default)s)",
    )  # fmt: skip
    own.add_argument(
        "--ray-address", metavar="HOST:PORT",
        help="the Ray cluster (default: the variable RAY_ADDRESS, or the cluster of this node)",
    )  # fmt: skip
    own.add_argument(
        "--ray-bundle", type=_bundle, metavar="NAME=N,...",
        help="Ray resources reserved on each node, as in CPU=8,GPU=8 (default: a CPU for each of its workers)",
    )  # fmt: skip
    own.add_argument(
        "--ray-timeout", type=float, default=ENGINE_TIMEOUT_S, metavar="SECONDS",
        help="how long Ray may take to find the nodes (default: %(default)s)",
    )  # fmt: skip


def add_controller_flags(parser: argparse._ActionsContainer) -> None:
    """Adds the flags of a process that runs a controller, itself or as a child process."""
    parser.add_argument(
        "--lease", type=float, default=LEASE_S, metavar="SECONDS",
        help="a node without a heartbeat for this long is evicted (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--min-nodes", type=int, metavar="N",
        help="continue with as few as N nodes: ranks of lost nodes share the devices of others until they are back",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=float, metavar="SECONDS",
        help="time until remaining processes are killed; before, the ranks complete a step, save it, and get SIGTERM "
        f"(default: torchrun's --shutdown-timeout, else {GRACE_S:g})",
    )  # fmt: skip
    parser.add_argument(
        "--drain-on", type=_draining_signal, action="append", default=[], metavar="SIGNAL",
        help="also drain on SIGUSR1, SIGUSR2 or SIGXCPU, as a scheduler sends it ahead of the end; may be repeated",
    )  # fmt: skip
    add_secret_flag(parser)
    parser.add_argument(
        "--tls", default="auto", metavar="auto|off|FILES",
        help="auto: by an authority made from the job's secret; FILES: CERTIFICATE,KEY,AUTHORITY (default: auto)",
    )  # fmt: skip


def add_recovery_flags(parser: argparse._ActionsContainer) -> None:
    """Adds the flags of every job that decide when a rank is replaced, and on which node and device."""
    parser.add_argument(
        "--hang-after", default=f"{DEADLINES.hang_after_s:g}:{DEADLINES.hang_factor:g}", metavar="SECONDS[:FACTOR]",
        help="a rank hangs if it makes no progress for this long, and for FACTOR times the longest recent phase of its "
        "own process (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--give-up-after", type=float, metavar="SECONDS",
        help="end the job, and save its state, when a rank that cannot be replaced has made no progress for this long "
        "(default: wait)",
    )  # fmt: skip
    parser.add_argument(
        "--quarantine", default=f"{QUARANTINE_FAILURES}:{QUARANTINE_WINDOW_S:g}", metavar="N:SECONDS|off",
        help="use a node or device that failed N times within SECONDS only if no other spare is left "
        "(default: %(default)s)",
    )  # fmt: skip


def add_compare_flag(parser: argparse._ActionsContainer) -> None:
    """Adds the flag of what to do about replicas that have trained apart. A drill compares all of the state itself."""
    parser.add_argument(
        "--compare", choices=(WARN, STRICT), default=WARN,
        help="after a recovery, ranks that hold the same state are compared; if those that were not lost differ: warn "
        "and go on, or end the job and save the state of each (default: %(default)s)",
    )  # fmt: skip


def add_secret_flag(parser: argparse._ActionsContainer) -> None:
    """Adds the flag that names the file with the job's secret."""
    parser.add_argument("--secret-file", help=f"the job's secret (or: the variable {config.SECRET_VARIABLE})")


def _draining_signal(text: str) -> int:
    """Parses the value of ``--drain-on``, with or without ``SIG``."""
    name = f"SIG{text.upper().removeprefix('SIG')}"
    if name not in DRAIN_ON:
        raise argparse.ArgumentTypeError(f"{text!r} is not {', '.join(DRAIN_ON)}")
    return signal.Signals[name]


def _bundle(text: str) -> dict[str, float]:
    """Parses the value of ``--ray-bundle``: Ray resource -> amount."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if not name or not 0 < found[name] < math.inf:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=N, as in CPU=8,GPU=8")
    return found


def grace_of(arguments: argparse.Namespace) -> float:
    """Returns the seconds from SIGTERM until remaining processes are killed.

    That is ``--grace``, else torchrun's ``--shutdown-timeout`` (2.13 and newer), else the default.

    Raises:
        ConfigurationError: the value is negative, infinite or not a number.
    """
    asked = arguments.grace
    if asked is None:
        asked = getattr(arguments, "shutdown_timeout", None)
    if asked is not None and not 0 <= asked < math.inf:
        raise ConfigurationError(f"--grace {asked}: must be a number of seconds, 0 or more")
    return GRACE_S if asked is None else float(asked)


def deadlines_of(arguments: argparse.Namespace) -> Deadlines:
    """Returns the deadlines of a job with ``--hang-after``.

    Raises:
        ConfigurationError: the value is not SECONDS or SECONDS:FACTOR, both positive.
    """
    text = arguments.hang_after
    seconds, _, factor = text.partition(":")
    try:
        hang_after_s, hang_factor = float(seconds), float(factor) if factor else DEADLINES.hang_factor
    except ValueError:
        hang_after_s = hang_factor = math.nan
    if not (0 < hang_after_s < math.inf and 0 < hang_factor < math.inf):
        raise ConfigurationError(f"--hang-after {text}: must be SECONDS, or SECONDS:FACTOR, both positive")
    return dataclasses.replace(DEADLINES, hang_after_s=hang_after_s, hang_factor=hang_factor)


def shape_of(nnodes: str, ranks_per_node: int, num_spares: int) -> Shape:
    """Returns the shape of the job that the flags describe.

    Raises:
        ConfigurationError: ``--nnodes`` is neither a number nor MIN:MAX, or another number is too small.
    """
    try:
        least, _, most = nnodes.partition(":")
        min_nodes, max_nodes = int(least), int(most or least)
    except ValueError:
        min_nodes = max_nodes = 0
    if not 1 <= min_nodes <= max_nodes:
        raise ConfigurationError(f"--nnodes {nnodes}: must be a number of nodes, or MIN:MAX, both 1 or more")
    if ranks_per_node < 1:
        raise ConfigurationError(f"--nproc-per-node {ranks_per_node}: allowed are 1 and more")
    if num_spares < 0:
        raise ConfigurationError(f"--spares {num_spares}: allowed are 0 and more")
    return Shape(min_nodes, max_nodes, ranks_per_node, num_spares)


def num_relays_for(num_nodes: int) -> int:
    """Returns the default number of relays for this many nodes; 0 if the controller holds all connections itself."""
    return 0 if num_nodes <= MAX_NODES_ALONE else math.ceil(num_nodes / NODES_PER_RELAY)


def _quarantine_of(text: str) -> tuple[int, float]:
    if text == "off":
        return 0, QUARANTINE_WINDOW_S
    try:
        times, _, seconds = text.partition(":")
        num_failures, window_s = int(times), float(seconds)
    except ValueError:
        num_failures, window_s = 0, 0.0
    if num_failures < 1 or not 0 < window_s < math.inf:
        raise ConfigurationError(f"--quarantine {text}: must be N:SECONDS, with N 1 or more, or off")
    return num_failures, window_s


def place_of(arguments: argparse.Namespace, shape: Shape, endpoint: str) -> NodePlace:
    """Returns this node's place in the job.

    Raises:
        ConfigurationError: a flag has an invalid value, or this machine has no route to the endpoint.
    """
    slots = shape.slots(arguments.slots_per_node)
    if slots < 1:
        raise ConfigurationError(f"--slots-per-node {slots}: allowed are 1 and more")
    try:
        position = int(arguments.node_rank)
    except ValueError:
        raise ConfigurationError(f"--node-rank {arguments.node_rank}: must be a number") from None
    name = arguments.node_name or socket.gethostname() + (f"-{position}" if position else "")
    for flag, given in (("--node-name", name), ("--domain", arguments.domain)):
        if len(given) > MAX_NAME:  # the controller would refuse the node
            raise ConfigurationError(f"{flag} {given[:40]}...: has {len(given)} characters; allowed are {MAX_NAME}")
    return NodePlace(
        node=name,
        world_size=shape.world_size,
        ranks_per_node=shape.ranks_per_node,
        slots=slots,
        num_nodes=shape.min_nodes,
        position=position,
        domain=arguments.domain,
        address=arguments.local_addr or _address_towards(endpoint),
    )


# ---- addresses ------------------------------------------------------------------------------------------------------


def endpoint_of(flag: str, text: str) -> str:
    """Returns an endpoint as HOST:PORT, with torchrun's default if ``text`` has no port.

    Raises:
        ConfigurationError: ``text`` is not an endpoint; the message names ``flag``.
    """
    host, port = split(text)
    if not host or not 1 <= port <= 65535:
        raise ConfigurationError(f"{flag} {text}: must be HOST:PORT, with a port from 1 to 65535")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(endpoint: str) -> tuple[str, int]:
    """Returns host and port of ``HOST``, ``HOST:PORT`` or ``[HOST]:PORT``. The port is 0 if it is not a number."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        return endpoint.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), int(port) if port.isdecimal() else 0


def owns(endpoint: str) -> bool:
    """Whether this process can bind the endpoint: its host is this machine, and the port is free."""
    host, port = split(endpoint)
    for family, kind, _, _, address in _resolved(host, port):
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _address_towards(endpoint: str) -> str:
    """Returns this machine's own address on the route to the endpoint. Sends nothing."""
    host, port = split(endpoint)
    for family, _, _, _, address in _resolved(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise ConfigurationError(f"no route to {endpoint}; name this node's own address with --local-addr")


def _resolved(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # type: ignore[return-value]  # with SOCK_STREAM
    except OSError as error:
        raise ConfigurationError(f"{host}: {error.strerror}") from error
