"""A rank's requests to the store of the job, and the effect of a recovery on a waiting request.

The store outlives generations, so threads other than the training thread continue to wait through a recovery. The
recovery needs the training thread, and the effect on its wait depends on the place:

* in the forward or backward of a step: the step is interrupted as by a collective, and repeated;
* before the first step: all ranks restart, so the thread waits until its process is ended;
* anywhere else nothing can be undone, and the thread continues to wait, because another rank may still set the key. If
  no rank can, since all others stand at a safe point or wait in the same way, the controller reports that. The wait
  then ends in an error or, after ``optimizer.step()`` inside of a step, this rank's copy is restored from another one.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NoReturn

from torch import distributed as dist

from keepstep.errors import StepInterrupted
from keepstep.protocol.messages import STORE_OPERATIONS_THAT_WAIT, Resume, Stop, StoreAnswered, WorkerOrder
from keepstep.protocol.phases import Phase
from keepstep.worker.coordination import Coordination
from keepstep.worker.link import Link

POLL_INTERVAL_S = 0.05
"""Minimum interval between two checks of a timeout, in seconds. Timeouts of the script do not run in a recovery."""


class Downtime:
    """Adds up the time that a worker has spent in recoveries. One thread writes; any thread reads."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since_s: float | None = None

    def follow(self, order: WorkerOrder, now_s: float) -> None:
        """Records the begin or the end of a recovery, by an order."""
        since_s = self._since_s
        if isinstance(order, Stop) and since_s is None:
            self._since_s = now_s
        elif isinstance(order, Resume) and since_s is not None:
            self._total_s, self._since_s = self._total_s + now_s - since_s, None

    def until(self, now_s: float) -> float:
        """Seconds in recoveries until now, the current one included."""
        since_s = self._since_s
        return self._total_s + (0.0 if since_s is None else now_s - since_s)


class StoreClient:
    """Sends the operations of one worker to the controller, which performs them. Implements `default.Asking`."""

    def __init__(self, link: Link, coordination: Coordination) -> None:
        self._link = link
        self._coordination = coordination
        self._downtime = Downtime()
        self._interruptible: Future[StoreAnswered | None] | None = None
        """The answer that the training thread waits for, if a failure ends the wait."""
        coordination.break_wait = self.interrupt
        coordination.follow = lambda order: self._downtime.follow(order, time.monotonic())

    def ask(self, operation: str, keys: tuple[str, ...], value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Performs one operation, from any thread. Time spent in recoveries does not count towards the timeout.

        Raises:
            DistStoreError: the operation was refused; its keys were not set in time; or no rank will set them.
            StepInterrupted: a failure interrupts the step that waits.
        """
        coordination = self._coordination
        is_here = coordination.is_training_thread
        is_held = is_here and operation in STORE_OPERATIONS_THAT_WAIT
        interruptible = is_held and self._can_be_interrupted
        generation = coordination.machine.generation if is_held and not interruptible else 0
        number, future = self._link.ask_store(generation, operation, keys, value)
        if interruptible:
            self._interruptible = future
            if coordination.interrupted:
                self.interrupt()
        if is_here:
            coordination.page.set_waiting(True)
        try:
            answer = self._await(future, timeout_s)
        except TimeoutError:
            raise dist.DistStoreError(f"wait timeout after {timeout_s:g} s, keys: {', '.join(keys)[:1000]}") from None
        finally:
            if is_here:
                self._interruptible = None
                coordination.page.set_waiting(False)
            self._link.forget_store(number, is_unanswered=not future.done() or future.result() is None)
        if answer is None:
            self._break_off()
        if answer.error:
            if is_held and coordination.phase is Phase.OPTIMIZER:
                coordination.give_up_update()
                raise StepInterrupted
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
        coordination = self._coordination
        return coordination.phase in (Phase.STARTING, Phase.FORWARD, Phase.BACKWARD)

    def _await(self, future: Future[StoreAnswered | None], timeout_s: float) -> StoreAnswered | None:
        began_s = time.monotonic()
        down_s = self._downtime.until(began_s)
        left_s = timeout_s
        while True:
            try:
                return future.result(left_s)
            except TimeoutError:
                now_s = time.monotonic()
                left_s = timeout_s - (now_s - began_s) + self._downtime.until(now_s) - down_s
                if left_s <= 0:
                    raise
                left_s = max(left_s, POLL_INTERVAL_S)

    def _break_off(self) -> NoReturn:
        if self._coordination.phase is Phase.STARTING:
            self._coordination.stand_until_ended()
        raise StepInterrupted
