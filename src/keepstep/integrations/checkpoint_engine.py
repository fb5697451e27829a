"""Sends keepstep's versions to consumers of checkpoint-engine. The inference engines need no change.

The sender takes the place of checkpoint-engine's parameter server. Its peer is
``checkpoint_engine.worker.update_weights_from_ipc``, which vLLM's worker extension and SGLang's
``/update_weights_from_ipc`` call.

Security: the protocol is pickle over ZeroMQ, so any process that reaches a consumer's socket can run code in the
consumer. Therefore the caller must pass ``pickled=True``, the sockets are files in a folder of mode 0700, and the
sender unpickles nothing.

The sender notifies the consumers only after it has received a complete version, and while the server computes no
request. The protocol has no second copy of the weights: if a consumer fails halfway, the server holds parts of two
versions, and stays out of service until the next whole one.

Messages from the sender, each pickled. The consumer answers with an empty message, or with the text of its error::

    handle of a buffer   for each bucket [{name, dtype, shape, offset}]   None: buffer released   None: post hook
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import zmq

from keepstep.engines.server import Server
from keepstep.engines.watcher import ChangeWatcher
from keepstep.errors import ConfigurationError, KeepstepError, LoadError, SubscriberLost, UsageError
from keepstep.weights.inbox import VersionInbox
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.weights.subscriber import DEFAULT_DEADLINE_S

ALIGNMENT = 256
"""Bytes; checkpoint-engine's own alignment of tensors in its buffer. A view of another dtype must be aligned."""

ABORT_MS = 1000
"""ZeroMQ's linger time for the abort message to a consumer on this machine, in milliseconds."""

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A function and its arguments; a consumer calls it to map the buffer."""


def cuda_handle(buffer: torch.Tensor) -> Handle:
    """Returns the handle of a buffer in GPU memory: a CUDA IPC memory handle. Not tested on a GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    function, arguments = reduce_tensor(buffer)
    return function, arguments


