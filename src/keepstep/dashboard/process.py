"""Starts and ends the dashboard's process."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepstep.dashboard.settings import ServerSettings
from keepstep.errors import ConfigurationError, PeerLost
from keepstep.programs import check_installed, ending, own_command
from keepstep.systemcalls import loopback

DEFAULT = "127.0.0.1:7117"
TOKEN = "viewer.token"
START_DEADLINE_S = 30.0
END_DEADLINE_S = 5.0
LAST_S = 1.0
"""How long a process that has closed its socket may take to exit, so that its exit code is known."""
UNREAD_MS = 20_000
"""The kernel ends a connection if sent data stays unacknowledged for this long (TCP_USER_TIMEOUT)."""
BACKLOG = 1024
"""Number of connections that may wait to be accepted: much more than the tabs of a browser."""
NEEDED = ("starlette", "uvicorn", "prometheus_client")


def listen(address: str, flag: str) -> socket.socket:
    """Opens a listening socket at HOST:PORT. If the default port is in use, it takes any free port.

    Args:
        address: the address from the user. A missing host means 127.0.0.1; port 0 means any free port.
        flag: the flag with the address, for error messages.

    Raises:
        ConfigurationError: the address is invalid or in use, or a package for the dashboard is not installed.
    """
    check_installed(flag, NEEDED, "dashboard")
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or loopback()
    if address == DEFAULT:
        host = loopback()
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{flag} {address}: must be HOST:PORT, for example {DEFAULT}")
    try:
        return _bound(host, int(port))
    except OSError as error:
        if address != DEFAULT:
            raise ConfigurationError(f"{flag} {address}: {error.strerror}") from error
    return _bound(host, 0)


def _bound(host: str, port: int) -> socket.socket:
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        listening.bind(where)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def serving(folder: Path, address: str, flag: str) -> Iterator[str]:
    """Serves the run in ``folder`` until the block exits. Yields the URL to open, with the token.

    The dashboard's process runs in its own session (setsid), and ends when this process ends, even by SIGKILL.

    Raises:
        ConfigurationError: see `listen`.
        PeerLost: the process did not start.
    """
    listening = listen(address, flag)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    token = _token(folder)
    settings = ServerSettings(
        folder=str(folder.absolute()), descriptor=listening.fileno(), token=token, cookie=f"keepstep-{port}"
    )
    with listening:
        process = subprocess.Popen(
            own_command("keepstep.dashboard"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
        _await_ready(process, f"http://{_reachable(host)}:{port}/healthz")
        if not _is_loopback(host):
            print(
                f"keepstep: the dashboard listens at {shown}:{port}, beyond this machine and without TLS: anyone "
                "who can read the network's traffic can read the token and the page",
                file=sys.stderr,
                flush=True,
            )
        yield f"http://{shown}:{port}/?token={token}"
    finally:
        _end(process)


def _await_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Waits until the process serves, with a single request: it stays in the socket's queue until then."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=START_DEADLINE_S):
            return
    except (OSError, urllib.error.URLError) as error:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(LAST_S)
        how = f"has ended: {ending(status)}" if status is not None else f"did not answer: {error}"
        raise PeerLost(f"the dashboard's process {how}") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _token(folder: Path) -> str:
    """Returns the viewer's token of a folder. It reuses the token in the folder, so that open pages stay logged in."""
    path = folder / TOKEN
    with contextlib.suppress(OSError):
        if (token := path.read_text(encoding="ascii").strip()) and path.stat().st_mode & 0o077 == 0:
            return token
    token = secrets.token_urlsafe(24)
    draft = path.with_name(TOKEN + ".draft")
    with contextlib.suppress(OSError):  # if the folder is read-only, only the URL has the token
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(token + "\n")
        draft.replace(path)
    return token


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _reachable(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host
