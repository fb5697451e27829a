"""The communicators of one group in one generation: one for each type of device whose tensors the group carries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.worker.backends.by_device import CPU, backends_of
from keepstep.worker.backends.communicator import Communicator, FailureCause, first_tensor
from keepstep.worker.groups.observer import GroupObserver

DETECTION_S = 5.0
"""How long a timed-out operation waits for news of a failure before its error is raised. The controller gives up a lost
node after 3 s (`protocol.controller`)."""


class Communicators:
    """The communicators of one group. They are connected, closed, aborted and reopened together.

    Each operation uses the communicator of its tensors' device. Every group has one for the CPU, which carries
    keepstep's own traffic. As for a `Communicator`, the training thread begins operations; any thread may call the
    other methods.
    """

    def __init__(self, name: str, observer: GroupObserver, host: str, device: torch.device) -> None:
        """Args:
        name: name of the group.
        observer: is notified of operations.
        host: the address of this machine at which the other members reach it.
        device: this process's own device; the CPU if it has no other.
        """
        self._name = name
        self._observer = observer
        self._by_type: dict[str, Communicator] = {
            device_type: make(name, observer, host) for device_type, make in backends_of(device).items()
        }
        self.own = self._by_type[CPU]
        """Carries keepstep's own traffic."""
        self._store: Store | None = None
        """Kept alive here: torch holds it only in C++, which does not keep a Python object alive."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """The types of the devices whose tensors are carried, the CPU first."""
        return tuple(self._by_type)

    def of(self, *tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> Communicator:
        """Returns the communicator for the device of the first tensor, or the CPU's if there is no tensor.

        For a device without a backend it is the CPU's, whose backend refuses the tensor with torch's own message.
        """
        if len(self._by_type) == 1:
            return self.own
        first = first_tensor(tensors)
        return self.own if first is None else self._by_type.get(first.device.type, self.own)

    # ---- life -----------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether all are connected, and none is closed or aborted."""
        return all(each.is_up for each in self._by_type.values())

    @property
    def num_begun(self) -> int:
        """Number of operations that this rank has begun since they were connected."""
        return sum(each.num_begun for each in self._by_type.values())

    def connect(self, store: Store, rank: int, size: int, connect_deadline: timedelta, timeout: timedelta) -> None:
        """Connects one after the other, in the same order on all members; see `Communicator.connect`.

        Args:
            store, rank, size, connect_deadline, timeout: as there. Each but the CPU's uses its own prefix in the store.

        Raises:
            RuntimeError: a member did not connect in time, or `abort` was called meanwhile.
            PeerLost: from ``store``.
        """
        self._store = store
        for device_type, each in self._by_type.items():
            its_store = store if device_type == CPU else PrefixStore(device_type, store)
            each.connect(its_store, rank, size, connect_deadline, timeout)

    def claims(self, generation: int) -> dict[str, GroupClaim]:
        """Returns this rank's claims on the connections, by device type; empty if those of one type cannot stay."""
        claims = {device_type: each.claim(generation) for device_type, each in self._by_type.items()}
        stay = {device_type: claim for device_type, claim in claims.items() if claim is not None}
        return stay if len(stay) == len(claims) else {}

    def reopen(self) -> None:
        """Lets operations begin again, after all members have claimed that the connections can stay."""
        for each in self._by_type.values():
            each.reopen()

    def close(self) -> None:
        """Lets no operation begin any more; see `Communicator.close`. Does not block."""
        for each in self._by_type.values():
            each.close()

    def abort(self) -> None:
        """Aborts all of them and releases waiting threads. At any moment and any number of times."""
        for each in self._by_type.values():
            each.abort()

    def wait_until_quiet(self, deadline_s: float) -> bool:
        """Waits until no operation is in flight in any of them.

        Returns:
            False: an operation did not end in time.
        """
        until_s = time.monotonic() + deadline_s
        return all(each.wait_until_quiet(max(0.0, until_s - time.monotonic())) for each in self._by_type.values())

    def look(self) -> None:
        """Finds operations that have ended; see `Communicator.look`.

        Raises:
            RuntimeError: as there.
        """
        for each in self._by_type.values():
            each.look()

    def release(self) -> None:
        """Releases their resources, when they are quiet."""
        for each in self._by_type.values():
            each.release()
        self._store = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations."""
        for each in self._by_type.values():
            each.set_timeout(timeout)

    # ---- errors ---------------------------------------------------------------------------------------------------

    def is_of_a_failure(self, communicator: Communicator, error: Exception) -> bool:
        """Whether an operation's error comes from the failure of a peer, so that it is echoed and not raised.

        A closed connection counts as a failure and is reported. An error of the call is the caller's. So is a timeout:
        a dead peer closes its connections, so nothing waits for it, and a hung peer or a lost node is known within
        `DETECTION_S`. If a failure is known, errors of the call and timeouts are echoed as well, because the results
        are discarded anyway. The group waits for that news after a timeout. Without it this rank leaves the group, so
        that no other rank waits in it any longer.

        Args:
            communicator: the communicator of the operation.
            error: the operation's error.
        """
        match communicator.cause_of(error):
            case FailureCause.CONNECTION:
                return self._observer.failed(self._name, error)
            case FailureCause.DEADLINE:
                if self._observer.knows_failure(DETECTION_S):
                    return True
                communicator.leave()
                return False
            case FailureCause.CALL:
                return self._observer.knows_failure(0.0)