class ConsumerSocket:
    """The ZeroMQ REQ socket for one consumer. The sender binds it, and the consumer connects."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, answer_s: float) -> None:
        """Args:
        context: the ZeroMQ context; the caller owns it.
        path: short path of the socket, in a folder that only this user can access.
        answer_s: timeout of one send, and of one answer, in seconds.
        """
        self.address = f"ipc://{path}"
        self._socket = context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            self._socket.setsockopt(option, math.ceil(answer_s * 1000))
        self._socket.bind(self.address)

    def tell(self, content: object) -> None:
        """Sends one message and waits for its answer.

        Raises:
            SubscriberLost: the consumer did not answer in time.
            LoadError: the consumer answered with an error.
        """
        try:
            self._socket.send(pickle.dumps(content))
            answer = self._socket.recv()
        except zmq.Again:
            raise SubscriberLost(f"the consumer at {self.address} has not answered in time") from None
        if answer:
            raise LoadError(f"the consumer at {self.address}: {answer[:2000].decode(errors='replace').strip()}")

    def abort(self) -> None:
        """Sends the consumer an error, so that it does not wait forever. Does nothing if an answer is outstanding."""
        with contextlib.suppress(zmq.ZMQError):  # a REQ socket cannot send before the last answer has come
            self._socket.send(pickle.dumps(RuntimeError("the sender aborted the update")), zmq.NOBLOCK)
            self._socket.setsockopt(zmq.LINGER, ABORT_MS)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


class CheckpointEngineSender:
    """Sends versions to the consumers on one machine, in place of checkpoint-engine's parameter server."""

    def __init__(
        self,
        folder: str | Path,
        consumers: Sequence[str],
        request: Callable[[dict[str, str]], None],
        *,
        server: Server,
        buffers: Callable[[int], tuple[torch.Tensor, Handle]],
        pickled: bool = False,
        device: int = 0,
        answer_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Args:
        folder, device: see `keepstep.Subscriber`.
        consumers: device of each consumer, as checkpoint-engine names it (``GPU-...``).
        request: starts the update in the engine and returns when the engine has finished it. It gets the ZeroMQ address
            for each device, and calls the engine's own interface (SGLang: POST of ``zmq_handles``).
        server: the server to which the consumers belong. It is paused during an update, and its caches are discarded.
        buffers: allocates a buffer of a given number of bytes that a consumer can map. It returns the buffer and its
            handle (`cuda_handle`).
        pickled: must be True, to confirm that the consumers may unpickle messages.
        answer_s: timeout for a consumer to connect, and to answer each message, in seconds.

        Raises:
            ConfigurationError: ``pickled`` is not True, or another process on this machine drives the server.
        """
        if pickled is not True:
            raise ConfigurationError("checkpoint-engine's protocol is pickle: pass pickled=True to speak it")
        self._consumers, self._request, self._buffers, self._answer_s = consumers, request, buffers, answer_s
        self._server = server
        self._watcher = ChangeWatcher([server])
        self._has_parts = False
        """Whether the server may hold parts of two versions. It then stays paused."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = tempfile.TemporaryDirectory(prefix="keepstep-ce-")  # mode 0700
        self._numbers = itertools.count()
        """Numbers of the sockets. Each is used once, so a consumer of an aborted update cannot join a later one."""
        self._inbox = VersionInbox(folder, device=device, name="checkpoint-engine's consumers")
        self.version: int | None = None
        """The last version that all consumers have loaded; None before the first."""

    def update(self, timeout_s: float, bucket_bytes: int = 64 << 20) -> int:
        """Waits for the next version, sends it to all consumers, and returns its number.

        Args:
            timeout_s: how long to wait for a version.
            bucket_bytes: size of the buffer. The sender allocates more if a single tensor is larger.

        Raises:
            SubscriberLost, LoadError: a consumer, the server or ``request`` failed, or did not answer in time. If the
                consumers may hold parts of two versions, the message says that the server is out of service.
            KeepstepError: no version arrived in time; with the reason, if known.
        """
        version, tensors = self._inbox.take(timeout_s)
        largest = max((_aligned(tensor) for tensor in tensors.values()), default=0)
        buffer, handle = self._buffers(max(bucket_bytes, largest))
        sockets = {
            name: ConsumerSocket(self._context, Path(self._sockets.name) / f"{next(self._numbers)}", self._answer_s)
            for name in self._consumers
        }
        try:
            self._pause()
        except BaseException:  # also on KeyboardInterrupt: the sockets are files
            for socket in sockets.values():
                socket.close()
            raise
        try:
            self._has_parts = True
            asking = _Asking(self._request, {name: socket.address for name, socket in sockets.items()})
            for content in itertools.chain([handle], _buckets(tensors, buffer), [None, None]):
                for socket in sockets.values():
                    socket.tell(content)
            asking.wait(self._answer_s)
        except BaseException as error:  # also on KeyboardInterrupt: no consumer must keep waiting
            for socket in sockets.values():
                socket.abort()
            if isinstance(error, KeepstepError):
                raise type(error)(f"{error}; {self._server} is out of service until the next whole version") from error
            raise
        finally:
            for socket in sockets.values():
                socket.close()
        self._has_parts = False
        with self._watcher.watching(self._server):
            self._server.resume()
        self.version = version
        return version

    def _pause(self) -> None:
        if self._has_parts:  # whatever comes, nobody resumes it
            self._server.pause()
            return
        with self._watcher.watching(self._server):
            try:
                self._server.pause()
            except BaseException:  # also on KeyboardInterrupt: nothing was sent yet, so requests may go on
                with contextlib.suppress(KeepstepError):
                    self._server.resume()
                raise

    def close(self) -> None:
        """Disconnects from the publisher. The consumers keep their weights."""
        self._watcher.close()
        self._inbox.close()
        self._context.term()
        self._sockets.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Asking:
    """Runs the engine's own call in a thread. The call lasts as long as the update."""

    def __init__(self, request: Callable[[dict[str, str]], None], addresses: dict[str, str]) -> None:
        self._error: Exception | None = None

        def run() -> None:
            try:
                request(addresses)
            except Exception as error:  # the user's code; raised by wait()
                self._error = error

        self._thread = threading.Thread(target=run, name="keepstep-checkpoint-engine", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Raises:
        SubscriberLost: the call has not returned in time.
        LoadError: the call raised an exception.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise SubscriberLost("the engine has loaded a version, but its request has not ended")
        if self._error is not None:
            raise LoadError(f"the engine's request failed: {self._error!r}") from self._error


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _buckets(tensors: dict[str, torch.Tensor], buffer: torch.Tensor) -> Any:
    """Fills the buffer and yields the metadata of its tensors, repeatedly.

    The consumers must have read the buffer before the caller takes the next item.
    """
    metas: list[dict[str, object]] = []
    offset = 0
    for name, tensor in tensors.items():
        if metas and offset + _aligned(tensor) > buffer.numel():
            yield metas
            metas, offset = [], 0
        if tensor.nbytes > buffer.numel():
            raise UsageError(f"'{name}' does not fit into the buffer")
        buffer[offset : offset + tensor.nbytes].copy_(byte_view(tensor.contiguous()).view(-1))
        metas.append({"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": offset})
        offset += _aligned(tensor)
    if metas:
        yield metas
