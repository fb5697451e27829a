"""A rank's requests to the store of the job, and the effect of a recovery on a waiting request.

The store outlives generations, so threads other than the training thread continue to wait through a recovery. The
recovery needs the training thread, and what happens to its wait depends on the place:

* before the first step: all ranks restart, so the thread waits until its process is ended;
* in the forward or backward of a step: the step is interrupted as by a collective, and repeated;
* anywhere else nothing can be undone, and the thread continues to wait, because another rank may still set the key. If
  no rank can, since all others stand at a safe point or wait in the same way, the controller ends the wait with an
  error.

While nothing fails, the training thread may wait only before and in the first step of its process, in which libraries
may still connect, and between two steps. Inside of a later step it gets an error instead.
"""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NoReturn

from torch import distributed as dist

from keepstep.errors import StepInterrupted, UsageError
from keepstep.protocol.messages import AT_ONCE, STORE_OPERATIONS_THAT_WAIT, StoreAnswered
from keepstep.protocol.phases import Phase
from keepstep.worker.coordination import Coordination
from keepstep.worker.link import Link


class StoreClient:
    """Sends the operations of one worker to the controller, which performs them. Implements `default.Asking`."""

    def __init__(self, link: Link, coordination: Coordination) -> None:
        self._link = link
        self._coordination = coordination
        self._interruptible: Future[StoreAnswered | None] | None = None
        """The answer that the training thread waits for, if a failure ends the wait."""
        coordination.break_wait = self.interrupt

    def ask(self, operation: str, keys: tuple[str, ...], value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Performs one operation, from any thread.

        Raises:
            DistStoreError: the operation was refused; its keys were not set in time; or no rank will set them.
            StepInterrupted: a failure interrupts the step that waits.
            UsageError: the training thread would wait inside of a step that is not the first one of its process.
        """
        coordination = self._coordination
        is_here = coordination.is_training_thread
        waits = is_here and operation in STORE_OPERATIONS_THAT_WAIT
        at_once = waits and coordination.is_in_later_step and not coordination.interrupted
        interruptible = waits and not at_once and self._can_be_interrupted
        is_held = waits and not at_once and not interruptible
        generation = coordination.machine.generation if is_held else 0
        number, future = self._link.ask_store(generation, operation, keys, AT_ONCE if at_once else value)
        if interruptible:
            self._interruptible = future
            if coordination.interrupted:
                self.interrupt()
        if is_here:
            coordination.page.set_waiting(True)
        try:
            answer = future.result(timeout_s)
        except TimeoutError:
            raise dist.DistStoreError(f"wait timeout after {timeout_s:g} s, keys: {', '.join(keys)[:1000]}") from None
        finally:
            if is_here:
                self._interruptible = None
                coordination.page.set_waiting(False)
            self._link.forget_store(number, is_unanswered=not future.done() or future.result() is None)
        if answer is None:
            self._break_off()
        if answer.error and at_once:
            raise UsageError(
                f"step {coordination.machine.steps.step}: {answer.error}, and inside of a step (after its first one) a "
                "rank must not wait for it: exchange the value with a collective (broadcast_object_list, "
                "all_gather_object), ask with check(), or wait outside of the step"
            )
        if answer.error:
            raise dist.DistStoreError(answer.error)
        return answer.values or ()

    def interrupt(self) -> None:
        """Ends the training thread's wait after a failure, if a failure may end it. From any thread."""
        future = self._interruptible
        if future is not None:
            with suppress(InvalidStateError):  # the answer has arrived at the same time
                future.set_result(None)

    @property
    def _can_be_interrupted(self) -> bool:
        return self._coordination.phase in (Phase.STARTING, Phase.FORWARD, Phase.BACKWARD)

    def _break_off(self) -> NoReturn:
        if self._coordination.phase is Phase.STARTING:
            self._coordination.stand_until_ended()
        raise StepInterrupted
