"""Publishing weights: the side that holds them. One `Publisher` a device; together they serve all consumers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from keepstep.errors import (
    ConfigurationError,
    KeepstepError,
    PeerLost,
    PublisherLost,
    RemoteProtocolError,
    StaleGeneration,
    StateMismatch,
    UsageError,
)
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.layout import Consumer, Layout
from keepstep.protocol.transfer.messages import AnyTransferMessage, Fault
from keepstep.protocol.transfer.plan import Limits
from keepstep.protocol.transfer.update import Terms
from keepstep.weights.attendance import Attendance
from keepstep.weights.coordinator import Callers, Coordinator
from keepstep.weights.device import Attached, CannotGoOn, Course, Gathering, Passing
from keepstep.weights.lines.door import Door, door_path, make_private
from keepstep.weights.lines.line import Flag, Interrupted, Line, wait
from keepstep.weights.memory.blocks import NamedBlock, Weights, fingerprint, named_blocks
from keepstep.weights.memory.buffers import SlotBuffer
from keepstep.weights.memory.copies import SLOT_EXTRA_BYTES
from keepstep.weights.mesh import COORDINATOR, Mesh
from keepstep.weights.spans import Spans

DEFAULT_BUCKET_BYTES = 8 << 20
NUM_SLOTS = 2
"""Of each buffer: one is filled while the other is read."""
DEFAULT_DEADLINE_S = 30.0
COORDINATOR_PATIENCE_S = 0.2
"""Beyond a device's deadline for the coordinator, and as much again for a device that waits for the coordinator, so
that whoever sees a fault first has told it before anybody suspects the one who waits."""
ABORT_NOTICE_S = 0.1
"""For telling a consumer that an update broke off; one that does not read finds out by its own deadline."""
_ERRORS: dict[Fault, type[KeepstepError]] = {
    Fault.LOST: PublisherLost,
    Fault.LAYOUT: StateMismatch,
    Fault.STALE: StaleGeneration,
}


class Published:
    """What came of a publication.

    Attributes:
        version: the version, committed on every device.
        failures: consumers that did not get it, as errors that name them; everybody else has it.
        spans: when this device's stages were busy.
    """

    def __init__(self, version: int, failures: tuple[KeepstepError, ...], spans: Spans) -> None:
        self.version, self.failures, self.spans = version, failures, spans


class _Failed(Exception):
    """The update did not come about; ``notice`` is what everybody here is told."""

    def __init__(self, notice: msg.UpdateAborted) -> None:
        self.notice = notice


class Publisher:
    """One device's part in publishing weights to the consumers on it.

    All devices of a world publish together, as with a collective: each calls `publish` with the same version. It owns
    two buffers of two buckets each, made here and kept until `close`: the memory it takes besides those does not grow
    with the size of the weights, but by some hundred bytes for each tensor.
    """

    def __init__(
        self,
        folder: str | Path,
        weights: Weights,
        *,
        rank: int = 0,
        world_size: int = 1,
        generation: int = 0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Args:
        folder: where all devices and consumers of this node find each other; made if it is not there, for this user
            alone. A short name: sockets are in it.
        weights: what this device holds, only read.
        rank, world_size: of this device among all that publish.
        generation: of the membership; a device or consumer that knows a higher one refuses this publisher.
        bucket_bytes: how much moves at a time; each of the two buffers takes twice as much.
        deadline_s: how long anybody may show nothing before it is taken for lost.

        Raises:
            ConfigurationError: an argument cannot work, or the buffers do not fit into memory.
        """
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank={rank} with world_size={world_size}: allowed are 0 to {world_size - 1}")
        if deadline_s <= 0:
            raise ConfigurationError(f"deadline_s={deadline_s}: allowed are times above 0")
        self._limits = Limits(bucket_bytes, bucket_bytes // 2)
        self.rank, self.world_size, self.generation = rank, world_size, generation
        self._weights, self._deadline_s = weights, deadline_s
        self._blocks = named_blocks(weights)
        self._fingerprint = fingerprint(weights)
        self._check_sizes()
        folder = Path(folder)
        make_private(folder)
        self._h2d = SlotBuffer.create(NUM_SLOTS, bucket_bytes + SLOT_EXTRA_BYTES)
        self._ipc = SlotBuffer.create(NUM_SLOTS, bucket_bytes + SLOT_EXTRA_BYTES)
        self._attendance = Attendance()
        self._readers, self._reporters = Callers(), Callers()
        self._mesh = Mesh(folder, rank, world_size)
        self._course: Course | None = None
        self._last_update = 0
        self._busy = threading.Lock()
        self._door = Door(door_path(folder, rank), self._answer)

    def _check_sizes(self) -> None:
        for block in self._blocks:
            if block.held.tensor.element_size() > self._limits.bucket_bytes:
                raise ConfigurationError(f"bucket_bytes={self._limits.bucket_bytes} holds no element of {block.names}")

    @property
    def buffer_bytes(self) -> int:
        """Of both buffers together: the peak of what this device takes, whatever it publishes."""
        return self._h2d.num_bytes + self._ipc.num_bytes

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers attached to this device now."""
        return tuple(each.consumer.name for each in self._attendance.present())

    @property
    def is_publishing(self) -> bool:
        """Whether an update is under way."""
        return self._busy.locked()

    def wait_for_consumers(self, num_consumers: int, timeout_s: float) -> None:
        """Waits until so many consumers are attached to this device.

        Raises:
            PeerLost: they did not come in time.
        """
        if not self._attendance.wait_for(num_consumers, timeout_s):
            raise PeerLost(
                f"{len(self.consumers)} of {num_consumers} consumers came to rank {self.rank} in {timeout_s:g} s"
            )

    def close(self) -> None:
        """Ends all lines and gives the buffers back. Consumers keep what they have, and wait for another publisher."""
        with self._busy:
            self._door.close()
            self._mesh.drop()
            self._attendance.close()
            self._readers.close()
            self._reporters.close()
            self._course = None
            self._h2d.close()
            self._ipc.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- who knocks -------------------------------------------------------------------------------------------------

    def _answer(self, line: Line, message: AnyTransferMessage) -> None:
        """Somebody knocks. Runs in the door's threads."""
        until_s = time.monotonic() + self._deadline_s
        try:
            match message:
                case msg.DeviceCalled() | msg.SubscriberCalled() if message.generation > self.generation:
                    stale = f"it is of generation {self.generation}, the caller of {message.generation}"
                    line.send(msg.Refused(stale, stale=False), until_s)
                case msg.DeviceCalled(generation=generation) if generation < self.generation:
                    stale = f"generation {generation} is over, this is generation {self.generation}"
                    line.send(msg.Refused(stale, stale=True), until_s)
                case msg.DeviceCalled(rank=rank, reads=reads) if 0 <= rank < self.world_size:
                    line.who = f"rank {rank}"
                    (self._readers if reads else self._reporters).add(rank, line)
                    line.send(self._welcome(), until_s, [self._h2d.descriptor] if reads else [])
                    return
                case msg.SubscriberCalled(name=name, wants=wants):
                    line.who = name
                    line.send(self._welcome(), until_s, [self._ipc.descriptor])
                    self._attendance.add(Consumer(name, wants), line)
                    return
                case other:
                    line.send(msg.Refused(f"{other!r:.80} opens no line", stale=False), until_s)
        except PeerLost:
            pass
        line.close()

    def _welcome(self) -> msg.Welcomed:
        return msg.Welcomed(self.rank, self.generation, self._h2d.num_slots, self._h2d.slot_bytes)

    # ---- an update --------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> Published:
        """Brings a version to all consumers attached now, and returns when it is committed on every device.

        The weights must not change meanwhile. A consumer that fails is left out, and named in the result.

        Args:
            version: its number, the same on all devices.

        Raises:
            UsageError: another version is just being published by this publisher.
            PublisherLost: a device is gone or stands; no consumer has switched to this version.
            StateMismatch: the devices' layouts do not fit together.
            StaleGeneration: this publisher's generation is over, or another device publishes another version.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError(f"version {version} cannot be published while another version is")
        try:
            return self._update(version)
        except _Failed as failed:
            notice = failed.notice
            raise _ERRORS[notice.fault](
                f"version {version} was not published: {notice.culprit}: {notice.reason}"
            ) from None
        finally:
            self._busy.release()

    def _update(self, version: int) -> Published:
        present = self._attendance.present()
        coordinating: threading.Thread | None = None
        try:
            self._connect()
            if self.rank == COORDINATOR:
                coordinating = threading.Thread(target=self._coordinator(version).run, name="keepstep-coordinator")
                coordinating.start()
            agreed = self._offer(version, present)
            return self._move(agreed, present)
        except _Failed:
            self._mesh.drop()
            raise
        finally:
            if coordinating is not None:
                coordinating.join()

    def _connect(self) -> None:
        try:
            self._mesh.connect(self.generation, time.monotonic() + self._deadline_s)
        except StaleGeneration as error:
            raise _Failed(msg.UpdateAborted(0, Fault.STALE, f"rank {self.rank}", str(error))) from None
        except (PeerLost, RemoteProtocolError) as error:
            raise _Failed(msg.UpdateAborted(0, Fault.LOST, "a rank", str(error))) from None

    def _coordinator(self, version: int) -> Coordinator:
        patience_s = self._deadline_s + 2 * COORDINATOR_PATIENCE_S + COORDINATOR_PATIENCE_S
        terms = Terms(version, self.generation, self.world_size, self._limits, patience_s)
        return Coordinator(terms, self._reporters, self._sign_s)

    @property
    def _sign_s(self) -> float:
        """How often a device and the coordinator show that they are there."""
        return min(1.0, self._deadline_s / 4)

    def _offer(self, version: int, present: list[Attached]) -> msg.UpdateAgreed:
        """Offers the version and waits until all have."""
        offer = msg.UpdateOffered(
            self.generation,
            version,
            self._last_update,
            tuple(block.as_held() for block in self._current_blocks()),
            tuple(each.consumer for each in present),
        )
        listener = _CoordinatorLine(self._mesh.coordinator, self._deadline_s)
        listener.send(offer)
        while True:
            match listener.receive():
                case msg.UpdateAgreed() as agreed:
                    self._last_update = agreed.update
                    return agreed
                case None:
                    pass
                case other:
                    listener.blame(f"it sent {other!r:.80}")

    def _current_blocks(self) -> list[NamedBlock]:
        """What is published; looked at again where a tensor was replaced or has moved."""
        now = fingerprint(self._weights)
        if now != self._fingerprint:
            self._blocks, self._fingerprint, self._course = named_blocks(self._weights), now, None
            self._check_sizes()
        return self._blocks

    def _course_of(self, layout: Layout) -> Course:
        if self._course is None or self._course.layout != layout:
            self._course = Course(layout, self.rank, [block.held for block in self._blocks], self._h2d)
        return self._course

    def _move(self, agreed: msg.UpdateAgreed, present: list[Attached]) -> Published:
        course, update, spans = self._course_of(agreed.layout), agreed.update, Spans()
        failures = self._begin(agreed, course, present)
        consumers = {
            reader: each
            for reader, each in zip(course.readers, present, strict=True)
            if agreed.layout.problems[reader] is None
        }
        stop, done = Flag(), Flag()
        readers = self._readers.lines()
        gathering = Gathering(update, course, self._h2d, readers, self._deadline_s, stop, spans)
        passing = Passing(update, course, self._mesh.sources, self._ipc, consumers, self._deadline_s, stop, spans)
        stages = [_Stage("keepstep-h2d", gathering.run, done), _Stage("keepstep-broadcast", passing.run, done)]
        try:
            self._follow(update, stages, done, lambda: gathering.num_moved + passing.num_moved)
        except _Failed as failed:
            self._tell([each.line for each in consumers.values()], failed.notice)
            raise
        finally:
            stop.set()
            for stage in stages:
                stage.thread.join()
            stop.close()
            done.close()
        self._tell([each.line for each in passing.loaded], msg.VersionCommitted(update, agreed.version))
        return Published(agreed.version, (*failures, *passing.failures), spans)

    def _begin(self, agreed: msg.UpdateAgreed, course: Course, present: list[Attached]) -> list[KeepstepError]:
        """Tells the consumers what comes; those that cannot take it are told why."""
        failures: list[KeepstepError] = []
        for reader, each in zip(course.readers, present, strict=True):
            problem = agreed.layout.problems[reader]
            if problem is not None:
                failures.append(StateMismatch(problem))
                notice = msg.UpdateAborted(agreed.update, Fault.LAYOUT, each.consumer.name, problem)
                self._tell([each.line], notice)
                continue
            self._tell(
                [each.line],
                msg.UpdateBegan(agreed.update, agreed.version, agreed.generation, agreed.layout, reader),
            )
        return failures

    def _follow(self, update: int, stages: list[_Stage], done: Flag, moved: Callable[[], int]) -> None:
        """Reports how the stages fare, until the coordinator has spoken its verdict."""
        listener = _CoordinatorLine(self._mesh.coordinator, self._deadline_s)
        is_prepared, num_moved = False, 0
        sign_due_s = time.monotonic() + self._sign_s
        while True:
            awaited: list[Line | Flag] = [listener.line, done]
            ready = wait(awaited, min(sign_due_s, listener.until_s))
            now_s = time.monotonic()
            if done in ready:
                done.clear()
                self._check(update, stages, listener)
                if not is_prepared and all(stage.is_done for stage in stages):
                    is_prepared = True
                    listener.send(msg.DevicePrepared(update))
            if now_s >= sign_due_s:
                sign_due_s = now_s + self._sign_s
                if moved() != num_moved:
                    num_moved = moved()
                    listener.send(msg.MovementSeen(update))
            if listener.line in ready or now_s >= listener.until_s:
                match listener.receive():
                    case msg.VersionCommitted():
                        return
                    case None:
                        pass
                    case other:
                        listener.blame(f"it sent {other!r:.80}")

    def _check(self, update: int, stages: list[_Stage], listener: _CoordinatorLine) -> None:
        """Reports a stage that cannot go on."""
        for stage in stages:
            if stage.error is None:
                continue
            error = stage.error
            known = isinstance(error, CannotGoOn)
            culprit = error.culprit if isinstance(error, CannotGoOn) else f"rank {self.rank}"
            reason = error.reason if isinstance(error, CannotGoOn) else repr(error)
            listener.send(msg.DeviceFailed(update, culprit, reason))
            if not known:
                raise error
            raise _Failed(msg.UpdateAborted(update, Fault.LOST, culprit, reason))

    def _tell(self, lines: list[Line], message: AnyTransferMessage) -> None:
        """Tells consumers; one that cannot be told is found out by whoever waits for it."""
        for line in lines:
            try:
                line.send(message, time.monotonic() + ABORT_NOTICE_S)
            except PeerLost:
                line.close()


class _CoordinatorLine:
    """The line to the coordinator in one update: hears verdicts, and when the coordinator was last heard of."""

    def __init__(self, line: Line, deadline_s: float) -> None:
        self.line = line
        self._patience_s = deadline_s + 4 * COORDINATOR_PATIENCE_S
        self.until_s = time.monotonic() + self._patience_s

    def send(self, message: AnyTransferMessage) -> None:
        """Reports. Raises _Failed: the coordinator is gone."""
        try:
            self.line.send(message, self.until_s)
        except PeerLost as error:
            self.blame(str(error))

    def receive(self) -> AnyTransferMessage | None:
        """The next verdict, or None if it was a sign of life.

        Raises:
            _Failed: the update was aborted, or the coordinator is gone.
        """
        try:
            message = self.line.receive(self.until_s)
        except (PeerLost, RemoteProtocolError) as error:
            self.blame(str(error))
        self.until_s = time.monotonic() + self._patience_s
        if isinstance(message, msg.UpdateAborted):
            raise _Failed(message)
        return None if isinstance(message, msg.MovementSeen) else message

    def blame(self, reason: str) -> NoReturn:
        """The coordinator is lost."""
        raise _Failed(msg.UpdateAborted(0, Fault.LOST, f"rank {COORDINATOR}", reason))


class _Stage:
    """A stage in a thread of its own."""

    def __init__(self, name: str, run: Callable[[], None], done: Flag) -> None:
        self._run, self._done = run, done
        self.error: Exception | None = None
        self.is_done = False
        self.thread = threading.Thread(target=self._carry_out, name=name, daemon=True)
        self.thread.start()

    def _carry_out(self) -> None:
        try:
            self._run()
            self.is_done = True
        except Interrupted:
            return
        except Exception as error:  # told to the coordinator, and raised in the thread that publishes
            self.error = error
        self._done.set()
