"""The worker's link to its agent: an inherited socket, and a thread that listens on it.

The training thread is often inside a collective or a kernel when an order arrives, so the listener handles what cannot
wait (`Stop`: close the groups) and leaves the rest to the training thread.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from keepstep.errors import PeerLost
from keepstep.protocol.messages import (
    OnceAnswered,
    OnceRequested,
    StoreAnswered,
    StoreRequested,
    WeightsObserved,
    WorkerOrder,
    WorkerReport,
    text,
)
from keepstep.transports.framing import FrameDecoder, frame

EXIT_ORPHANED = 3
_RECEIVE_BYTES = 1 << 16


class Link:
    """Sends reports, receives orders. Reports may be sent from any thread."""

    def __init__(self, connection: socket.socket, worker: int, decoder: FrameDecoder | None = None) -> None:
        """Args:
        connection: the socket.
        worker: number of this worker.
        decoder: has read from the socket before, and may hold the beginning of a message.
        """
        self.worker = worker
        self._decoder = decoder or FrameDecoder()
        self._connection = connection
        self._send_lock = threading.Lock()
        self._on_order: Callable[[WorkerOrder], None] | None = None
        self._requests: dict[int, Future[tuple[bytes, ...] | None]] = {}
        self._store_requests: dict[int, Future[StoreAnswered | None]] = {}
        """On the store of the job, which no generation ends."""
        self._claims: dict[int, Future[bool]] = {}
        self._numbers = itertools.count()

    def listen(self, on_order: Callable[[WorkerOrder], None]) -> None:
        """Starts the listener. ``on_order`` is given every order, in the listener's thread, and must not block."""
        self._on_order = on_order
        threading.Thread(target=self._listen, name="keepstep-link", daemon=True).start()

    def send(self, report: WorkerReport | WeightsObserved) -> None:
        """Sends a report. If the agent is gone the listener ends this process, so no error is raised here."""
        try:
            with self._send_lock:
                self._connection.sendall(frame(report))
        except OSError:
            pass  # the listener sees the end of the same stream

    def request(
        self, generation: int, operation: str, keys: tuple[str, ...], value: bytes, timeout_s: float
    ) -> tuple[bytes, ...]:
        """One call on the rendezvous store of ``generation``; blocks for ``get`` until all keys are there.

        Raises:
            PeerLost: the generation is over, or no answer came in time.
        """
        number = next(self._numbers)
        future: Future[tuple[bytes, ...] | None] = Future()
        self._requests[number] = future
        self.send(StoreRequested(self.worker, generation, number, operation, keys, value))
        try:
            values = future.result(timeout_s)
        except TimeoutError:
            raise PeerLost(
                f"rendezvous of generation {generation}: keys {keys} did not come in {timeout_s:g} s"
            ) from None
        finally:
            self._requests.pop(number, None)
        if values is None:
            raise PeerLost(f"rendezvous of generation {generation}: the generation is over")
        return values

    def post(self, generation: int, operation: str, keys: tuple[str, ...], value: bytes) -> None:
        """As `request`, for what has no answer that anyone needs."""
        self.send(StoreRequested(self.worker, generation, next(self._numbers), operation, keys, value))

    def ask_store(
        self, generation: int, operation: str, keys: tuple[str, ...], value: bytes
    ) -> tuple[int, Future[StoreAnswered | None]]:
        """One call on the store of the job, from any thread. Returns its number, for `forget_store`, and its answer.

        Args:
            generation: that in which the training thread waits between two steps, else 0.
            operation: see `keepstep.controller.jobstore`.
            keys: of the operation.
            value: of the operation.
        """
        number = next(self._numbers)
        future: Future[StoreAnswered | None] = Future()
        self._store_requests[number] = future
        self.send(StoreRequested(self.worker, generation, number, operation, keys, value))
        return number, future

    def forget_store(self, number: int, *, is_unanswered: bool) -> None:
        """A call on the store of the job is over. One that was given up unanswered waits no more."""
        self._store_requests.pop(number, None)
        if is_unanswered:
            self.send(StoreRequested(self.worker, 0, next(self._numbers), "job_cancel", (), str(number).encode()))

    def ask_once(self, operation: str, name: str, timeout_s: float) -> bool:
        """Asks the controller for what happens once in the job's life; whether it is this process that does it.

        Args:
            operation: claim or hold, which are answered; done or give_up, which are not.
            name: of what happens.
            timeout_s: for the answer.

        Raises:
            PeerLost: no answer came in time.
        """
        number = next(self._numbers)
        future: Future[bool] = Future()
        self._claims[number] = future
        self.send(OnceRequested(self.worker, number, operation, text(name)))
        try:
            return operation in ("claim", "hold") and future.result(timeout_s)
        except TimeoutError:
            raise PeerLost(f"once({name!r}): no answer from the controller within {timeout_s:g} s") from None
        finally:
            self._claims.pop(number, None)

    def fail_requests(self) -> None:
        """Ends every call that waits on the store: the generation is over."""
        for future in list(self._requests.values()):
            if not future.done():
                future.set_result(None)

    def _listen(self) -> None:
        while data := self._receive():
            for message in self._decoder.feed(data):
                if isinstance(message, StoreAnswered):
                    self._answered(message)
                    continue
                if isinstance(message, OnceAnswered):
                    if (claim := self._claims.get(message.request)) is not None:
                        claim.set_result(message.is_mine)
                    continue
                assert self._on_order is not None
                self._on_order(message)  # type: ignore[arg-type]  # the agent sends orders only
        print("keepstep: the agent of this worker is gone, so the worker ends", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHANED)

    def _answered(self, answer: StoreAnswered) -> None:
        future, of_the_job = self._requests.get(answer.request), self._store_requests.get(answer.request)
        with suppress(InvalidStateError):  # a failure has ended it at this moment
            if future is not None:
                future.set_result(answer.values)
            elif of_the_job is not None:
                of_the_job.set_result(answer)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_RECEIVE_BYTES)
        except OSError:
            return b""
