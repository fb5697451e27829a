"""One update on one device, from the offer to the verdict."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import KeepstepError, PeerLost, RemoteProtocolError, StaleGeneration
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.messages import TransferFault
from keepstep.protocol.transfer.update import Terms
from keepstep.weights.channels.connection import Connection, wait
from keepstep.weights.channels.deltas import DeltaOutlet
from keepstep.weights.channels.listener import dial_rank
from keepstep.weights.device.coordinator import Coordinator
from keepstep.weights.device.device import Device
from keepstep.weights.device.stages import (
    CannotGoOn,
    IpcBuffer,
    RankPlan,
    ReceiveStage,
    SendStage,
    Stages,
    device_outlet,
)
from keepstep.weights.device.subscriber_registry import Attached, show_sign, tell, tell_begin
from keepstep.weights.device.verdicts import COORDINATOR, COORDINATOR_PATIENCE_S, CoordinatorConnection, UpdateFailed
from keepstep.weights.memory.blocks import NamedBlock
from keepstep.weights.spans import Span, Spans


class WeightUpdate:
    """Used once, by the thread that publishes."""

    def __init__(self, device: Device, version: int, blocks: Sequence[NamedBlock], stop: CancelToken) -> None:
        """Args:
        device: the device.
        version: number of the version.
        blocks: the blocks of which this device is a source.
        stop: aborts the update, as if this device had failed.
        """
        self._device, self._version, self._blocks, self._stop = device, version, blocks, stop
        self._settings = device.settings
        self._present = device.subscriber_registry.present()
        self.spans = Spans()
        self.failures: list[KeepstepError] = []
        self.sent_bytes = self.unchanged_bytes = 0
        """Bytes of this device's buckets that were sent to at least one device, and bytes that had not changed."""
        self.reloads: tuple[Span, ...] = ()
        """The first reload times of one consumer on this device, on its machine's clock."""
        self.served: list[Attached] = []
        """The consumers on this device that have the version."""

    def run(self, former: RankPlan | None) -> RankPlan:
        """Runs the update. Returns its plan, which the next update reuses if nothing changes.

        Args:
            former: the plan of the previous update.

        Raises:
            UpdateFailed: the update was aborted. All connections to devices have been closed.
        """
        try:
            listener = self._offer()
            try:
                with self._coordinating():
                    return self._agree_and_move(listener, former)
            finally:
                listener.connection.close()
        except UpdateFailed:
            self._device.source_connections.drop()
            raise

    def _offer(self) -> CoordinatorConnection:
        """Connects to all devices, and offers the version to the coordinator."""
        device, settings = self._device, self._settings
        until_s = time.monotonic() + settings.deadline_s
        own = f"rank {settings.rank}"
        held = tuple(block.as_held() for block in self._blocks)
        consumers = tuple(each.consumer for each in self._present)
        holds = tuple(each.holds if each.delta else None for each in self._present)
        try:
            device.source_connections.connect(device.generation, until_s, self._stop)
            offer = msg.UpdateOffered(
                settings.rank, device.generation, self._version, device.last_update, held, consumers, holds
            )
            connection, _welcomed = dial_rank(settings.folder, COORDINATOR, offer, until_s, self._stop)
        except StaleGeneration as error:
            raise UpdateFailed(TransferFault.STALE, own, str(error)) from None
        except (PeerLost, RemoteProtocolError) as error:
            raise UpdateFailed(TransferFault.LOST, "a device", str(error)) from None
        except Cancelled:
            raise UpdateFailed(TransferFault.LOST, own, "it was interrupted") from None
        return CoordinatorConnection(connection, settings.deadline_s, self._stop)

    @contextlib.contextmanager
    def _coordinating(self) -> Iterator[None]:
        """A context in which rank 0 runs the coordinator."""
        settings, device = self._settings, self._device
        if settings.rank != COORDINATOR:
            yield
            return
        patience_s = settings.deadline_s + COORDINATOR_PATIENCE_S
        terms = Terms(self._version, device.generation, settings.world_size, settings.limits, patience_s)
        coordinator = Coordinator(terms, device.offers, settings.sign_s, device.agreement)
        thread = threading.Thread(target=coordinator.run, name="keepstep-coordinator")
        thread.start()
        try:
            yield
        except BaseException as error:  # of any kind: the other devices must not wait
            notice = self._notice_of(error)
            coordinator.break_off(notice.culprit, notice.reason)
            raise
        finally:
            thread.join()
            device.agreement = coordinator.agreement

    def _agree_and_move(self, listener: CoordinatorConnection, former: RankPlan | None) -> RankPlan:
        update = 0
        try:
            agreed = self._agree(listener)
            update = agreed.update
            return self._move(listener, agreed, former)
        except Cancelled as error:
            notice = self._notice_of(error)
            listener.send(msg.DeviceFailed(update, notice.culprit, notice.reason, stalled=False))
            raise UpdateFailed(notice.fault, notice.culprit, notice.reason) from None

    def _notice_of(self, error: BaseException) -> msg.UpdateAborted:
        """The message to others about an error that aborts the update on this device."""
        if isinstance(error, UpdateFailed):
            return error.notice
        reason = "it was interrupted" if isinstance(error, Cancelled) else repr(error)
        return msg.UpdateAborted(0, TransferFault.LOST, f"rank {self._settings.rank}", reason)

    def _agree(self, listener: CoordinatorConnection) -> msg.UpdateAgreed:
        """Waits until all devices have offered the version."""
        while True:
            match listener.receive():
                case msg.UpdateAgreed() as agreed:
                    self._device.saw_update(agreed.update)
                    return agreed
                case None:
                    pass
                case other:
                    listener.blame(f"it sent {other!r:.80}")

    def _move(self, listener: CoordinatorConnection, agreed: msg.UpdateAgreed, former: RankPlan | None) -> RankPlan:
        device, settings = self._device, self._settings
        plan = former
        if plan is None or plan.layout != agreed.layout:
            plan = RankPlan(agreed.layout, settings.rank)
            plan.prepare([block.held for block in self._blocks])
        consumers = self._begin(agreed, plan)
        stop = CancelToken()
        to_devices = device_outlet(agreed.update, plan, device.readers.connections(), settings.deadline_s, stop)
        outlet = DeltaOutlet(to_devices, device.h2d, plan.own, agreed.layout, agreed.holds, device.sent)
        sending = SendStage(plan, device.h2d, outlet, self.spans)
        receiving = ReceiveStage(
            agreed.update,
            plan,
            device.source_connections.sources,
            None if device.ipc is None else IpcBuffer(device.ipc, 0),
            consumers,
            settings.deadline_s,
            stop,
            self.spans,
        )
        stages = Stages(sending, receiving, stop)
        try:
            self._follow(listener, agreed.update, stages, list(consumers.values()))
        except BaseException as error:  # of any kind: the consumers must not wait for what does not come
            tell(consumers.values(), self._notice_of(error))
            raise
        finally:
            stages.close()
        device.sent = outlet.sent(agreed.version)
        self.sent_bytes, self.unchanged_bytes = outlet.sent_bytes, outlet.unchanged_bytes
        self.served, self.reloads = receiving.loaded, receiving.reloads
        receiving.hand_over(agreed.version, self._stop)
        for each in receiving.taken:
            each.holds = agreed.version
        self.failures += receiving.failures
        return plan

    def _begin(self, agreed: msg.UpdateAgreed, plan: RankPlan) -> Mapping[int, Attached]:
        """Tells each consumer that the update begins, or why it cannot take part. Returns the members by reader."""
        taking = {}
        mapped = {bucket.source for bucket in plan.coming} - {plan.rank} if self._device.ipc is None else set()
        sources = [self._device.source_connections.sources[rank] for rank in sorted(mapped)]
        for reader, each in zip(plan.readers, self._present, strict=True):
            problem = agreed.layout.problems[reader]
            if problem is None:
                taking[reader] = each
                for source in sources:
                    each.share(source.first_slot, source.buffer)
            else:
                each.holds = None
                self.failures.append(problem.error)
                fault = TransferFault(problem.misfit.value)
                tell([each], msg.UpdateAborted(agreed.update, fault, each.name, problem.reason))
        began = msg.UpdateBeganFor(agreed.update, agreed.version, agreed.generation, agreed.layout, ())
        tell_begin(began, taking)
        return taking

    def _follow(self, listener: CoordinatorConnection, update: int, stages: Stages, consumers: list[Attached]) -> None:
        """Reports the progress of the stages until the coordinator sends its verdict."""
        is_prepared, num_moved = False, 0
        sign_due_s = time.monotonic() + self._settings.sign_s
        while True:
            awaited: list[Connection | CancelToken] = [listener.connection, stages.changed]
            ready = wait(awaited, min(sign_due_s, listener.until_s), self._stop)
            now_s = time.monotonic()
            if stages.changed in ready:
                self._check(listener, update, stages)
                if stages.are_done and not is_prepared:
                    is_prepared = True
                    listener.send(msg.DevicePrepared(update))
            if now_s >= sign_due_s:
                sign_due_s = now_s + self._settings.sign_s
                show_sign(consumers, msg.MovementSeen(update))
                has_moved, num_moved = stages.num_moved != num_moved, stages.num_moved
                listener.send(msg.MovementSeen(update) if has_moved else msg.StillThere())
            if listener.connection in ready or now_s >= listener.until_s:
                match listener.receive():
                    case msg.VersionCommitted():
                        return
                    case None:
                        pass
                    case other:
                        listener.blame(f"it sent {other!r:.80}")

    def _check(self, listener: CoordinatorConnection, update: int, stages: Stages) -> None:
        """Reports a stage that has failed."""
        error = stages.first_error()
        if error is None:
            return
        if isinstance(error, CannotGoOn):
            listener.send(msg.DeviceFailed(update, error.culprit, error.reason, error.stalled))
            failed = UpdateFailed(TransferFault.LOST, error.culprit, error.reason)
            if error.stalled:
                listener.hear_about(failed)
            raise failed
        listener.send(msg.DeviceFailed(update, f"rank {self._settings.rank}", repr(error), stalled=False))
        raise error
