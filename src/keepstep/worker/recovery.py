"""Carrying out a recovery on one rank, in its training thread: CLEAN, RESET, RESTORE, ROLLBACK."""

from __future__ import annotations

import sys

from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import NothingToRecoverFrom, RemoteProtocolError
from keepstep.protocol.messages import Recover, Rescue, StateRecovered, StateRescued, text
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.protocol.recovery import EXIT_TOO_FEW_RANKS
from keepstep.protocol.resume import Action
from keepstep.worker.coordination import Coordination, Superseded
from keepstep.worker.groups.inner import Inner
from keepstep.worker.state.checkpoint import Checkpoints, rescue
from keepstep.worker.state.ddp import settle_buckets, share_buffers
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.restore import Route, receive_state, send_state
from keepstep.worker.state.rollback import StepSnapshot


class Recovery:
    """One rank's recoveries. Everything here runs in the training thread, at a safe point."""

    def __init__(
        self,
        coordination: Coordination,
        state: ProtectedState,
        ddp: list[DistributedDataParallel],
        checkpoints: Checkpoints | None,
    ) -> None:
        self.snapshot = StepSnapshot(state)
        self._coordination = coordination
        self._state = state
        self._ddp = ddp
        self._checkpoints = checkpoints
        self._held: Recover | None = None
        """A decision taken at the barrier, to be carried out when the step has been completed or undone."""
        self._resumed = False
        coordination.on_rescue = self._rescue

    @property
    def checkpointing(self) -> bool:
        """Whether this job writes checkpoints."""
        return self._checkpoints is not None

    def inspect_checkpoints(self) -> None:
        """Finds an intact checkpoint, if there is any; see `Checkpoints.inspect`."""
        if self._checkpoints is not None:
            self._checkpoints.inspect()

    def snapshots(self) -> tuple[int, ...]:
        """Steps of the checkpoints that can be loaded."""
        return self._checkpoints.steps() if self._checkpoints is not None else ()

    def take_resumed(self) -> bool:
        """Whether this is the first step since a recovery; asking forgets it."""
        resumed, self._resumed = self._resumed, False
        return resumed

    # ---- where it is called from ------------------------------------------------------------------------------------

    def before_barrier(self) -> None:
        """Completes what the gradient barrier vouches for: module buffers, too, are the same on every rank."""
        for module in self._ddp:
            share_buffers(module)

    def decide_at_barrier(self) -> Recover:
        """A failure came while this rank was synced: reports that it can be at this step or the next, and waits."""
        self._held = self._coordination.stand(self.snapshots(), self._coordination.generation)
        return self._held

    @property
    def due(self) -> bool:
        """Whether a failure is waiting to be recovered from."""
        return self._held is not None or self._coordination.interrupted

    def after_step(self) -> None:
        """The step is complete: writes a checkpoint where one is due.

        A failure that came meanwhile is not recovered from here but when the next step is asked for: what the script
        does in between runs on survivors only, so its collectives must not meet the replacement. They echo.
        """
        coordination = self._coordination
        if self._checkpoints is not None and coordination.rank == 0 and not coordination.torn:
            self._checkpoints.after_step(coordination.machine.step + 1, coordination.generation)

    def after_last_step(self) -> None:
        """Waits for the checkpoint that is being written."""
        if self._checkpoints is not None:
            self._checkpoints.flush()

    def after_interruption(self) -> None:
        """The step was left early: undoes it, unless the decision may still be to complete it."""
        machine = self._coordination.machine
        self._coordination.stopped_in = (machine.step, machine.phase)
        if machine.phase is not Phase.SYNCED or self._held is not None:
            self._undo()

    def run(self, order: Recover | None = None) -> None:
        """Recovers, however many generations it takes.

        Args:
            order: the decision, where it has been received already.
        """
        coordination = self._coordination
        order, self._held = order or self._held, None
        generation = coordination.generation
        while True:
            try:
                if order is None:
                    order = coordination.stand(self.snapshots(), generation)
                generation = order.generation
                self._carry_out(order)
            except Superseded:
                order = None
                continue
            self._resumed = order.resume_step > 0 or order.generation > 1
            return

    # ---- the parts of a recovery ------------------------------------------------------------------------------------

    def _undo(self) -> None:
        """CLEAN and ROLLBACK of a step whose update has not begun."""
        coordination = self._coordination
        if coordination.machine.phase not in (Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED):
            return
        assert coordination.groups is not None
        coordination.groups.drain()
        if coordination.machine.phase is Phase.BACKWARD:
            for module in self._ddp:
                settle_buckets(module)
        self.snapshot.put_back()
        coordination.move(StepEvent.STEP_UNDONE)

    def _carry_out(self, order: Recover) -> None:
        coordination = self._coordination
        coordination.check_current(order.generation)
        self._undo()
        if coordination.generation != order.generation:
            coordination.connect(order.generation)
        received = self._restore(order)
        coordination.link.send(StateRecovered(coordination.link.worker, order.generation, received))
        coordination.await_resume(order.generation)

    def _restore(self, order: Recover) -> int:
        coordination, rank = self._coordination, self._coordination.rank
        coordination.observe("restore")
        route = Route(order.sources, order.receivers)
        coordination.page.set_waiting(True)  # each side waits for the other
        try:
            match order.action:
                case Action.RESTORE:
                    return self._receive(order.resume_step, route)
                case Action.REWIND:
                    self._rewind(order.resume_step)
                case Action.STAY | Action.ADVANCE:
                    pass
            if route.receivers and rank in route.sources:
                assert rank is not None
                send_state(self._state, order.resume_step, rank, route, self._world(), self._moved)
        except (RuntimeError, RemoteProtocolError) as error:
            raise coordination.lost_in(order.generation, "restore", error) from error
        finally:
            coordination.page.set_waiting(False)
        return 0

    def _receive(self, step: int, route: Route) -> int:
        world = self._world()
        self._coordination.torn = True
        received = receive_state(self._state, step, route, world, self._moved)
        self._stand_at(step)
        return received

    def _world(self) -> Inner:
        """The communicator that carries the state. Raises RuntimeError if it was taken down already."""
        assert self._coordination.groups is not None
        inner = self._coordination.groups.world.inner
        if inner is None:
            raise RuntimeError("the group was taken down before the transfer began")
        return inner

    def _rewind(self, step: int) -> None:
        assert self._checkpoints is not None
        self._coordination.torn = True
        self._checkpoints.load(step)
        self._stand_at(step)

    def _stand_at(self, step: int) -> None:
        for module in self._ddp:
            if module.gradient_as_bucket_view:
                settle_buckets(module)  # gradients that came with the state become views of the buckets
        coordination = self._coordination
        coordination.torn = False
        coordination.machine.restored(step)
        coordination.show()

    def _moved(self) -> None:
        self._coordination.page.progress()
        self._coordination.observe("bucket")

    def _rescue(self, order: Rescue) -> None:
        """The job cannot go on: saves what this rank holds, if it is whole, and ends the process."""
        coordination = self._coordination
        at = coordination.machine.parameters_at
        path, problem = None, None
        try:
            if coordination.torn or at is None:
                raise NothingToRecoverFrom("its copy is not whole")
            self._undo()
            path = rescue(self._state, at, coordination.rank or 0)
        except (OSError, RuntimeError, NothingToRecoverFrom) as error:
            problem = text(error)
        coordination.link.send(StateRescued(coordination.link.worker, path, problem))
        print(f"keepstep: rank {coordination.rank} ends: {order.reason}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_TOO_FEW_RANKS)
