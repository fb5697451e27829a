"""Runs one step after the other: begins and commits it or, after an interruption, undoes and repeats it.

`Session.steps` uses it. A loop of another framework, without ``with step:``, uses it like this:

    while (index := controller.next_step(num_steps)) is not None:
        try:
            controller.begin()
            forward_backward_and_update(index)
            controller.commit()
        except BaseException as error:
            if not controller.is_interruption(error):
                raise
            controller.undo()
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from keepstep.errors import StepInterrupted, UsageError
from keepstep.protocol.comparison import COMPARED
from keepstep.protocol.moves import End
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.weights.memory.blocks import local_of
from keepstep.worker.coordination import Coordination
from keepstep.worker.once import Once
from keepstep.worker.parallel.zero import local_optimizer
from keepstep.worker.process.termination import (
    has_lost_child,
    held_back,
    hold_back_child_errors,
    outlive_signals,
)
from keepstep.worker.recovery import Recovery
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.step.attempt import Attempt
from keepstep.worker.step.barrier import Purpose, Votes, await_all, pass_gradient_barrier
from keepstep.worker.step.stop_points import StopPoints
from keepstep.worker.step.update import check_alone, check_call, check_gradients
from keepstep.worker.step.warm_up import warm_up

_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions with which a script ends itself. Libraries raise others that are no ``Exception``: torch's
``CheckpointException``, where a rank is lost in ``torch.distributed.checkpoint.save()``."""
NEWS_S = 5.0
"""How long the news of a drain may take from the launcher that has the signal to a rank whose processes had it, too."""


