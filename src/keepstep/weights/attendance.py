"""The consumers that are attached to one device."""

from __future__ import annotations

import threading

from keepstep.protocol.transfer.layout import Consumer
from keepstep.weights.device import Attached
from keepstep.weights.lines.line import Line


class Attendance:
    """Who is attached, by name, in the order in which they came. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._present: dict[str, Attached] = {}

    def add(self, consumer: Consumer, line: Line) -> None:
        """A consumer has come; one of the same name that was there is replaced."""
        with self._lock:
            former = self._present.pop(consumer.name, None)
            self._present[consumer.name] = Attached(consumer, line)
            self._lock.notify_all()
        if former is not None:
            former.line.close()

    def present(self) -> list[Attached]:
        """Those who are there now; whoever has gone is forgotten."""
        with self._lock:
            gone = [name for name, each in self._present.items() if each.line.is_closed or each.line.has_ended]
            lines = [self._present.pop(name).line for name in gone]
            present = list(self._present.values())
        for line in lines:
            line.close()
        return present

    def wait_for(self, num_consumers: int, timeout_s: float) -> bool:
        """Waits until so many are attached; whether they came in time."""
        with self._lock:
            return self._lock.wait_for(lambda: len(self._present) >= num_consumers, timeout_s)

    def close(self) -> None:
        """Sends everybody away."""
        with self._lock:
            present, self._present = self._present, {}
        for each in present.values():
            each.line.close()
