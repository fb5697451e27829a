"""The flags of a job on several nodes, and what comes of them: who may speak, where, and how much room there is.

Nothing here imports torch, for a controller has no use for it and is to be back quickly.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import socket
from pathlib import Path

from keepstep import config
from keepstep.agent.settings import Place
from keepstep.errors import ConfigurationError
from keepstep.protocol.controller import LEASE_S
from keepstep.protocol.recovery import RecoverySettings
from keepstep.transports.lines import PATIENCE_S
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, read_private

DEFAULT_PORT = 29400
"""torchrun's, for a rendezvous endpoint that names none."""
HOW_TO_SHARE = (
    f"make a secret once with 'keepstep token --new', give it to every node as {config.SECRET_VARIABLE} or as a file "
    "with --secret-file, and to nobody else"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How many ranks, nodes and spares a job has; the same on every node."""

    min_nodes: int
    max_nodes: int
    ranks_per_node: int
    num_spares: int

    @property
    def world_size(self) -> int:
        """Number of ranks: it never changes, so what more nodes there are hold spares."""
        return self.min_nodes * self.ranks_per_node

    def slots(self, asked: int | None) -> int:
        """How many workers a node has room for.

        Where there are more nodes than the ranks need, the spares are theirs; else they are spread over all.
        """
        if asked is not None:
            return asked
        room_beyond = (self.max_nodes - self.min_nodes) * self.ranks_per_node
        if room_beyond >= self.num_spares:
            return self.ranks_per_node
        return self.ranks_per_node + math.ceil((self.num_spares - room_beyond) / self.max_nodes)

    def recovery(self, max_restarts: int | None) -> RecoverySettings:
        """What the controller's machine is told."""
        return RecoverySettings(
            self.world_size, self.num_spares, ranks_per_node=self.ranks_per_node, max_restarts=max_restarts
        )


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of whoever serves as one of several nodes."""
    own = parser.add_argument_group("keepstep on several nodes")
    own.add_argument("--node-name", help="what no other node is called (default: the host's name, and --node-rank)")
    own.add_argument("--domain", default="", help="what fails together with this node: a rack, a switch")
    own.add_argument("--slots-per-node", type=int, metavar="N", help="room for so many workers, spares among them")
    own.add_argument(
        "--controller-timeout", type=float, default=PATIENCE_S, metavar="SECONDS",
        help="how long a node goes on without its controller (default: %(default)s)",
    )  # fmt: skip
    own.add_argument("--token-file", help="this node's credentials, as 'keepstep token' prints them")
    add_controller_flags(own)


def add_controller_flags(parser: argparse._ActionsContainer) -> None:
    """Flags of whoever runs a controller, itself or as a child."""
    parser.add_argument(
        "--lease", type=float, default=LEASE_S, metavar="SECONDS",
        help="a node not heard of for so long is given up (default: %(default)s)",
    )  # fmt: skip
    add_secret_flag(parser)
    parser.add_argument(
        "--tls", default="auto", metavar="auto|off|FILES",
        help="auto: by an authority made from the job's secret; FILES: CERTIFICATE,KEY,AUTHORITY (default: auto)",
    )  # fmt: skip


def add_secret_flag(parser: argparse._ActionsContainer) -> None:
    """The flag that names the job's secret."""
    parser.add_argument("--secret-file", help=f"the job's secret (or: the variable {config.SECRET_VARIABLE})")


def shape_of(nnodes: str, ranks_per_node: int, num_spares: int) -> Shape:
    """The shape of the job that flags describe.

    Raises:
        ConfigurationError: ``--nnodes`` is neither a number nor MIN:MAX.
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


def place_of(arguments: argparse.Namespace, shape: Shape, endpoint: str) -> Place:
    """Where this node stands.

    Raises:
        ConfigurationError: a flag names something that cannot be, or the endpoint's host is unknown.
    """
    slots = shape.slots(arguments.slots_per_node)
    if slots < 1:
        raise ConfigurationError(f"--slots-per-node {slots}: allowed are 1 and more")
    try:
        position = int(arguments.node_rank)
    except ValueError:
        raise ConfigurationError(f"--node-rank {arguments.node_rank}: must be a number") from None
    name = arguments.node_name or socket.gethostname() + (f"-{position}" if position else "")
    return Place(
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
    """HOST:PORT, with torchrun's default for the port.

    Raises:
        ConfigurationError: it is no such thing.
    """
    host, port = split(text)
    if not host or not 1 <= port <= 65535:
        raise ConfigurationError(f"{flag} {text}: must be HOST:PORT, with a port from 1 to 65535")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(endpoint: str) -> tuple[str, int]:
    """Host and port of ``HOST``, ``HOST:PORT`` or ``[HOST]:PORT``; port 0 where it is no number."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        return endpoint.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), int(port) if port.isdecimal() else 0


def owns(endpoint: str) -> bool:
    """Whether the endpoint is an address of this machine that nobody serves yet."""
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
    """The address of this machine from which the endpoint is reached; nothing is sent."""
    host, port = split(endpoint)
    for family, _, _, _, address in _resolved(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise ConfigurationError(f"no way leads to {endpoint}; name this node's own address with --local-addr")


def _resolved(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # type: ignore[return-value]  # with SOCK_STREAM
    except OSError as error:
        raise ConfigurationError(f"{host}: {error.strerror}") from error


# ---- trust ----------------------------------------------------------------------------------------------------------


def secret_of(arguments: argparse.Namespace) -> Secret | None:
    """The job's secret, from the file or variable that holds it.

    Raises:
        ConfigurationError: it cannot be read, or is none.
    """
    if arguments.secret_file is not None:
        return Secret.parse(read_private(Path(arguments.secret_file), "--secret-file"), "--secret-file")
    text = config.job_secret()
    return None if text is None else Secret.parse(text, config.SECRET_VARIABLE)


def credentials_of(arguments: argparse.Namespace, node: str) -> tuple[Credentials, str | None]:
    """This node's credentials, and the name that the controller's certificate must bear (None: its address).

    Raises:
        ConfigurationError: there are none, or they cannot be read.
    """
    text = config.agent_token()
    if arguments.token_file is not None:
        found = Credentials.parse(read_private(Path(arguments.token_file), "--token-file"), "--token-file")
    elif text is not None:
        found = Credentials.parse(text, config.TOKEN_VARIABLE)
    elif (secret := secret_of(arguments)) is not None:
        found = Credentials.of(secret, Claim(Role.AGENT, node))
    else:
        raise ConfigurationError(f"several nodes need a secret that they share: {HOW_TO_SHARE}")
    if found.name != node:
        raise ConfigurationError(f"the credentials are those of node {found.name!r}, and this is {node!r}")
    if arguments.tls == "off":
        return dataclasses.replace(found, authority=None), None
    if arguments.tls == "auto":
        if found.authority is None:
            raise ConfigurationError("--tls auto: the credentials hold no certificate of the job's authority")
        return found, certificates.CONTROLLER_NAME
    return dataclasses.replace(found, authority=_read(arguments.tls.split(",")[-1])), None


def server_files_of(tls: str, secret: Secret) -> certificates.ServerFiles | None:
    """What the controller shows, as ``--tls`` says; None: there is no TLS.

    Raises:
        ConfigurationError: a file cannot be read, or there are not three.
    """
    if tls == "off":
        return None
    if tls == "auto":
        return certificates.server(secret)
    files = tls.split(",")
    if len(files) != 3:
        raise ConfigurationError(f"--tls {tls}: must be auto, off, or CERTIFICATE,KEY,AUTHORITY")
    return certificates.ServerFiles(key=_read(files[1]), certificate=_read(files[0]))


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"--tls {name}: {error.strerror}") from error
