"""The sockets in the run folder that serve ``keepstep status`` and the workers of a drill.

Only the owner of a socket can read and write it, and the server checks the peer's user id too. Sockets are opened
relative to the folder, because the path of a Unix socket is limited to 107 bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from keepstep.errors import ConfigurationError, PeerLost

SOCKET = "control.sock"
_DEADLINE_S = 10.0
_CREDENTIALS = struct.Struct("3i")


@asynccontextmanager
async def serve(
    run_dir: Path, answer: Callable[[], Any] | Callable[[], Awaitable[Any]], name: str = SOCKET
) -> AsyncIterator[None]:
    """Answers every connection with ``answer()`` as JSON, until the block exits.

    It closes connections of users other than the owner and root without an answer.

    Args:
        run_dir: the folder of the socket.
        answer: a function or a coroutine function; called on the event loop.
        name: file name of the socket.
    """

    async def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            if _peer_user(writer.get_extra_info("socket")) in (os.getuid(), 0):
                found = answer()
                writer.write(msgspec.json.encode(await found if isinstance(found, Awaitable) else found))
                with contextlib.suppress(ConnectionError, TimeoutError):
                    async with asyncio.timeout(_DEADLINE_S):
                        await writer.drain()

    descriptor = os.open(run_dir, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{descriptor}/{name}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        mask = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(connected, path)
            ours = os.stat(path).st_ino
        except OSError as error:  # a full disk, or a file system without sockets
            print(f"keepstep: nobody can ask for the status of this job: {error}", file=sys.stderr, flush=True)
            yield
            return
        finally:
            os.umask(mask)
        async with server:
            yield
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == ours:  # another controller may serve the run by now, with a socket of its own
                os.unlink(path)
    finally:
        os.close(descriptor)


def ask(run_dir: Path) -> Any:
    """Returns the status of the job that runs in ``run_dir``.

    Raises:
        ConfigurationError: no job runs there.
        PeerLost: the job did not answer in time.
    """
    try:
        with connect(run_dir) as connection:
            chunks = []
            while chunk := connection.recv(1 << 16):
                chunks.append(chunk)
        return msgspec.json.decode(b"".join(chunks))
    except TimeoutError:
        raise PeerLost(f"the job in {run_dir} did not answer within {_DEADLINE_S:g} s") from None
    except (ConnectionError, FileNotFoundError, msgspec.DecodeError) as error:
        why = "no job is running there" if run_dir.is_dir() else str(getattr(error, "strerror", error))
        raise ConfigurationError(f"{run_dir}: {why}") from None
    except OSError as error:
        raise ConfigurationError(f"{run_dir}: {error.strerror}") from error


def connect(run_dir: Path, name: str = SOCKET) -> socket.socket:
    """Connects to one of the sockets of a run. The caller must close the connection.

    Raises:
        OSError: no process listens there.
    """
    descriptor = os.open(run_dir, os.O_PATH | os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_DEADLINE_S)
        connection.connect(f"/proc/self/fd/{descriptor}/{name}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(descriptor)
    return connection


def _peer_user(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])
