"""One attempt at a step: the state that it may change before its update, and how to undo it."""

from __future__ import annotations

from torch import distributed as dist

from keepstep.protocol.phases import Phase
from keepstep.worker.coordination import Coordination
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.rollback import StepSnapshot
from keepstep.worker.step.device_completion import DeviceCompletion
from keepstep.worker.values.declared import DeclaredState


class Attempt:
    """The present attempt of one rank. Used by the training thread."""

    def __init__(
        self, coordination: Coordination, state: ProtectedState, declared: DeclaredState, device: DeviceCompletion
    ) -> None:
        """Args:
        coordination: of this rank.
        state: what a step may change, with its layout.
        declared: the values of `Session.state`.
        device: of this process.
        """
        self._coordination = coordination
        self._machine = coordination.machine
        self._snapshot = StepSnapshot(state)
        self._layout = state.layout
        self._declared = declared
        self._device = device

    def start_up(self) -> None:
        """The script stands at its first step; ranks that start together give each other their rank-local values."""
        machine = self._machine
        together = machine.generation > 0 and not machine.used_echo and machine.rank is not None
        self._declared.begin(dist.get_world_size(), share=together)

    def hand_out(self) -> None:
        """Takes note of what an interrupted attempt must put back.

        The attempt begins here, and not with its ``with``: the script's lines before the ``with`` run again, too.
        """
        self._declared.hand_out()
        self._snapshot.take()
        self._layout.hand_out()
        self._coordination.begin_attempt()

    def settle(self, *, is_done: bool) -> None:
        """See `StepController.settle`."""
        if is_done:
            self._snapshot.put_back()
        else:
            self._snapshot.take()

    def guard(self) -> None:
        """What the script does now, outside of a step, may be undone though no step that is undone sees it."""
        self._snapshot.guard()

    def begin(self) -> None:
        """Has all ranks begin in the same way."""
        self._layout.begin_step()

    def check_gradients(self) -> None:
        """A backward begins; see `StepSnapshot.check_gradients`."""
        self._snapshot.check_gradients()

    def before_barrier(self) -> None:
        """Completes what the gradient barrier vouches for.

        Module buffers, too, are the same on every rank, and every rank holds the rank-local values of all. The device
        is through with all of it.

        Raises:
            RuntimeError: an operation has ended in an error after the script had waited for it on a stream.
        """
        self._layout.before_barrier()
        self._snapshot.before_barrier()
        self._declared.before_barrier(self._machine.steps.step, dist.get_world_size())
        coordination = self._coordination
        assert coordination.groups is not None
        self._device.wait(coordination.groups.look, lambda: coordination.interrupted)

    def drain(self) -> None:
        """Waits until nothing is under way any more, in no group and on no stream of the device."""
        assert self._coordination.groups is not None
        self._coordination.groups.drain()
        self.drain_device()

    def drain_device(self) -> None:
        """Waits until the devices are through with what was launched, such as an update's kernels."""
        self._device.drain()

    def undo(self) -> None:
        """The step was left early: CLEAN and ROLLBACK of what it did. Nothing to do where its update has begun."""
        coordination = self._coordination
        if coordination.phase not in (Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED):
            return
        self.drain()
        self._snapshot.put_back_modes()  # DDP's reducer counts the parameters that are trained
        self._layout.undo(in_backward=coordination.phase is Phase.BACKWARD)
        self._snapshot.put_back()
        self._snapshot.guard()  # the script continues after the attempt
        self._declared.undone()
        self._machine.undone()
        coordination.show()

    def complete(self) -> None:
        """The step is complete, for good.

        Raises:
            UsageError: see `DeclaredState.check`.
        """
        self._coordination.attempting = False
        self.check()

    def check(self) -> None:
        """Looks whether the script has changed values when it must not; see `DeclaredState.check`."""
        self._declared.check()

    def returned(self) -> bool:
        """The script asks for the next step. What it did after an interrupted attempt is put back.

        Returns:
            whether the attempt was complete.
        """
        if not self._coordination.attempting:
            return True
        self.drain_device()
        self._snapshot.put_back()
        self._coordination.attempting = False
        return False

    def over(self) -> None:
        """The last step is complete on all ranks: nothing is protected any more."""
        self._declared.end()
