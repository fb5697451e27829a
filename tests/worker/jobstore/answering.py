"""A worker's line with a store of the job at its other end, in threads of this process."""

import socket
import threading
from collections.abc import Callable

from keepstep.controller.jobstore import JobStore
from keepstep.protocol.messages import AnyMessage, Stop, StoreAnswered, StoreRequested
from keepstep.protocol.phases import StepEvent
from keepstep.protocol.recovery import Stage
from keepstep.shared import tagpage
from keepstep.transports.framing import FrameDecoder, frame
from keepstep.worker.coordination import Coordination
from keepstep.worker.jobstore.default import DefaultStore
from keepstep.worker.jobstore.store_client import StoreClient
from keepstep.worker.link import Link

WORKER = 5
LEFT_OPEN: list[socket.socket] = []
"""The listener ends the whole process when its agent is gone, so both ends stay open as long as this one lives."""


class Rank:
    """A worker with rank 0 whose script runs in the present thread, and its controller."""

    def __init__(self) -> None:
        ours, self._end = socket.socketpair()
        LEFT_OPEN.extend((ours, self._end))
        self.jobstore = JobStore()
        self.lock = threading.Lock()
        """Held while the controller answers."""
        self.said: list[AnyMessage] = []
        """Reports of the worker."""
        self.waits = threading.Event()
        """A request came that has no answer yet."""
        self.link = Link(ours, WORKER)
        self.coordination = Coordination(self.link, tagpage.TagWriter(tagpage.create("test")), 1, 0)
        self.store = DefaultStore(StoreClient(self.link, self.coordination))
        self.link.listen(self.coordination.on_order)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        decoder = FrameDecoder()
        while data := self._end.recv(1 << 16):
            for message in decoder.feed(data):
                if not isinstance(message, StoreRequested):
                    self.said.append(message)
                else:
                    with self.lock:
                        answers = self.jobstore.request(message)
                    self._answer(answers)
                    if not answers:
                        self.waits.set()

    def _answer(self, answers: list[StoreAnswered]) -> None:
        for answer in answers:
            self._end.sendall(frame(answer))

    def set_by_another(self, key: str, value: bytes = b"") -> None:
        """Another worker sets a key."""
        with self.lock:
            answers = self.jobstore.request(StoreRequested(9, 0, len(key) + 1000, "job_set", (key,), value))
        self._answer([answer for answer in answers if answer.worker == WORKER])

    def settle(self) -> None:
        """The controller finds that only this rank is waited for in a recovery."""
        with self.lock:
            answers = self.jobstore.settle(Stage.STOPPING, 2, [WORKER], lambda worker: False)
        self._answer(answers)

    def stop(self) -> None:
        """A recovery begins."""
        self._end.sendall(frame(Stop(2, "a rank was lost", None)))

    def advance(self, *events: StepEvent) -> None:
        """Moves the rank along, in generation 1."""
        machine = self.coordination.machine
        machine.generation = machine._stop_generation = 1
        machine.steps.restored(0)
        for event in events:
            machine.steps.advance(event)


def later(rank: Rank, *calls: Callable[[], object]) -> None:
    """Calls, in another thread, what is to happen when the rank waits."""

    def run() -> None:
        assert rank.waits.wait(60)
        for call in calls:
            call()

    threading.Thread(target=run, daemon=True).start()
