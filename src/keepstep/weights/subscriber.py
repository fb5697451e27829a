"""Consuming weights: the side of an inference engine or another consumer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import (
    BaseMismatch,
    ChecksumMismatch,
    ConfigurationError,
    KeepstepError,
    LoadError,
    PeerLost,
    PublisherLost,
    RemoteProtocolError,
    StaleGeneration,
    UsageError,
    WeightsNotReady,
)
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.consumer import Condition, ConsumerState
from keepstep.protocol.transfer.layout import Layout
from keepstep.protocol.transfer.messages import AnyTransferMessage
from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.channels.connection import Connection, ConnectionEnded, wait
from keepstep.weights.channels.deltas import checksum_of_version
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import RETRY_S, dial, dial_any, listener_path
from keepstep.weights.device.verdicts import error_of
from keepstep.weights.memory.blocks import Weights
from keepstep.weights.memory.buffers import SharedSlots
from keepstep.weights.memory.copies import checksum_in
from keepstep.weights.memory.mapping.mapped import Mapped, ReturnedWeights
from keepstep.weights.memory.pieces import CHECKSUM_BYTES
from keepstep.weights.memory.targets import FunctionTarget, Load, Target, TensorTarget
from keepstep.weights.spans import MAX_REPORTED, Spans

DEFAULT_DEADLINE_S = 30.0
CONSUMER_PATIENCE_S = 0.95
"""Added to the deadline for the device, so that device and coordinator, which see more, name the culprit first."""


class _Update:
    """The current update from this consumer's point of view."""

    def __init__(self, began: msg.UpdateBegan, buckets: dict[int, Bucket]) -> None:
        self.number, self.version = began.update, began.version
        self.missing = dict(buckets)
        self.base = began.base
        self.checksums: dict[int, bytes] = {}
        self.has_failed = False


