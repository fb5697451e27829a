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
"""Added to a consumer's deadline for a device that reports no progress. It is more than devices grant each other, so
that the process that waits for the culprit reports first."""
DEVICE_PATIENCE_S = 0.8
"""Added to a consumer's deadline for a coordinator that sends nothing: it may itself be waiting for another process."""
VERDICT_S = 0.2
"""How long to wait for the coordinator to name the cause of a stall."""
_ERRORS: dict[TransferFault, type[KeepstepError]] = {
    TransferFault.LOST: PublisherLost,
    TransferFault.CHECKSUM: ChecksumMismatch,
    TransferFault.STALE: StaleGeneration,
    **{TransferFault(misfit.value): kind for misfit, kind in MISFITS.items()},
}


def error_of(notice: UpdateAborted, what: str) -> KeepstepError:
    """The exception for an aborted update. ``what`` is the first part of its message."""
    return _ERRORS[notice.fault](f"{what}: {notice.culprit}: {notice.reason}")


class UpdateFailed(Exception):
    """The update was aborted. ``notice`` is the message for all consumers of this device."""

    def __init__(self, fault: TransferFault, culprit: str, reason: str) -> None:
        super().__init__(f"{culprit}: {reason}")
        self.notice = UpdateAborted(0, fault, culprit, reason)


class CoordinatorConnection:
    """A device's connection to the coordinator. It tracks the time of the coordinator's last message."""

    def __init__(self, connection: Connection, deadline_s: float, stop: CancelToken) -> None:
        self.connection = connection
        self._stop = stop
        self._deadline_s = deadline_s
        self._heard_s = time.monotonic()

    @property
    def until_s(self) -> float:
        """When the coordinator counts as lost unless it sends something before."""
        return self._heard_s + self._deadline_s + DEVICE_PATIENCE_S

    def send(self, message: AnyTransferMessage) -> None:
        """Sends a report. If the coordinator has closed the connection, `receive` returns its last message."""
        with contextlib.suppress(PeerLost):
            self.connection.send(message, self.until_s)

    def receive(self) -> AnyTransferMessage | None:
        """Waits for the next verdict. Returns None for a sign of life.

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
        """Waits briefly for the coordinator's verdict on a reported stall. The coordinator has reports of all devices.

        Raises:
            UpdateFailed: the verdict; or the loss of the coordinator, if it has been silent for long; or ``suspected``.
            Cancelled: the cancel token was set.
        """
        silent_s = time.monotonic() - self._heard_s
        until_s = time.monotonic() + VERDICT_S
        while wait([self.connection], until_s, self._stop):
            self.receive()
        if silent_s >= self._deadline_s / 2:
            self.blame(f"has said nothing for {silent_s:.1f} s")
        raise suspected

    def blame(self, reason: str) -> NoReturn:
        """Raises `UpdateFailed` for the loss of the coordinator."""
        raise UpdateFailed(TransferFault.LOST, f"rank {COORDINATOR}", reason)
