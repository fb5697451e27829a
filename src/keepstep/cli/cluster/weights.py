"""``keepstep weights``: sends published weights to consumers on other nodes, and has inference servers load them."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.cli.cluster.weights_metrics import metrics_in, metrics_text, server_metrics_text
from keepstep.engines.server import Running, Server
from keepstep.engines.sglang import SGLangServer
from keepstep.engines.vllm import VLLMServer
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.launcher.cluster.flags import add_secret_flag, endpoint_of
from keepstep.launcher.cluster.trust import HOW_TO_SHARE, believing, secret_of
from keepstep.programs import END_AT_ONCE, Disposition, Program, dispositions, end_with_parent, leave_signals_to_parent
from keepstep.systemcalls import check_system
from keepstep.trace.targets import check_target
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, read_private

if TYPE_CHECKING:
    from keepstep.launcher.cluster.weights import Publishers

DEFAULT_STREAMS = 2
DEFAULT_DEADLINE_S = 30.0
LOOK_S = 0.5


def main(arguments: list[str]) -> int:
    """Runs ``keepstep weights serve``, ``receive`` or ``load`` until a signal or an error. Returns the exit code."""
    parser, _commands = _parsers()
    chosen = parser.parse_args(arguments)
    if getattr(chosen, "parent", None) is not None:
        end_with_parent(chosen.parent, END_AT_ONCE)
        leave_signals_to_parent()
    if chosen.metrics is not None:
        check_target("--metrics", Path(chosen.metrics))
    stop = threading.Event()
    ends = [number for number, disposition in dispositions(Program.VIEW).items() if disposition is Disposition.END]
    for number in (*ends, END_AT_ONCE):
        signal.signal(number, lambda _number, _frame: stop.set())
    check_system()
    if chosen.command == "load":
        return _load(chosen, stop)
    secret = secret_of(chosen)
    return _serve(chosen, secret, stop) if chosen.command == "serve" else _receive(chosen, secret, stop)


def _parsers() -> tuple[argparse.ArgumentParser, tuple[argparse.ArgumentParser, ...]]:
    """Returns the parser of the command, and those of its own commands."""
    parser = argparse.ArgumentParser(
        prog="keepstep weights",
        description="Brings published weights to consumers on other nodes, and into inference servers.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="on the publishers' node: accept connections of other nodes")
    serve.add_argument("folder", help="the publishers' folder")
    serve.add_argument("--listen", required=True, metavar="HOST:PORT", help="address at which other nodes connect")
    serve.add_argument(
        "--peer", action="append", default=[], metavar="HOST:PORT",
        help="address of 'serve' on another node with publishers; may be repeated",
    )  # fmt: skip
    serve.add_argument(
        "--rank", type=int, help="of the publisher on this node that feeds consumers (default: the lowest there)"
    )
    serve.add_argument(
        "--fanout", type=int, metavar="N",
        help="how many nodes each node feeds; 1 is a chain (default: what is fastest by the measured bandwidth)",
    )  # fmt: skip
    receive = commands.add_parser("receive", help="on a node with consumers: act for the publishers")
    receive.add_argument("folder", help="folder in which consumers of this node look for publishers")
    receive.add_argument("--from", dest="root", metavar="HOST:PORT", help="where 'serve' listens")
    receive.add_argument("--listen", metavar="HOST:PORT", help="address at which this node feeds other nodes")
    receive.add_argument(
        "--streams", type=int, default=DEFAULT_STREAMS, metavar="N",
        help="TCP connections for buckets (default: %(default)s)",
    )  # fmt: skip
    receive.add_argument(
        "--keep", action="store_true", help="keep the last version in memory, for consumers that attach later"
    )
    receive.add_argument("--token-file", help="this node's token, as 'keepstep token --receiver' prints it")
    load = _add_load(commands)
    serve.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    for each in (serve, receive):
        add_secret_flag(each)
        each.add_argument(
            "--node", default=socket.gethostname(), help="unique name of this node (default: %(default)s)"
        )
        each.add_argument(
            "--job", metavar="HOST:PORT[,HOST:PORT]",
            help="endpoint of the job's controller, which knows the nodes with publishers",
        )  # fmt: skip
        each.add_argument(
            "--job-tls", default="auto", metavar="auto|off|FILES",
            help="the --tls of the job's nodes (default: %(default)s)",
        )  # fmt: skip
        each.add_argument("--tls", action="store_true", help="encrypt; set it on all nodes or on none")
    for each in (serve, receive, load):
        each.add_argument(
            "--metrics", metavar="FILE", help="for Prometheus' textfile collector: a name ending in .prom"
        )
        each.add_argument(
            "--deadline", type=float, default=DEFAULT_DEADLINE_S, metavar="SECONDS",
            help="time without progress after which a version fails, as the publishers have it (default: %(default)s)",
        )  # fmt: skip
    return parser, (serve, receive, load)


def _add_load(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    load = commands.add_parser("load", help="on a node with inference servers: have them load each version")
    load.add_argument("folder", help="the publishers' folder, or that of 'receive'")
    for kind, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        load.add_argument(
            f"--{kind}", action="append", default=[], metavar="URL", help=f"a {name} server; may be repeated"
        )
    load.add_argument(
        "--running", type=Running, choices=list(Running), default=Running.DRAIN,
        help="what becomes of running requests when a version comes: they are completed first, or go on with the new "
        "weights (default: %(default)s)",
    )  # fmt: skip
    load.add_argument(
        "--part", action="store_true",
        help="vLLM: the published tensors are a part of the model; layers that get no weights keep theirs",
    )  # fmt: skip
    load.add_argument("--api-key-file", metavar="FILE", help="a file with the servers' API key")
    load.add_argument("--admin-key-file", metavar="FILE", help="a file with SGLang's --admin-api-key")
    load.add_argument(
        "--memory",
        default="/dev/shm",
        metavar="FOLDER",
        help="where versions for SGLang are written (default: %(default)s)",
    )
    return load


def _wait(stop: threading.Event, is_over: Callable[[], bool] = lambda: False) -> None:
    """Waits until ``stop`` is set or ``is_over()``.

    It polls, because a signal that comes just before a wait without a timeout would go unnoticed.
    """
    while not (stop.wait(LOOK_S) or is_over()):
        pass


def _note(text: str) -> None:
    print(f"keepstep weights: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _load(chosen: argparse.Namespace, stop: threading.Event) -> int:
    from keepstep.engines.load import load_versions
    from keepstep.engines.updates import ServerUpdates

    keys = [
        None if path is None else read_private(Path(path), flag).strip()
        for path, flag in ((chosen.api_key_file, "--api-key-file"), (chosen.admin_key_file, "--admin-key-file"))
    ]
    servers: list[Server] = [
        VLLMServer(url, running=chosen.running, api_key=keys[0], is_part=chosen.part) for url in chosen.vllm
    ]
    servers += [SGLangServer(url, running=chosen.running, api_key=keys[0], admin_key=keys[1]) for url in chosen.sglang]
    with (
        ServerUpdates(servers, memory=chosen.memory, note=_note) as updates,
        metrics_in(chosen.metrics, lambda: server_metrics_text(updates), _note),
    ):
        load_versions(chosen.folder, updates, stop, deadline_s=chosen.deadline, note=_note)
    return 0


def _serve(chosen: argparse.Namespace, secret: Secret | None, stop: threading.Event) -> int:
    from keepstep.weights.remote.node import Links, WeightServer
    from keepstep.weights.remote.stream import split_address

    if secret is None:
        raise ConfigurationError(f"other nodes need a secret that they share with this one: {HOW_TO_SHARE}")
    if chosen.job is not None and chosen.peer:
        raise ConfigurationError(
            "--peer: the job's controller knows the other nodes; leave one of --peer and --job out"
        )
    for peer in chosen.peer:
        split_address(peer)
    if chosen.job is not None and split_address(chosen.listen)[0] in ("0.0.0.0", "::"):
        raise ConfigurationError(
            f"--listen {chosen.listen}: with --job, name the address by which others reach this node"
        )
    links = Links(is_encrypted=chosen.tls, deadline_s=chosen.deadline)
    server = WeightServer(
        Path(chosen.folder), chosen.listen, secret, node=chosen.node, rank=chosen.rank, fanout=chosen.fanout,
        links=links, note=_note,
    )  # fmt: skip
    _note(f"listening at {server.address}")
    publishers = None
    if chosen.job is not None:
        credentials = Credentials.of(secret, Claim(Role.PUBLISHER, chosen.node))
        publishers = _publishers(chosen, credentials, server.address, server.reach)
    else:
        server.reach(chosen.peer)
    with metrics_in(chosen.metrics, lambda: metrics_text(chosen.node, server.switch, server.nodes), _note):
        _wait(stop)
    if publishers is not None:
        publishers.close()
    server.close()
    return 0


def _receive(chosen: argparse.Namespace, secret: Secret | None, stop: threading.Event) -> int:
    from keepstep.weights.remote.node import Links, WeightReceiver

    if (chosen.root is None) == (chosen.job is None):
        raise ConfigurationError("one of --from and --job says where the publishers are found")
    links = Links(chosen.streams, chosen.tls, chosen.deadline)
    credentials = _credentials(chosen, secret)
    publishers = None
    if chosen.job is not None:
        publishers = _publishers(chosen, credentials, None, lambda addresses: None)
    receiver = WeightReceiver(
        Path(chosen.folder), chosen.root if publishers is None else publishers.after, credentials, secret=secret,
        listen=chosen.listen, links=links, keeps=chosen.keep, note=_note,
    )  # fmt: skip
    errors: list[KeepstepError] = []

    def run() -> None:
        try:
            receiver.run()
        except KeepstepError as error:
            errors.append(error)
        stop.set()

    thread = threading.Thread(target=run, name="keepstep-receive")
    thread.start()
    with metrics_in(chosen.metrics, lambda: metrics_text(chosen.node, receiver.switch, {}), _note):
        _wait(stop, lambda: publishers is not None and publishers.error is not None)
    receiver.close()
    thread.join()
    if publishers is not None:
        publishers.close()
        if publishers.error is not None:
            raise publishers.error
    if errors:
        raise errors[0]
    return 0


def _publishers(
    chosen: argparse.Namespace, credentials: Credentials, own_address: str | None, heard: Callable[[list[str]], None]
) -> Publishers:
    from keepstep.launcher.cluster.weights import Publishers  # here, because without --job gRPC is not needed
    from keepstep.transports.rpc.directory import DirectoryCaller

    endpoints = tuple(endpoint_of("--job", each) for each in chosen.job.split(","))
    caller = DirectoryCaller(endpoints, *believing(credentials, chosen.job_tls))
    return Publishers(caller, own_address, heard, _note)


def _credentials(chosen: argparse.Namespace, secret: Secret | None) -> Credentials:
    if chosen.token_file is not None:
        found = Credentials.parse(read_private(Path(chosen.token_file), "--token-file"), "--token-file")
    elif secret is not None:
        return Credentials.of(secret, Claim(Role.RECEIVER, chosen.node))
    else:
        raise ConfigurationError(
            f"a node that receives weights needs --token-file, or the job's secret: {HOW_TO_SHARE}"
        )
    if found.name != chosen.node:
        raise ConfigurationError(f"the token is that of node {found.name!r}, and this is {chosen.node!r}")
    return found
