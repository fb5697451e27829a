"""One attempt at a step: the state that it may change before its update, and how to undo it."""

from __future__ import annotations

from torch import distributed as dist

from keepstep.protocol.phases import Phase
from keepstep.worker.coordination import Coordination
from keepstep.worker.hooks import remove_hooks
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.rollback import StepSnapshot
from keepstep.worker.step.comparison import Comparison
from keepstep.worker.step.device_completion import DeviceCompletion
from keepstep.worker.values.declared import DeclaredState, Own


class Attempt:
    """One rank's attempt at the current step. Used by the training thread."""

    def __init__(
        self, coordination: Coordination, state: ProtectedState, declared: DeclaredState, device: DeviceCompletion
    ) -> None:
        """Args:
        coordination: coordination of this rank.
        state: the state that a step may change, with its layout.
        declared: the values of `Session.state`.
        device: waits for the devices of this process.
        """
        self._coordination = coordination
        self._machine = coordination.machine
        self._snapshot = StepSnapshot(state)
        self._layout = state.layout
        self._declared = declared
        self._device = device
        self._comparison = Comparison(coordination, state, declared.replicated)
        self._step: int | None = None
        """The step that was handed out last."""
        self._own: Own | None = None
        """What was settled of this rank's own values for that step, which the other ranks do not hold."""

    def start_up(self) -> None:
        """Prepares the first step. Ranks that start together exchange their rank-local values."""
        machine = self._machine
        together = machine.generation > 0 and not machine.used_echo and machine.rank is not None
        self._declared.begin(dist.get_world_size(), share=together)

    def resumed(self, step: int, *, is_restored: bool) -> None:
        """Tells of a resume step; see `Comparison.resumed`."""
        self._comparison.resumed(step, is_restored=is_restored)

    def may_be_refused(self, step: int) -> bool:
        """Whether a comparison of a step may find that a rank's state is not what it has loaded."""
        return self._comparison.may_be_refused(step)

    def hand_out(self, step: int, is_first_of_epoch: bool | None) -> None:
        """Records the state that an interrupted attempt must restore.

        The attempt begins here, not at its ``with``: the script's code before the ``with`` is repeated, too.

        Args:
            step: the step.
            is_first_of_epoch: see `DeclaredState.hand_out`.
        """
        if step != self._step:
            self._step, self._own = step, None
        is_first = is_first_of_epoch if self._own is None else False  # what is settled has begun anew
        self._declared.hand_out(is_first)
        self._snapshot.take()
        self._layout.hand_out()
        self._comparison.hand_out(step)
        self._coordination.begin_attempt()

    def settle(self, *, is_done: bool, is_own_done: bool) -> None:
        """See `StepController.settle`.

        Args:
            is_done: see there.
            is_own_done: whether it also holds for what this rank has of its own. The other ranks hold that as it was at
                the last barrier.
        """
        if not is_own_done:
            self._own = self._declared.own()
        if is_done:
            self._put_back()
        else:
            self._snapshot.take()

    def _put_back(self) -> None:
        self._snapshot.put_back()  # also this rank's own values, as the other ranks hold them
        if self._own is not None:
            self._declared.load_own(self._own)

    def guard(self) -> None:
        """Protects averages of parameters that the script may write to outside of steps; see `StepSnapshot.guard`."""
        self._snapshot.guard()

    def begin(self) -> None:
        """Makes all ranks begin the step in the same way."""
        self._layout.begin_step()

    def check_gradients(self) -> None:
        """Checks used gradients when a backward begins; see `StepSnapshot.check_gradients`."""
        self._snapshot.check_gradients()

    def before_barrier(self) -> None:
        """Establishes what the gradient barrier guarantees.

        Afterwards module buffers are equal on all ranks, and every rank holds the rank-local values of all ranks. In
        some steps, replicas are known to hold the same. The device has completed all of it, unless the step was
        interrupted.

        Raises:
            RuntimeError: an operation has failed after the script had waited for it on a stream.
            StateMismatch: this rank differs from a replica; see `Comparison.before_barrier`, as for StepInterrupted.
        """
        self._layout.before_barrier()
        self._snapshot.before_barrier()
        self._declared.before_barrier(dist.get_world_size())
        coordination = self._coordination
        assert coordination.groups is not None
        self._device.wait(coordination.groups.look, lambda: coordination.interrupted)
        if not coordination.interrupted:
            self._comparison.before_barrier(self._machine.steps.step)

    def drain(self) -> None:
        """Waits until no operation is in flight, in any group and on any stream of the device."""
        assert self._coordination.groups is not None
        self._coordination.groups.drain()
        self.drain_device()

    def drain_device(self) -> None:
        """Waits until the devices have completed all launched work, such as an update's kernels."""
        self._device.drain()

    def undo(self) -> None:
        """Undoes a step that was left early (CLEAN and ROLLBACK). Does nothing if its update has begun."""
        coordination = self._coordination
        if coordination.phase not in (Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED):
            return
        self.drain()
        self._snapshot.put_back_modes()  # DDP's reducer counts the parameters that are trained
        self._layout.undo(in_backward=coordination.phase is Phase.BACKWARD)
        self._put_back()
        self._snapshot.guard()  # the script continues after the attempt
        self._declared.undone()
        self._machine.undone()
        coordination.show()

    def complete(self) -> None:
        """Marks the attempt as complete and permanent.

        Raises:
            UsageError: see `DeclaredState.check`.
        """
        self._coordination.attempting = False
        self.check()

    def check(self) -> None:
        """Checks that the script has changed values only when it may; see `DeclaredState.check`."""
        self._declared.check()

    def returned(self) -> bool:
        """Ends the attempt, when the script asks for the next step. Undoes the script's changes after an interruption.

        Returns:
            whether the attempt was complete.
        """
        if not self._coordination.attempting:
            return True
        self.drain_device()
        self._put_back()
        self._coordination.attempting = False
        return False

    def over(self) -> None:
        """Leaves the script's values and modules alone: all ranks have completed the last step."""
        self._declared.end()
        remove_hooks()
