"""The protocol between an agent and its spawner, over a pair of sequenced-packet sockets.

The spawner is a small process that starts workers: it forks itself with torch already imported, or starts a fresh
interpreter. It reports how they ended.
"""

from __future__ import annotations

import socket
from typing import TypeAlias

import msgspec

from keepstep.errors import CallRefused, KeepstepError, LimitReached, RemoteProtocolError
from keepstep.systemcalls import memory_file

MAX_PACKET_BYTES = 4096
"""Limit of a report. A request travels in an anonymous file, as a script's arguments may be longer than any packet."""


class SpawnWorker(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Start a worker. The message carries its descriptors: link, tag page, lifeline, memory for snapshots, and
    stdout and stderr if redirected."""

    worker: int
    command: tuple[str, ...]
    """The script or module with its arguments; with ``raw``, a complete command line."""
    module: bool
    raw: bool
    environment: dict[str, str]
    redirect_stdout: bool
    redirect_stderr: bool


class SpawnerReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The spawner can start workers. ``worker_bytes`` is the measured memory that a fresh worker takes for itself."""

    worker_bytes: int


class SpawnerFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The system refuses a call that the spawner needs, so it ends. The reason has the call and a remedy."""

    reason: str
    is_limit: bool
    """Whether a limit is reached; otherwise the call is missing or forbidden."""

    @property
    def error(self) -> KeepstepError:
        """The error for the agent's side."""
        return LimitReached(self.reason) if self.is_limit else CallRefused(self.reason)


class WorkerSpawned(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The spawner has started the worker's process."""

    worker: int
    pid: int


class WorkerRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The system starts no process for the worker. The reason has the call and a remedy."""

    worker: int
    reason: str
    at_s: float


class WorkerExited(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The worker's process is gone. ``status`` as of `os.waitstatus_to_exitcode`: negative for a signal."""

    worker: int
    pid: int
    status: int
    has_dumped: bool
    """Whether it has left a core file."""
    at_s: float


SpawnerReport: TypeAlias = SpawnerReady | SpawnerFailed | WorkerSpawned | WorkerRefused | WorkerExited
_reports: msgspec.json.Decoder[SpawnerReport] = msgspec.json.Decoder(SpawnerReport)
_requests = msgspec.json.Decoder(SpawnWorker)

LINK_FD = 3
PAGE_FD = 4
LIFELINE_FD = 5
SNAPSHOTS_FD = 6
"""The numbers of a worker's descriptors: its link, tag page, lifeline, and memory for snapshots."""
_MAX_DESCRIPTORS = 7
"""The request's file, the four descriptors above, stdout and stderr."""


def send_request(endpoint: socket.socket, request: SpawnWorker, descriptors: list[int]) -> None:
    """Sends a request with its descriptors. The caller keeps its own copies, and must close them."""
    with open(memory_file("request"), "wb", buffering=0) as file:
        file.write(msgspec.json.encode(request))
        socket.send_fds(endpoint, [b"r"], [file.fileno(), *descriptors])


def receive_request(endpoint: socket.socket) -> tuple[SpawnWorker, list[int]] | None:
    """Waits for a request. Returns it with its descriptors, which the caller owns; None at the end of the stream."""
    try:
        data, descriptors, _flags, _address = socket.recv_fds(endpoint, 1, _MAX_DESCRIPTORS)
    except ConnectionResetError:  # the other end was closed before it had read all reports
        return None
    if not data:
        return None
    with open(descriptors[0], "rb") as file:
        file.seek(0)
        return _requests.decode(file.read()), list(descriptors[1:])


def decode_report(data: bytes) -> SpawnerReport:
    """Decodes the report in a packet.

    Raises:
        RemoteProtocolError: the packet contains no report.
    """
    try:
        return _reports.decode(data)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a spawner's report: {error}") from error