class Subscriber:
    """One consumer of published weights, attached to one device of its node.

    Call `receive` regularly, or `start` a thread that does. Use the weights inside `using`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        into: Weights | Mapped | None = None,
        load: Load | None = None,
        atomic: bool = True,
        device: int | None = None,
        name: str | None = None,
        delta: bool = False,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Args:
        folder: the publishers' folder.
        into: the destination: a module, or tensors (or blocks of them) by name. The objects stay the same. A name map
            computes them from the published ones.
        load: a function that gets the name and the complete tensor, instead of ``into``. It must not keep the tensor.
        atomic: with ``into``: assemble a new version in a second set of tensors, and swap the sets when it is complete.
            Otherwise overwrite the current version, which cannot be used meanwhile.
        device: rank of the publisher to attach to; None: the lowest one on this node.
        name: for messages; by default the process id. A newer consumer with the same name replaces it.
        delta: receive only changes since the last version. No other code may write to ``into``.
        deadline_s: time without progress after which an update fails; use the publishers' value.

        Raises:
            ConfigurationError: neither or both of ``into`` and ``load`` are given; or ``delta`` with ``load``, or with
                quantized tensors, which need unchanged values as well; or the name map is invalid: AmbiguousName, and
                for quantized tensors UnknownTensor, ShapeMismatch, DtypeMismatch.
        """
        if (into is None) == (load is None):
            raise ConfigurationError("a subscriber needs one of into=... and load=...")
        if delta and into is None:
            raise ConfigurationError("delta=True needs into=..., for a function keeps nothing of what has come before")
        self._target: Target
        if into is not None:
            self._target = TensorTarget(into, atomic, delta)
        else:
            assert load is not None
            self._target = FunctionTarget(load)
        self.name = name or f"process {os.getpid()}"
        self.spans = Spans()
        """The times at which this consumer loaded buckets in the latest update."""
        self.last_error: KeepstepError | None = None
        """The error of the latest update; None after a version was committed."""
        self.only_version: int | None = None
        """The only version that this consumer accepts; None accepts any."""
        self._folder = Path(folder)
        path = listener_path(self._folder, device or 0)
        self._path = None if device is None else path
        self._device, self._deadline_s, self._delta = device or 0, deadline_s, delta
        self._state = ConsumerState(atomic and into is not None)
        self._changed = threading.Condition()  # reentrant
        """Guards the state that users of the weights read."""
        self._num_users = 0
        self._is_switching = False
        self._generation = 0
        self._connection: Connection | None = None
        self._slots = SharedSlots()
        """Slots of its device's buffer; with buffers in host memory, also of the other devices' buffers."""
        self._update: _Update | None = None
        self._layout: Layout | None = None
        self._buckets: dict[int, Bucket] = {}
        self._stop = CancelToken()
        self._thread: threading.Thread | None = None

    # ---- use --------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The last complete version; None before the first."""
        return self._state.version

    @property
    def condition(self) -> Condition:
        """The current state of the weights."""
        return self._state.condition

    @property
    def is_attached(self) -> bool:
        """Whether this consumer is connected to a publisher."""
        return self._connection is not None

    @contextlib.contextmanager
    def using(self, timeout_s: float | None = None, *, version: int | None = None) -> Iterator[int]:
        """Keeps the current version in use, and yields its number; a new version waits until the block ends.

        Args:
            timeout_s: how long to wait while a new version is swapped in; by default the deadline.
            version: waits for exactly this one, which may be lower than the current one after a job went back to it.

        Raises:
            WeightsNotReady: there is no complete version, or not the requested one, or it is being overwritten.
            WeightsPartiallyUpdated: an update was interrupted halfway.
        """
        with self._changed:
            patience_s = self._deadline_s if timeout_s is None else timeout_s
            if not self._changed.wait_for(lambda: not self._is_switching and self._has(version), patience_s):
                if not self._has(version):
                    raise WeightsNotReady(f"version {version} did not come within {patience_s:g} s: {self._presence}")
                raise WeightsNotReady("a new version waits to take its place")
            present = self._state.check_usable()
            self._num_users += 1
        try:
            yield present
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    def _has(self, version: int | None) -> bool:
        return version is None or self._state.version == version

    @property
    def _presence(self) -> str:
        return "there is none yet" if self.version is None else f"version {self.version} is there"

    def wait_for(self, version: int, timeout_s: float) -> int:
        """Waits for this version or a later one, and returns it. For use with `start`.

        Raises:
            KeepstepError: it did not arrive in time; with the reason, if known.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self.version is not None and self.version >= version, timeout_s):
                assert self.version is not None
                return self.version
        raise self.last_error or WeightsNotReady(f"version {version} did not come within {timeout_s:g} s")

    def as_published(self) -> ReturnedWeights:
        """The current version, under the names and in the blocks in which it was published. Call it inside `using`.

        Raises:
            DtypeMismatch: a tensor was cast or quantized on its way here.
            UsageError: this subscriber passes its weights to a function, and holds none.
        """
        if not isinstance(self._target, TensorTarget):
            raise UsageError("a subscriber with load=... holds no weights that it could give back")
        return self._target.as_published()

    # ---- life -------------------------------------------------------------------------------------------------------

    def attach(self, timeout_s: float) -> None:
        """Waits until the publisher exists and has accepted this consumer; `receive` and `start` do so, too.

        Raises:
            PeerLost: no publisher was available in time.
            RemoteProtocolError: the publisher refused this consumer.
        """
        self._attached_connection(time.monotonic() + timeout_s)

    def start(self) -> None:
        """Starts a thread that receives versions until `close`."""
        self._thread = threading.Thread(target=self._attend, name="keepstep-subscriber", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnects from the publisher. The weights do not change."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._leave()
        self._stop.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _attend(self) -> None:
        while True:
            try:
                self.receive(3600.0)
            except Cancelled:
                return
            except KeepstepError:  # noted in last_error; the next version may come
                try:
                    wait([], time.monotonic() + RETRY_S, self._stop)
                except Cancelled:
                    return

    def receive(self, timeout_s: float) -> int:
        """Receives in the calling thread until a version is committed; returns it.

        Raises:
            PublisherLost: nothing arrived in time, the publisher is gone, or the update was aborted; call it again.
            LoadError: ``load`` raised; its exception is the cause.
            ChecksumMismatch: the received bytes differ from the sent ones.
            StateMismatch: the weights do not match the published ones.
            StaleGeneration: the publisher is of a generation that is over.
            WeightsNotReady: the weights were in use for so long that the version could not take their place.
        """
        until_s = time.monotonic() + timeout_s
        try:
            while True:
                connection = self._attached_connection(until_s)
                message = self._next(connection, until_s)
                if message is not None and (version := self._hear(connection, message)) is not None:
                    return version
        except KeepstepError as error:
            self._note(error)
            raise

    def _note(self, error: KeepstepError) -> None:
        with self._changed:
            self.last_error = error
            self._changed.notify_all()

    def _attached_connection(self, until_s: float) -> Connection:
        """Returns the connection to the device. Opens one if there is none."""
        if self._connection is None:
            introduction = msg.SubscriberCalled(
                self.name, self._target.wants, self._generation, self.version, self._delta, None
            )
            if self._path is None:
                connection, welcomed = dial_any(self._folder, introduction, until_s, self._stop)
                self._device = welcomed.rank
            else:
                connection, welcomed = dial(self._path, introduction, f"rank {self._device}", until_s, self._stop)
            self._slots.add(0, attach_buffer(welcomed.buffer, connection))
            self._connection, self._generation = connection, max(self._generation, welcomed.generation)
        return self._connection

    def _next(self, connection: Connection, until_s: float) -> AnyTransferMessage | None:
        """Waits for the next message. During an update a shorter deadline applies."""
        if self._update is not None:
            until_s = time.monotonic() + self._deadline_s + CONSUMER_PATIENCE_S
        if not wait([connection], until_s, self._stop):
            what = "in the middle of an update" if self._update is not None else "yet"
            if self._update is not None:
                self._leave(f"rank {self._device} showed nothing")
            raise PublisherLost(f"rank {self._device} has sent nothing {what}")
        try:
            return connection.receive_now()
        except PeerLost as error:
            self._leave(str(error))
            raise PublisherLost(str(error)) from None
        except RemoteProtocolError as error:
            self._leave(str(error))
            raise

    def _tell(self, connection: Connection, message: AnyTransferMessage) -> None:
        """Sends a message. If the publisher is gone, the next receive returns its last message or raises."""
        try:
            connection.send(message, time.monotonic() + self._deadline_s)
        except ConnectionEnded:
            pass
        except PeerLost as error:
            self._leave(str(error))
            raise PublisherLost(str(error)) from None

    def _leave(self, reason: str = "this subscriber was closed") -> None:
        """Closes the connection. A running update is dropped."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._fail(reason)
        self._layout = None
        self._slots.close()

    # ---- an update --------------------------------------------------------------------------------------------------

    def _hear(self, connection: Connection, message: AnyTransferMessage) -> int | None:
        """Handles a message. Returns the version if the message committed one."""
        update = self._update
        match message:
            case msg.BufferShared(first_slot=first_slot, place=place):
                self._layout = None  # the copies prepared for the former slots are invalid
                self._slots.add(first_slot, attach_buffer(place, connection))
            case msg.UpdateBegan():
                self._begin(connection, message)
            case msg.BucketReady(update=number) if update is not None and number == update.number:
                if not update.has_failed:
                    self._load(connection, update, message)
            case msg.BucketUnchanged(update=number) if update is not None and number == update.number:
                if not update.has_failed:
                    self._keep(connection, update, message)
            case msg.VersionCommitted(update=number) if update is not None and number == update.number:
                self._commit(connection, update)
                return update.version
            case msg.UpdateAborted():
                self._fail(message.reason)
                raise error_of(message, "an update broke off")
            case msg.BucketReady() | msg.BucketUnchanged() | msg.MovementSeen() | msg.VersionCommitted():
                pass
            case other:
                self._leave("the protocol was broken")
                raise RemoteProtocolError(f"rank {self._device} sent {other!r:.80}")
        return None

    def _begin(self, connection: Connection, began: msg.UpdateBegan) -> None:
        if began.generation < self._generation:
            self._leave("the publisher's generation is over")
            raise StaleGeneration(
                f"rank {self._device} publishes for generation {began.generation}, this is {self._generation}"
            )
        self._generation = began.generation
        self._update = None
        if self.only_version not in (None, began.version):
            reason = f"version {began.version} comes, and version {self.only_version} is wanted"
            self._tell(connection, msg.LoadFailed(began.update, reason))
            raise BaseMismatch(reason)
        if began.layout != self._layout:
            buckets = began.layout.plan().buckets
            self._layout = began.layout
            self._buckets = {bucket.index: bucket for bucket in buckets if began.reader in bucket.readers}
        assert self._layout is not None
        self._update = update = _Update(began, self._buckets)
        self.spans = Spans()
        with self._changed:
            if not self._state.atomic and not self._is_free():
                self._refuse(connection, update, "its weights are in use")
                raise WeightsNotReady(f"version {update.version} could not come: the weights were in use all the time")
            self._state.begin(began.version)
        self._target.prepare(self._layout, self._layout.readers[began.reader].parts)
        self._finish_if_whole(connection, update)

    def _is_free(self) -> bool:
        """Waits until the weights are not in use. New users wait meanwhile. Call it with ``_changed`` held."""
        self._is_switching = True
        is_free = self._changed.wait_for(lambda: not self._num_users, self._deadline_s)
        self._is_switching = False
        self._changed.notify_all()
        return is_free

    def _load(self, connection: Connection, update: _Update, ready: msg.BucketReady) -> None:
        bucket = update.missing.pop(ready.bucket, None)
        slot = None if bucket is None else self._slots.find(ready.slot, bucket.num_bytes + CHECKSUM_BYTES)
        if bucket is None or slot is None:
            self._leave("the protocol was broken")
            raise RemoteProtocolError(
                f"rank {self._device} sent bucket {ready.bucket} in slot {ready.slot}, out of turn"
            )
        with self.spans.of("reload", bucket.index):
            with self._guarded(connection, update):
                checksum = self._target.load(bucket, slot)
            if checksum != checksum_in(slot, bucket):
                self._refuse(connection, update, f"bucket {bucket.index} has a wrong checksum")
                raise ChecksumMismatch(f"bucket {bucket.index} of version {update.version} has a wrong checksum")
        update.checksums[bucket.index] = checksum
        self._tell(connection, msg.SlotFreed(update.number, ready.slot))
        self._finish_if_whole(connection, update)

    def _keep(self, connection: Connection, update: _Update, unchanged: msg.BucketUnchanged) -> None:
        """Handles an unchanged bucket, which is not sent. Checks that this consumer has its content."""
        bucket = update.missing.pop(unchanged.bucket, None)
        if bucket is None:
            self._leave("the protocol was broken")
            raise RemoteProtocolError(f"rank {self._device} left out bucket {unchanged.bucket}, out of turn")
        if not self._target.keep(bucket, unchanged.checksum):
            builds = f"version {update.version} builds on version {update.base}"
            reason = f"{builds}, of which bucket {bucket.index} is not what is here"
            self._refuse(connection, update, reason)
            raise BaseMismatch(reason)
        update.checksums[bucket.index] = unchanged.checksum
        self._finish_if_whole(connection, update)

    def _finish_if_whole(self, connection: Connection, update: _Update) -> None:
        if not update.missing:
            with self._guarded(connection, update):
                self._target.finish()
            checksum = checksum_of_version(update.checksums[index] for index in sorted(update.checksums))
            reloads = tuple(
                (span.bucket, span.begun_ns, span.ended_ns) for span in self.spans.first("reload", MAX_REPORTED)
            )
            self._tell(connection, msg.VersionLoaded(update.number, checksum, reloads))

    @contextlib.contextmanager
    def _guarded(self, connection: Connection, update: _Update) -> Iterator[None]:
        """A context for the user's ``load``. It refuses the update if ``load`` raises."""
        try:
            yield
        except Exception as error:  # the user's code may raise anything; the publisher is told, and so is our caller
            self._refuse(connection, update, f"load() raised {error!r}")
            raise LoadError(f"load() raised {error!r} in version {update.version}") from error

    def _refuse(self, connection: Connection, update: _Update, reason: str) -> None:
        """Refuses the rest of this update. The consumer stays attached."""
        update.has_failed = True
        self._tell(connection, msg.LoadFailed(update.number, reason))
        self._fail(reason)

    def _commit(self, connection: Connection, update: _Update) -> None:
        self._update = None
        with self._changed:
            if self._state.atomic and not self._is_free():
                self._refuse(connection, update, "its weights were in use all the time")
                raise WeightsNotReady(f"version {update.version} could not take its place: the weights were in use")
            self._target.commit()
            self._state.commit(update.version)
            self.last_error = None
            self._changed.notify_all()
        with contextlib.suppress(PublisherLost):  # the version is complete, even if the publisher is gone
            self._tell(connection, msg.VersionTaken(update.number))

    def _fail(self, reason: str) -> None:
        self._update = None
        with self._changed:
            self._state.fail(reason)
            self._changed.notify_all()
