"""The connection to the coordinator in one update: sends reports, receives verdicts."""

from __future__ import annotations

import contextlib
import time
from typing import NoReturn

from keepstep.cancel import CancelToken
from keepstep.errors import (
    ChecksumMismatch,
    KeepstepError,
    PeerLost,
    PublisherLost,
    RemoteProtocolError,
    StaleGeneration,
)
from keepstep.protocol.transfer.layout import MISFITS
from keepstep.protocol.transfer.messages import AnyTransferMessage, StillThere, TransferFault, UpdateAborted
from keepstep.weights.channels.connection import Connection, ConnectionStalled, wait, what_of

COORDINATOR = 0
"""The rank that coordinates updates."""
COORDINATOR_PATIENCE_S = 0.65
"""Beyond a consumer's deadline, for a device that shows no movement: more than devices have for each other, so that
the process that waits for the culprit itself has told it before."""
DEVICE_PATIENCE_S = 0.8
"""Beyond a consumer's deadline, for a coordinator that says nothing: it may be waiting for another process itself."""
VERDICT_S = 0.2
"""For the coordinator to say who is to blame for a stall."""
_ERRORS: dict[TransferFault, type[KeepstepError]] = {
    TransferFault.LOST: PublisherLost,
    TransferFault.CHECKSUM: ChecksumMismatch,
    TransferFault.STALE: StaleGeneration,
    **{TransferFault(misfit.value): kind for misfit, kind in MISFITS.items()},
}


def error_of(notice: UpdateAborted, what: str) -> KeepstepError:
    """The error for ``what`` did not come about."""
    return _ERRORS[notice.fault](f"{what}: {notice.culprit}: {notice.reason}")


class UpdateFailed(Exception):
    """The update did not come about; ``notice`` is what all consumers here are told."""

    def __init__(self, fault: TransferFault, culprit: str, reason: str) -> None:
        super().__init__(f"{culprit}: {reason}")
        self.notice = UpdateAborted(0, fault, culprit, reason)


class CoordinatorConnection:
    """Knows when the coordinator was last heard of."""

    def __init__(self, connection: Connection, deadline_s: float, stop: CancelToken) -> None:
        self.connection = connection
        self._stop = stop
        self._deadline_s = deadline_s
        self._heard_s = time.monotonic()

    @property
    def until_s(self) -> float:
        """When it counts as lost, if it sends nothing before."""
        return self._heard_s + self._deadline_s + DEVICE_PATIENCE_S

    def send(self, message: AnyTransferMessage) -> None:
        """Reports. If the coordinator is gone, or wants no more reports, `receive` says what it said last."""
        with contextlib.suppress(PeerLost):
            self.connection.send(message, self.until_s)

    def receive(self) -> AnyTransferMessage | None:
        """The next verdict, or None if it was a sign of life.

        Raises:
            UpdateFailed: the update was aborted, or the coordinator is gone.
            Cancelled: by the stop.
        """
        try:
            if not wait([self.connection], self.until_s, self._stop):
                raise ConnectionStalled(self.connection.who, "says nothing")
            message = self.connection.receive_now()
        except (PeerLost, RemoteProtocolError) as error:
            self.blame(what_of(error))
        self._heard_s = time.monotonic()
        if isinstance(message, UpdateAborted):
            raise UpdateFailed(message.fault, message.culprit, message.reason)
        return None if isinstance(message, StillThere) else message

    def hear_about(self, suspected: UpdateFailed) -> NoReturn:
        """Waits for a moment for what the coordinator says of a stall that was reported: it hears all devices.

        Raises:
            UpdateFailed: its verdict; that it is lost itself, if it has been silent for long; or ``suspected``.
            Cancelled: by the stop.
        """
        silent_s = time.monotonic() - self._heard_s
        until_s = time.monotonic() + VERDICT_S
        while wait([self.connection], until_s, self._stop):
            self.receive()
        if silent_s >= self._deadline_s / 2:
            self.blame(f"has said nothing for {silent_s:.1f} s")
        raise suspected

    def blame(self, reason: str) -> NoReturn:
        """The coordinator is lost."""
        raise UpdateFailed(TransferFault.LOST, f"rank {COORDINATOR}", reason)
