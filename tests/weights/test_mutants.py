"""Mutants of what keeps a peer of the weights in its place: each one is caught by the test that is named for it."""

from __future__ import annotations

import ctypes
import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.memory import test_buffers
from tests.weights.remote import test_link, test_node

from keepstep.errors import ConfigurationError, PeerLost, RemoteProtocolError
from keepstep.weights.memory.buffers import SlotBuffer
from keepstep.weights.remote import feeder, link, messages
from keepstep.weights.remote.feeder import FedTunnels, Feeder
from keepstep.weights.remote.link import NodeLink
from keepstep.weights.remote.stream import ByteStream

Plant = Callable[[pytest.MonkeyPatch], None]


def a_view_does_not_keep_the_memory(patch: pytest.MonkeyPatch) -> None:
    def view(self: SlotBuffer, slot: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * self.slot_bytes).from_address(self.address(slot))
        return torch.frombuffer(memory, dtype=torch.uint8)

    patch.setattr(SlotBuffer, "view", view)


def a_node_names_its_consumers_as_it_likes(patch: pytest.MonkeyPatch) -> None:
    right = FedTunnels.hear

    def hear(self: FedTunnels, message: Any) -> None:
        if isinstance(message, messages.TunnelOpened):
            with patch.context() as inner:
                inner.setattr(feeder.msgspec.structs, "replace", lambda introduction, **_named: introduction)
                right(self, message)
        else:
            right(self, message)

    patch.setattr(FedTunnels, "hear", hear)


def what_nobody_wants_is_allocated_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ByteStream, "drop", lambda self, num_bytes: self.receive_into(memoryview(bytearray(num_bytes))))


def an_error_in_a_stream_s_thread_is_swallowed(patch: pytest.MonkeyPatch) -> None:
    def run(self: NodeLink, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except (PeerLost, RemoteProtocolError, ConfigurationError) as error:
                self._lose(link.what_of(error))
            except Exception:  # the mutant
                return

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    patch.setattr(NodeLink, "run", run)


def one_too_many_callers_is_closed_itself(patch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(Feeder._listen)
    changed = source.replace("first = next(iter(self._greetings))", "sock.close(); continue")
    assert changed != source
    scope: dict[str, Any] = {}
    exec(textwrap.dedent(changed), vars(feeder), scope)
    patch.setattr(Feeder, "_listen", scope["_listen"])


MUTANTS: dict[Plant, Callable[..., None]] = {
    a_view_does_not_keep_the_memory: test_buffers.test_memory_that_is_in_use_outlives_its_buffer,
    a_node_names_its_consumers_as_it_likes: test_node.test_a_node_cannot_take_the_name_of_anothers_consumer,
    what_nobody_wants_is_allocated_at_once: (
        test_link.test_a_bucket_that_nobody_wants_takes_no_memory_however_large_it_is_said_to_be
    ),
    an_error_in_a_stream_s_thread_is_swallowed: (
        test_link.test_an_unforeseen_error_in_a_thread_ends_the_link_with_the_reason
    ),
    one_too_many_callers_is_closed_itself: test_node.test_callers_that_say_nothing_keep_no_node_out,
}


def run_with(plant: str, test: str) -> int:
    """pytest's exit code for a test with a mutant, in a process of its own: one of them ends it with a signal."""
    program = (
        "import sys, pytest\nfrom tests.weights import test_mutants\n"
        "patch = pytest.MonkeyPatch()\ngetattr(test_mutants, sys.argv[1])(patch)\n"
        "sys.exit(pytest.main(['-q', '-m', '', '-p', 'no:cacheprovider', sys.argv[2]]))"
    )
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", program, plant, test], cwd=root, timeout=90).returncode


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_mutant_is_caught(plant: Plant) -> None:
    test = MUTANTS[plant]
    code = run_with(plant.__name__, f"{inspect.getfile(test)}::{test.__name__}")
    assert code == pytest.ExitCode.TESTS_FAILED or code < 0, code
