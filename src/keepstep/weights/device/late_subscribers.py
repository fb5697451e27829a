"""Sends the last version to a consumer that attaches late, without affecting other consumers.

The consumer's device requests the buckets from every source of the plan, including itself. The same stages move the
buckets, over separate connections and buffers. This needs copies of the weights, because the live weights have changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Collection, Sequence

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import ConfigurationError, PeerLost, RemoteProtocolError
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.layout import Layout, Problem, serve_one
from keepstep.protocol.transfer.messages import TransferFault
from keepstep.weights.channels.connection import Connection
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import dial_rank
from keepstep.weights.device.device import Device, Settings
from keepstep.weights.device.source_connections import SourceBuffer
from keepstep.weights.device.stages import (
    CannotGoOn,
    IpcBuffer,
    RankPlan,
    ReceiveStage,
    SendStage,
    device_outlet,
)
from keepstep.weights.device.subscriber_registry import Attached, tell, tell_begin
from keepstep.weights.memory.blocks import NamedBlock
from keepstep.weights.memory.buffers import Buffer
from keepstep.weights.spans import Spans


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedCopy:
    """The last published version. Valid until its copies are overwritten."""

    version: int
    layout: Layout
    blocks: Sequence[NamedBlock]


class LateSubscribers:
    """Serves a device's late consumers, one after the other, each in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._kept: PublishedCopy | None = None
        self._is_changing = False
        """Whether an update is running whose version will become the kept one."""
        self._late: list[tuple[Attached, int | None]] = []
        """Consumers that attached while no version was kept."""
        self._num_running = 0
        self._stop = CancelToken()
        self._turn = threading.Lock()
        """Held while one consumer is served: there is only one IPC buffer."""
        self._turn_to_serve = threading.Lock()
        """Held while this device's H2D buffer is in use for one request."""
        self._buffers: dict[str, Buffer] = {}

    @property
    def buffer_bytes(self) -> int:
        """Total size of the buffers in bytes. They are allocated for the first late consumer, and kept."""
        return sum(buffer.num_bytes for buffer in self._buffers.values())

    # ---- the thread that publishes ----------------------------------------------------------------------------------

    def keep(self, device: Device, kept: PublishedCopy, served: Collection[Attached]) -> None:
        """Sets the version for late consumers. It also serves those that attached since `forget`, except ``served``."""
        with self._changed:
            self._kept = kept
            late, self._late = self._late, []
        self.settle()
        for attached, version in late:
            if not any(attached is each for each in served):
                self.came(device, attached, version)

    def forget(self) -> None:
        """Drops the kept version, which is about to change. Cancels running transfers and waits until they end."""
        with self._changed:
            self._kept, self._is_changing = None, True
            self._stop.set()
            self._changed.wait_for(lambda: not self._num_running)
            self._stop.clear()

    def settle(self) -> None:
        """Ends the change that `forget` began, whether or not a version is kept now."""
        with self._changed:
            self._is_changing = False
            self._changed.notify_all()

    def close(self) -> None:
        """Cancels running transfers and frees the buffers."""
        self.forget()
        self.settle()
        for buffer in self._buffers.values():
            buffer.close()
        self._stop.close()

    # ---- for a consumer of this device ------------------------------------------------------------------------------

    def came(self, device: Device, attached: Attached, version: int | None) -> None:
        """Serves a new consumer of this device, unless it already has the kept version."""
        with self._changed:
            if self._kept is None:
                self._late.append((attached, version))
            elif version != self._kept.version:  # also if it is higher: the job may have gone back or started over
                self._num_running += 1
                arguments = (device, attached, self._kept)
                threading.Thread(target=self._bring, args=arguments, name="keepstep-catch-up", daemon=True).start()

    def _bring(self, device: Device, attached: Attached, kept: PublishedCopy) -> None:
        try:
            with self._turn, contextlib.ExitStack() as opened:
                self._bring_now(device, attached, kept, opened)
        except Cancelled:
            tell([attached], msg.UpdateAborted(0, TransferFault.LOST, "no process", "a newer version is about to come"))
        except ConfigurationError as error:
            fault = TransferFault(Problem.of(error).misfit.value)
            tell([attached], msg.UpdateAborted(0, fault, attached.name, str(error)))
        except CannotGoOn as error:
            tell([attached], msg.UpdateAborted(0, TransferFault.LOST, error.culprit, error.reason))
        finally:
            self._ended()

    def _bring_now(self, device: Device, attached: Attached, kept: PublishedCopy, opened: contextlib.ExitStack) -> None:
        rank, deadline_s = self._settings.rank, self._settings.deadline_s
        layout = serve_one(kept.layout, rank, attached.consumer)
        update, plan = device.number_update(), RankPlan(layout, rank)
        sources: dict[int, SourceBuffer] = {}
        for source in sorted({bucket.source for bucket in plan.coming}):
            called = msg.CatchUpCalled(rank, device.generation, update, kept.version, layout)
            sources[source] = self._ask(source, called)
            opened.callback(sources[source].close)
        ipc = None
        if self._settings.has_ipc:
            ipc = IpcBuffer(self._buffer("ipc"), self._settings.first_late_slot(rank))
        for shared in sources.values() if ipc is None else [ipc]:
            attached.share(shared.first_slot, shared.buffer)
        attached.holds = None  # it does not have the version
        tell_begin(msg.UpdateBeganFor(update, kept.version, device.generation, layout, ()), {0: attached})
        receiving = ReceiveStage(update, plan, sources, ipc, {0: attached}, deadline_s, self._stop, Spans())
        receiving.run()
        receiving.hand_over(kept.version, self._stop)

    def _ask(self, source: int, called: msg.CatchUpCalled) -> SourceBuffer:
        until_s = time.monotonic() + self._settings.deadline_s
        try:
            connection, welcomed = dial_rank(self._settings.folder, source, called, until_s, self._stop)
            buffer = attach_buffer(welcomed.buffer, connection)
            return SourceBuffer(connection, buffer, self._settings.first_late_slot(source))
        except (PeerLost, RemoteProtocolError) as error:
            raise CannotGoOn.because_of(source, error) from None

    # ---- for a consumer of any device -------------------------------------------------------------------------------

    def serve(self, device: Device, connection: Connection, called: msg.CatchUpCalled) -> None:
        """Sends this device's buckets to another device. Runs in a thread of the listener, and owns the connection.

        The other device may finish an update a moment before this one, so this method first waits for `settle`.
        """
        deadline_s = self._settings.deadline_s
        until_s = time.monotonic() + deadline_s
        with self._changed:
            self._changed.wait_for(lambda: not self._is_changing, deadline_s)
            kept = self._kept
            if kept is not None and kept.version == called.version:
                self._num_running += 1
            else:
                kept = None
        try:
            if kept is None:
                connection.send(msg.Refused(f"version {called.version} is not kept here", stale=False), until_s)
                return
            with self._turn_to_serve:
                self._serve_now(device, connection, called, kept)
        except (PeerLost, CannotGoOn, Cancelled):
            pass  # the requesting device sees the end of the connection
        finally:
            connection.close()
            if kept is not None:
                self._ended()

    def _serve_now(
        self, device: Device, connection: Connection, called: msg.CatchUpCalled, kept: PublishedCopy
    ) -> None:
        deadline_s = self._settings.deadline_s
        h2d = self._buffer("h2d")
        plan = RankPlan(called.layout, self._settings.rank)
        plan.prepare([block.held for block in kept.blocks])
        device.welcome_to(h2d, connection, time.monotonic() + deadline_s)
        outlet = device_outlet(called.update, plan, {called.rank: connection}, deadline_s, self._stop)
        SendStage(plan, h2d, outlet, Spans()).run()

    def _buffer(self, which: str) -> Buffer:
        if which not in self._buffers:
            self._buffers[which] = self._settings.make_buffer()
        return self._buffers[which]

    def _ended(self) -> None:
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()
