"""What of a gloo communicator is not in `test_conformance.py`: a member that dies while the group is connected."""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from tests.worker.ranks import Watcher, file_store, run_ranks
from torch import distributed as dist

from keepstep.worker.backends.gloo.communicator import GlooCommunicator

NEVER = timedelta(hours=10)


class LosesOne(dist.Store):
    """The member that uses it is killed when the others know where to reach it, before it connects to any of them."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(key, bytes(value))
        self._inner.set("lost", b"")
        os.kill(os.getpid(), signal.SIGKILL)


def lose_one_while_connecting(rank: int, size: int, path: Path, deadline: timedelta, breaks: bool) -> str:
    """Rank 1 is lost. Its address is the greater one, and of two members that one connects to the other."""
    group = GlooCommunicator("world", Watcher(), host=f"127.0.0.{rank + 1}")
    store = file_store(path)
    if rank == 1:
        group.connect(LosesOne(store), rank, size, deadline, NEVER)
    store.wait(["lost"])
    if breaks:
        threading.Timer(0.3, group.abort).start()
    with pytest.raises(RuntimeError) as error:
        group.connect(store, rank, size, deadline, NEVER)
    assert not group.is_up
    group.abort()
    group.release()
    return str(error.value)


def test_a_wait_for_a_member_that_died_before_it_connected_ends_when_it_is_taken_down(tmp_path: Path) -> None:
    answers = run_ranks(2, lose_one_while_connecting, tmp_path, NEVER, True, silent=frozenset({1}))
    assert answers == ["group world was aborted while it was being connected", None]


def test_a_wait_for_a_member_that_died_before_it_connected_has_a_deadline(tmp_path: Path) -> None:
    deadline = timedelta(seconds=0.5)
    answers = run_ranks(2, lose_one_while_connecting, tmp_path, deadline, False, silent=frozenset({1}))
    assert answers == ["group world, rank 0: not all 2 members connected in 0.5 s", None]