class StepController:
    """Takes one rank through its steps. The training thread calls all methods.

    Attributes:
        attempt: number of earlier attempts at the current step on this rank.
        resumed: whether the current step is the first since a recovery or a checkpoint.
    """

    def __init__(
        self,
        coordination: Coordination,
        state: ProtectedState,
        attempt: Attempt,
        recovery: Recovery,
        *,
        seed_step: Callable[[int | str], None],
        final_digest: Callable[[], str | None],
    ) -> None:
        """Installs stop points in the protected modules and hooks on all optimizers, for the rest of the process.

        Args:
            coordination: coordination of this rank.
            state: the protected objects.
            attempt: undoes a step.
            recovery: performs recoveries.
            seed_step: seeds the random numbers of a step, given its index, or of another place in the training, given
                its name.
            final_digest: returns the digest of the state after the last step, or None if the digest is off.
        """
        self.attempt = 0
        self.resumed = False
        self._coordination = coordination
        self._machine = coordination.machine
        self._state = state
        self._undoing = attempt
        self._recovery = recovery
        self._seed_step = seed_step
        self._checked: set[torch.optim.Optimizer] = set()
        """The optimizers that have made an update in this process."""
        self._final_digest = final_digest
        self.epoch_length: int | None = None
        """Number of steps of an epoch, its end included if that is one; None: the loop has no epochs."""
        self._num_steps = 0
        self._index: int | None = None
        """The step that was yielded last and has not ended."""
        self._deferred: list[Callable[[], object]] = []
        self._is_calling = False
        """Whether the rank makes them at the boundary of an epoch. Nothing interrupts it: they are not repeated."""
        self._is_inside = False
        """Whether the step has begun, and is neither committed nor undone."""
        self._was_begun = self._has_backward = False
        self._last_index = -1
        self.warm_up: Callable[[], object] = lambda: None
        """Function that a spare calls while it waits for a rank; see `Session.warm_up`."""
        self._begun_s = 0.0
        self._stop_points = StopPoints(state.modules, self._check_stop, self._mark_phase)
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._machine.rank == 0

    # ---- from step to step ------------------------------------------------------------------------------------------

    def stand_ready(self, start: int, *, resumes: bool = False) -> None:
        """Reports that the script has reached its first step; a spare warms up first. Call it once, before `next_step`.

        Args:
            start: the first step, if the script has loaded a checkpoint of its own.
            resumes: fresh ranks load the script's own newest checkpoint.
        """
        machine = self._coordination.machine
        if machine.rank is None:
            self._warm_up()
        else:
            self._recovery.inspect_checkpoints()
        self._undoing.start_up()
        outlive_signals()  # libraries may have restored the default action meanwhile
        machine.built(
            self._state.shard(),
            self._recovery.snapshots(),
            self._recovery.checkpointing,
            self._coordination.longest_timeout_s,
            start,
            resumes=resumes,
        )

    def next_step(self, num_steps: int) -> int | None:
        """Performs a pending recovery, if any, and yields this rank's next step.

        Args:
            num_steps: number of steps of the training.

        Returns:
            index of the step; the same as before if its last attempt was interrupted. None: all ranks have finished.

        Raises:
            UsageError: the step that was yielded before was not begun.
        """
        self._num_steps = num_steps
        return self.go_on()

    def go_on(self) -> int | None:
        """Same as `next_step`, for the same number of steps as before."""
        num_steps = self._num_steps
        if self._index is not None:
            self._script_returns()
        while not isinstance(self._recovery.run(), End):
            index = self._coordination.machine.steps.parameters_at
            assert index is not None
            if index < num_steps:
                self._hand_out(index)
                return index
            self._finish()
        self._undoing.over()
        return None

    def _hand_out(self, index: int) -> None:
        self.attempt = self.attempt + 1 if index == self._last_index else 0
        self.resumed = self._recovery.take_resumed()
        self._index = self._last_index = index
        self._was_begun = False
        self._deferred.clear()
        is_first = None if self.epoch_length is None else index % self.epoch_length == 0
        self._undoing.hand_out(index, is_first)
        self._recovery.hand_out(index)
        self.seed_before_step()

    def seed_before_step(self, place: str = "") -> None:
        """Seeds the random numbers of the script's code before a step. That code is repeated with the step.

        Args:
            place: name of another place in the training, such as the start of an epoch.
        """
        self._seed_step(place or f"in front of {self._index}")

    def seed(self, number: int | None = None) -> None:
        """Seeds the random numbers of the yielded step.

        Args:
            number: index of another step whose numbers to draw, for a loop that counts its steps differently.
        """
        assert self._index is not None
        self._seed_step(self._index if number is None else number)

    def settle(self, *, is_done: bool, is_own_done: bool) -> None:
        """Settles the script's changes since the step was yielded: a repetition of the step will not make them again.

        Args:
            is_done: True if the state contained these changes already when the step was yielded; they are undone. Else
                they become part of the state with which the step begins.
            is_own_done: the same for what this rank has of its own (``per_rank``).
        """
        self._undoing.settle(is_done=is_done, is_own_done=is_own_done)

    def guard(self) -> None:
        """Protects what the script may write between two steps; see `WrittenParameters.guard`."""
        self._undoing.guard()

    def leave_between_steps(self) -> None:
        """Lets stop points raise `StepInterrupted` also between the yield of a step and its beginning.

        For a loop that can abandon its work there, such as an evaluation.
        """
        self._coordination.leaves_between_steps = True

    def take_framework_step(self, number: int) -> None:
        """Notes the last step before the yielded one, by the number of the framework whose loop it is."""
        self._coordination.framework_step = number

    def take_ahead(self, ahead: Callable[[int], bool]) -> None:
        """Sets the steps from which the loop cannot go back; see `SnapshotSchedule.ahead`."""
        self._recovery.take_ahead(ahead)

    def earliest_step(self, present: int) -> int:
        """The earliest step to which the job may go back from step ``present``, with a snapshot in memory."""
        return min((present, *self._recovery.steps_in_memory()))

    def _script_returns(self) -> None:
        """Ends the yielded step when the script asks for the next one.

        After a complete attempt, checks and keeps the script's changes, and writes a checkpoint if one is due. After an
        interrupted attempt, undoes them.
        """
        if not self._was_begun:
            raise UsageError(f"step {self._index} was handed out but not entered: write 'with step:' in the loop")
        self._index = None
        was_complete = self._undoing.returned()
        self._coordination.judge_copy(self._state.host_state)
        if was_complete:
            self._recovery.write_checkpoint()

    def _finish(self) -> None:
        self._undoing.check()
        self._recovery.after_last_step()
        self._coordination.observe("finished")
        self._coordination.machine.finished(self._final_digest())

    def _warm_up(self) -> None:
        self._coordination.is_warming_up = True
        warm_up(self._state, self.warm_up)
        self._coordination.is_warming_up = False

    # ---- one step ---------------------------------------------------------------------------------------------------

    def begin(self, draws_as: int | None = None) -> None:
        """Begins the yielded step.

        Args:
            draws_as: the step whose random numbers this step draws, for a loop that counts its steps differently.

        Raises:
            UsageError: a step has begun already.
        """
        if self._is_inside:
            raise UsageError(f"step {self._index} was entered inside itself")
        assert self._index is not None
        self._is_inside = self._was_begun = True
        self._has_backward = False
        self._begun_s = time.monotonic()
        hold_back_child_errors()
        self._undoing.begin()
        self.seed(draws_as)
        self._coordination.move(StepEvent.STEP_ENTERED)

    def commit(self) -> None:
        """Ends the step and makes it permanent. Without an ``optimizer.step()``, the gradient barrier comes first.

        Raises:
            StepInterrupted: a failure interrupted the step before its update: `undo` it.
            UsageError: the step leaves gradients without an update, or see `DeclaredState.check`.
        """
        coordination = self._coordination
        if coordination.phase in (Phase.FORWARD, Phase.BACKWARD):
            self._refuse_leftover_gradients()
            self._undoing.before_barrier()
            self._pass_barrier(Purpose.END)
        coordination.complete_step()
        self._is_inside = False
        self._undoing.complete()
        self._stop_points.step_took(time.monotonic() - self._begun_s)
        self._recovery.after_step()
        for function in self.take_deferred():
            function()

    def commit_boundary(self, calls: Sequence[Callable[[], object]]) -> None:
        """Same as `commit`, for the boundary of an epoch: a step that makes no update and is none of the loop's.

        All ranks repeat it until each has made its calls. They make them when all have come, and not again. So if a
        rank is lost before it is synced, it may not have made its own, and all repeat the boundary. If it was synced it
        has, and the others make theirs before they are interrupted, as they would finish a backward. A rank notes on
        the controller each call that it has made, for itself and for its replacement.

        Args:
            calls: what `take_deferred` has returned.

        Raises:
            StepInterrupted: as for `commit`.
        """
        self._undoing.before_barrier()
        self._coordination.machine.boundary = self._index
        await_all(self._coordination)
        self._is_calling = True
        try:
            for number, call in enumerate(calls):
                name = f"keepstep: call {number} deferred in step {self._index} by rank {self._machine.rank}"
                with Once(name, self._coordination.ask_once, {}) as mine:
                    if mine:
                        call()
        finally:
            self._is_calling = False
        self._pass_barrier(Purpose.END)  # with the snapshot of what follows the calls: it stands for them
        self.commit()

    def take_deferred(self) -> list[Callable[[], object]]:
        """Returns the calls that were deferred in this attempt, and leaves them to the caller."""
        deferred, self._deferred = self._deferred, []
        return deferred

    def defer(self, function: Callable[[], object]) -> None:
        """Calls a function at the end of this attempt's `commit`, or never if the attempt is interrupted.

        Calls it at once if no step has been yielded that may be repeated.
        """
        if self._coordination.attempting:
            self._deferred.append(function)
        else:
            function()

    def is_interruption(self, error: BaseException) -> bool:
        """Whether an exception that left a step comes from a failure elsewhere. The step is then repeated."""
        coordination = self._coordination
        if isinstance(error, StepInterrupted) or self.is_of_drain(error):
            return True
        if not self._may_be_left or isinstance(error, _ENDS) or not coordination.machine.used_echo:
            return False
        print(
            f"keepstep: step {coordination.machine.steps.step} comes again; it ended in echo with {error!r}",
            file=sys.stderr,
        )
        return True

    def is_of_drain(self, error: BaseException) -> bool:
        """Whether an exception comes of a signal to all processes of the job, which ends processes of this rank.

        The job drains then. Without them this rank cannot complete its step, so the others must not wait for it there.
        """
        coordination = self._coordination
        is_repeatable = coordination.attempting and not coordination.completed
        may_be_left = coordination.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATED) and is_repeatable
        if not may_be_left or isinstance(error, _ENDS) or not has_lost_child(error):
            return False
        if not coordination.hears_of_drain(NEWS_S):
            return False
        coordination.failed("none", error)
        what = f"the job drains, and step {self._index} ended with {error!r}: it is undone"
        print(f"keepstep: rank {coordination.machine.rank}: {what}", file=sys.stderr, flush=True)
        return True

    def undo(self) -> None:
        """Undoes the changes of an interrupted attempt, begun or only yielded."""
        self._is_inside, self._was_begun = False, True
        self._undoing.undo()

    def _pass_barrier(self, purpose: Purpose) -> None:
        recovery = self._recovery
        recovery.before_barrier()
        votes = Votes(purpose if self._state.trains else Purpose.NONE, *recovery.votes())
        recovery.passed_barrier(pass_gradient_barrier(self._coordination, votes, recovery.decide_at_barrier))

    def _refuse_leftover_gradients(self) -> None:
        """Refuses gradients that a step without an update leaves for the next one: a rollback would lose them."""
        if self._coordination.phase is not Phase.BACKWARD or self._coordination.interrupted:
            return
        gradients = [local_of(p.grad) for _name, p in self._state.parameters() if p.grad is not None]
        if not self._state.optimizers or not any(bool(gradient.any()) for gradient in gradients):
            return
        overflow = self._state.scalers() and not all(bool(gradient.isfinite().all()) for gradient in gradients)
        if not overflow:  # after an overflow, a GradScaler skips the update
            raise UsageError(
                f"step {self._coordination.machine.steps.step} ends with gradients but without optimizer.step(): one "
                "'with step' is one optimizer step; accumulate inside it, or call zero_grad() when an update is skipped"
            )

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def _check_stop(self) -> None:
        if self._machine.interrupted and self._may_be_left:
            raise StepInterrupted
        if held_back and self._may_be_left:
            raise held_back.pop()

    @property
    def _may_be_left(self) -> bool:
        """Whether an exception may interrupt the script here. Its work is then undone and repeated."""
        coordination = self._coordination
        if self._is_calling:
            return False
        if coordination.phase is Phase.UPDATED:
            return coordination.leaves_between_steps and coordination.attempting
        return coordination.phase in (Phase.FORWARD, Phase.BACKWARD)

    def _mark_phase(self, phase: Phase) -> None:
        present = self._coordination.phase
        if present is not phase and present in (Phase.FORWARD, Phase.BACKWARD):
            if phase is Phase.BACKWARD and not self._has_backward and self._index in COMPARED:
                self._undoing.check_gradients()
            self._has_backward |= phase is Phase.BACKWARD
            begun = StepEvent.FORWARD_BEGUN if phase is Phase.FORWARD else StepEvent.BACKWARD_BEGUN
            self._coordination.move(begun)

    def _before_update(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        """Runs before every ``optimizer.step()`` of the process: passes the gradient barrier and checks the call."""
        coordination = self._coordination
        if coordination.completed or coordination.is_warming_up or not self._is_in_step(optimizer):
            return
        check_call(arguments, keywords)
        if coordination.phase is not Phase.OPTIMIZER:
            self._undoing.before_barrier()
            self._pass_barrier(Purpose.UPDATE)
        check_gradients(optimizer, coordination)
        coordination.begin_update(sys._getframe(1))

    def _after_update(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        """Runs after every ``optimizer.step()`` of the process."""
        self._coordination.end_update(sys._getframe(1))
        if optimizer not in self._checked and self._is_inside and not self._coordination.is_warming_up:
            self._checked.add(optimizer)
            self._state.refuse_other_than_memory(optimizer)
        if not self._recovery.takes_snapshots:
            check_alone(optimizer, self._coordination)

    def _is_in_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an update is part of the current step. An unprotected optimizer may run outside of steps.

        Raises:
            UsageError: a protected optimizer runs outside of a step, or an unprotected one inside.
        """
        protected = any(optimizer in (known, local_optimizer(known)) for known in self._state.optimizers.values())
        if not self._is_inside and protected:
            raise UsageError("optimizer.step() outside of a step: write it inside 'with step:' of session.steps()")
        if self._is_inside and not protected:
            raise UsageError(
                f"step {self._index}: {type(optimizer).__name__}.step() of an optimizer that is not protected: "
                "its update would be neither undone nor restored; pass it to protect()"
            )
        return protected
