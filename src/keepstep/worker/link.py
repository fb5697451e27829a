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
import traceback
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
from keepstep.systemcalls import refusal
from keepstep.transports.framing import FrameDecoder, frame

EXIT_ORPHANED = 3
_RECEIVE_BYTES = 1 << 16


class Link:
    """Sends reports, receives orders. Reports may be sent from any thread."""

    def __init__(self, connection: socket.socket, worker: int, decoder: FrameDecoder | None = None) -> None:
        """Args:
        connection: the socket.
        worker: number of this worker.
        decoder: a decoder that has read from the socket before; it may hold the beginning of a message.
        """
        self.worker = worker
        self._decoder = decoder or FrameDecoder()
        self._connection = connection
        self._send_lock = threading.Lock()
        self._on_order: Callable[[WorkerOrder], None] | None = None
        self._requests: dict[int, Future[tuple[bytes, ...] | None]] = {}
        self._store_requests: dict[int, Future[StoreAnswered | None]] = {}
        """Requests to the job's default store, which outlives generations."""
        self._claims: dict[int, Future[tuple[bool, bytes]]] = {}
        self._numbers = itertools.count()

    def listen(self, on_order: Callable[[WorkerOrder], None]) -> None:
        """Starts the listener's thread. It calls ``on_order``, which must not block, with every order."""
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
        """Performs an operation on the rendezvous store of ``generation``. For ``get``, blocks until all keys are set.

        Raises:
            PeerLost: the generation is over, or no answer came within ``timeout_s`` seconds.
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
        """Same as `request`, but does not wait for an answer."""
        self.send(StoreRequested(self.worker, generation, next(self._numbers), operation, keys, value))

    def ask_store(
        self, generation: int, operation: str, keys: tuple[str, ...], value: bytes
    ) -> tuple[int, Future[StoreAnswered | None]]:
        """Begins an operation on the job's default store, from any thread.

        Args:
            generation: the current one if the training thread waits and a failure cannot interrupt it, else 0.
            operation: see `keepstep.controller.jobstore`.
            keys: keys of the operation.
            value: value of the operation.

        Returns:
            the number of the operation, for `forget_store`, and a future of the answer.
        """
        number = next(self._numbers)
        future: Future[StoreAnswered | None] = Future()
        self._store_requests[number] = future
        self.send(StoreRequested(self.worker, generation, number, operation, keys, value))
        return number, future

    def forget_store(self, number: int, *, is_unanswered: bool) -> None:
        """Forgets an operation on the job's default store. Cancels it at the controller if it is unanswered."""
        self._store_requests.pop(number, None)
        if is_unanswered:
            self.send(StoreRequested(self.worker, 0, next(self._numbers), "job_cancel", (), str(number).encode()))

    def ask_once(self, operation: str, name: str, timeout_s: float, value: bytes = b"") -> tuple[bool, bytes]:
        """Sends a request of `Session.once` or `Session.agree` to the controller.

        Args:
            operation: claim, hold or agree, which the controller answers; done or give_up, which it does not.
            name: name of the action, or of the value.
            timeout_s: seconds to wait for the answer.
            value: what this process proposes in agree.

        Returns:
            whether this process performs the action, or its proposal was the first; and the agreed value.

        Raises:
            PeerLost: no answer came in time.
        """
        number = next(self._numbers)
        future: Future[tuple[bool, bytes]] = Future()
        self._claims[number] = future
        self.send(OnceRequested(self.worker, number, operation, text(name), value))
        try:
            return (False, b"") if operation in ("done", "give_up") else future.result(timeout_s)
        except TimeoutError:
            raise PeerLost(f"{operation} of {name!r}: no answer from the controller within {timeout_s:g} s") from None
        finally:
            self._claims.pop(number, None)

    def fail_requests(self) -> None:
        """Ends every request that waits for the rendezvous store: the generation is over."""
        for future in list(self._requests.values()):
            with suppress(InvalidStateError):  # the answer has come, perhaps at the same time
                future.set_result(None)

    def _listen(self) -> None:
        """Handles what the agent sends. Ends the process when the agent is gone, or sends what cannot be handled."""
        try:
            self._handle_all()
        except BaseException as error:  # of any kind: a rank that hears no order any more must not train on
            if (refused := refusal(error)) is None:
                traceback.print_exc()
            why = "" if refused is None else f": {refused}"
            print(
                f"keepstep: this worker cannot handle what its agent sends, so it ends{why}",
                file=sys.stderr,
                flush=True,
            )
        else:
            print("keepstep: the agent of this worker is gone, so the worker ends", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHANED)

    def _handle_all(self) -> None:
        while data := self._receive():
            for message in self._decoder.feed(data):
                if isinstance(message, StoreAnswered):
                    self._answered(message)
                    continue
                if isinstance(message, OnceAnswered):
                    if (claim := self._claims.get(message.request)) is not None:
                        claim.set_result((message.is_mine, message.value))
                    continue
                assert self._on_order is not None
                self._on_order(message)  # type: ignore[arg-type]  # the agent sends orders only

    def _answered(self, answer: StoreAnswered) -> None:
        future, of_the_job = self._requests.get(answer.request), self._store_requests.get(answer.request)
        with suppress(InvalidStateError):  # a failure has ended the request at the same time
            if future is not None:
                future.set_result(answer.values)
            elif of_the_job is not None:
                of_the_job.set_result(answer)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_RECEIVE_BYTES)
        except OSError:
            return b""
