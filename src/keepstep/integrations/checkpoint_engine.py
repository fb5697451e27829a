"""Consumers of checkpoint-engine take versions from keepstep: the sender is another one, the engines stay as they are.

It speaks the side of checkpoint-engine's parameter server to ``checkpoint_engine.worker.update_weights_from_ipc``,
which vLLM's worker extension and SGLang's ``/update_weights_from_ipc`` call. That protocol is pickle over ZeroMQ: any
process that reaches a consumer's socket runs code in it. So it has to be asked for by name, its sockets are files in a
folder of this user alone, and nothing is unpickled here. A version has arrived whole before a consumer hears of it. The
protocol itself has no second copy: a consumer that fails half-way holds parts of two versions.

Sent, each as one pickled message that is answered by an empty one (or by text, the consumer's error)::

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

from keepstep.errors import ConfigurationError, LoadError, SubscriberLost, UsageError
from keepstep.weights.inbox import VersionInbox
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.weights.subscriber import DEFAULT_DEADLINE_S

ALIGNMENT = 256
"""As checkpoint-engine aligns tensors in its buffer, in bytes: a view of another dtype needs some alignment."""

ABORT_MS = 1000
"""How long the word that an update was broken off may take to a consumer of the same machine, in milliseconds."""

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A function and its arguments, by which a consumer maps the buffer."""


def cuda_handle(buffer: torch.Tensor) -> Handle:
    """That of a buffer on a GPU, by CUDA's interprocess memory handles. Not tried on a GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    function, arguments = reduce_tensor(buffer)
    return function, arguments


class ConsumerSocket:
    """One consumer, which connects to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, answer_s: float) -> None:
        """Args:
        context: of ZeroMQ; the caller's.
        path: of the socket, short, in a folder of this user alone.
        answer_s: how long an answer may take.
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
            SubscriberLost: none came in time.
            LoadError: the consumer's error.
        """
        try:
            self._socket.send(pickle.dumps(content))
            answer = self._socket.recv()
        except zmq.Again:
            raise SubscriberLost(f"the consumer at {self.address} has not answered in time") from None
        if answer:
            raise LoadError(f"the consumer at {self.address}: {answer[:2000].decode(errors='replace')}")

    def abort(self) -> None:
        """Has the consumer end, if it listens: it would wait for ever."""
        with contextlib.suppress(zmq.ZMQError):  # it has not answered, and cannot be told
            self._socket.send(pickle.dumps(RuntimeError("the update was broken off")), zmq.NOBLOCK)
            self._socket.setsockopt(zmq.LINGER, ABORT_MS)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


class CheckpointEngineSender:
    """Brings versions to the consumers of one machine, in the place of checkpoint-engine's parameter server."""

    def __init__(
        self,
        folder: str | Path,
        consumers: Sequence[str],
        request: Callable[[dict[str, str]], None],
        *,
        buffers: Callable[[int], tuple[torch.Tensor, Handle]],
        pickled: bool = False,
        device: int = 0,
        answer_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Args:
        folder, device: see `keepstep.Subscriber`.
        consumers: their devices, as checkpoint-engine names them (``GPU-...``).
        request: has all consumers begin, and returns when they are through: it is given the address of each one's
            socket, by device, and calls what the engine has for it (SGLang: POST of ``zmq_handles``).
        buffers: makes a buffer of so many bytes that a consumer can map, and its handle (`cuda_handle`).
        pickled: has to be True: consumers unpickle what they are sent.
        answer_s: how long a consumer may take for one bucket, and for its start.

        Raises:
            ConfigurationError: ``pickled`` is not True.
        """
        if pickled is not True:
            raise ConfigurationError("checkpoint-engine's protocol is pickle: pass pickled=True to speak it")
        self._consumers, self._request, self._buffers, self._answer_s = consumers, request, buffers, answer_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = tempfile.TemporaryDirectory(prefix="keepstep-ce-")  # mode 0700
        self._numbers = itertools.count()
        """Of sockets: none is used again, so a consumer that was left behind meets no later update."""
        self._inbox = VersionInbox(folder, device=device, name="checkpoint-engine's consumers")
        self.version: int | None = None
        """The last that all consumers have."""

    def update(self, timeout_s: float, bucket_bytes: int = 64 << 20) -> int:
        """Waits for a version and brings it to all consumers; returns its number.

        Args:
            timeout_s: for the version.
            bucket_bytes: how much is sent at a time; more where a tensor is larger.

        Raises:
            SubscriberLost, LoadError: a consumer is gone or failed. It holds parts of two versions.
            KeepstepError: no version came in time, and why if that is known.
        """
        version, tensors = self._inbox.take(timeout_s)
        largest = max((_aligned(tensor) for tensor in tensors.values()), default=0)
        buffer, handle = self._buffers(max(bucket_bytes, largest))
        sockets = {
            name: ConsumerSocket(self._context, Path(self._sockets.name) / f"{next(self._numbers)}", self._answer_s)
            for name in self._consumers
        }
        asking = _Asking(self._request, {name: socket.address for name, socket in sockets.items()})
        try:
            for content in itertools.chain([handle], _buckets(tensors, buffer), [None, None]):
                for socket in sockets.values():
                    socket.tell(content)
        except BaseException:  # also where the caller is interrupted: no consumer is left waiting
            for socket in sockets.values():
                socket.abort()
            raise
        finally:
            for socket in sockets.values():
                socket.close()
        asking.wait(self._answer_s)
        self.version = version
        return version

    def close(self) -> None:
        """Leaves the publisher. Consumers keep what they have."""
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
    """The engine's own call, which lasts as long as the update."""

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
        SubscriberLost: the call has not returned.
        LoadError: it failed.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise SubscriberLost("the engine has loaded a version, but its request has not ended")
        if self._error is not None:
            raise LoadError(f"the engine's request failed: {self._error!r}") from self._error


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _buckets(tensors: dict[str, torch.Tensor], buffer: torch.Tensor) -> Any:
    """Fills the buffer again and again, and says what is in it. It has been read when the next one is asked for."""
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
