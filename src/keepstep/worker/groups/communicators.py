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
"""After a group's own timeout, until its error is raised. A lost node is given up after 3 s (`protocol.controller`)."""


class Communicators:
    """They are connected, closed, aborted and opened again together; each operation takes the one of its tensors.

    Every group has one for the CPU, which carries keepstep's own traffic. As for a `Communicator`, the training thread
    begins operations, and the rest may come from any thread.
    """

    def __init__(self, name: str, observer: GroupObserver, host: str, device: torch.device) -> None:
        """Args:
        name: of the group.
        observer: is told of operations.
        host: the address of this machine at which the other members reach it.
        device: this process's own; the CPU where it has no other.
        """
        self._name = name
        self._observer = observer
        self._by_type: dict[str, Communicator] = {
            device_type: make(name, observer, host) for device_type, make in backends_of(device).items()
        }
        self.own = self._by_type[CPU]
        """Carries keepstep's own traffic."""
        self._store: Store | None = None
        """Torch has it in C++, which does not keep a Python object alive."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """The types of the devices whose tensors are carried, the CPU first."""
        return tuple(self._by_type)

    def of(self, *tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> Communicator:
        """The one that carries ``tensors``: the first that is found decides, and no tensor goes by the CPU.

        What is on a device that no backend carries is left to the CPU's, which refuses it in torch's own words.
        """
        if len(self._by_type) == 1:
            return self.own
        first = first_tensor(tensors)
        return self.own if first is None else self._by_type.get(first.device.type, self.own)

    # ---- life -----------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether all are connected, and none was closed or aborted."""
        return all(each.is_up for each in self._by_type.values())

    @property
    def num_begun(self) -> int:
        """How many operations this rank has begun since they were connected."""
        return sum(each.num_begun for each in self._by_type.values())

    def connect(self, store: Store, rank: int, size: int, connect_deadline: timedelta, timeout: timedelta) -> None:
        """Connects one after the other, on all members in the same order; see `Communicator.connect`.

        Args:
            store, rank, size, connect_deadline, timeout: as there. Each but the CPU's has keys of its own in the store.

        Raises:
            RuntimeError: a member did not come in time, or `abort` was called meanwhile.
            PeerLost: from ``store``.
        """
        self._store = store
        for device_type, each in self._by_type.items():
            its_store = store if device_type == CPU else PrefixStore(device_type, store)
            each.connect(its_store, rank, size, connect_deadline, timeout)

    def claims(self, generation: int) -> dict[str, GroupClaim]:
        """What this rank can say of the connections, by type of device; empty where those of one cannot stay."""
        claims = {device_type: each.claim(generation) for device_type, each in self._by_type.items()}
        stay = {device_type: claim for device_type, claim in claims.items() if claim is not None}
        return stay if len(stay) == len(claims) else {}

    def reopen(self) -> None:
        """All members have claimed that the connections can stay."""
        for each in self._by_type.values():
            each.reopen()

    def close(self) -> None:
        """Has no operation begin any more; see `Communicator.close`. It waits for nothing."""
        for each in self._by_type.values():
            each.close()

    def abort(self) -> None:
        """Breaks all of them: what waits is freed. At any moment and any number of times."""
        for each in self._by_type.values():
            each.abort()

    def wait_until_quiet(self, deadline_s: float) -> bool:
        """Waits until no operation is under way in any of them.

        Returns:
            False: one did not end in time.
        """
        until_s = time.monotonic() + deadline_s
        return all(each.wait_until_quiet(max(0.0, until_s - time.monotonic())) for each in self._by_type.values())

    def look(self) -> None:
        """Notices which operations have ended; see `Communicator.look`.

        Raises:
            RuntimeError: as there.
        """
        for each in self._by_type.values():
            each.look()

    def release(self) -> None:
        """Gives up what they hold, when they are quiet."""
        for each in self._by_type.values():
            each.release()
        self._store = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations to come."""
        for each in self._by_type.values():
            each.set_timeout(timeout)

    # ---- errors ---------------------------------------------------------------------------------------------------

    def is_of_a_failure(self, communicator: Communicator, error: Exception) -> bool:
        """Whether an operation's error comes from the failure of a peer, so that it is echoed and not raised.

        A connection that ended is taken for a failure and reported. An error of the call itself is the caller's, and so
        is a deadline that has passed: a peer that is dead closes its connections, so nothing waits for it, and one that
        hangs or whose node is lost is known within `DETECTION_S`. Where a failure is known, which is what the group
        waits for after a deadline, both are echoed: what was computed is thrown away anyway. After a deadline of its
        own this rank leaves the group, so that no other waits in it any longer.

        Args:
            communicator: the one that the operation was begun in.
            error: what it has ended in.
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
