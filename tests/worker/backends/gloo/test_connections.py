"""Cutting a group's connections, and nothing else."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import DEADLINE_S, Watcher, file_store, meet, plain_gloo, run_ranks
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo

from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.backends.gloo.communicator import GlooCommunicator
from keepstep.worker.backends.gloo.connections import Connections, listening_since, socket_inodes
from keepstep.worker.backends.own_traffic import is_raised

Pair = tuple[socket.socket, socket.socket]


def listener() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(DEADLINE_S)
    return server


@contextmanager
def tcp_pair(server: socket.socket) -> Iterator[Pair]:
    """Two connected TCP sockets; both ends belong to this process."""
    with socket.create_connection(server.getsockname(), timeout=DEADLINE_S) as ours:
        theirs, _address = server.accept()
        theirs.settimeout(DEADLINE_S)
        with theirs:
            yield ours, theirs


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with listener() as found:
        yield found


def is_alive(pair: Pair) -> bool:
    """Whether a byte goes through, both ways; at the end of the stream none does."""
    try:
        for sender, receiver in (pair, pair[::-1]):
            sender.sendall(b"x")
            if receiver.recv(1) != b"x":
                return False
    except OSError:
        return False
    return True


# ---- one process ----------------------------------------------------------------------------------------------------


def test_only_what_was_opened_in_between_is_cut(server: socket.socket) -> None:
    connections = Connections()
    with ExitStack() as stack:
        before = stack.enter_context(tcp_pair(server))
        with connections.recording():
            inside = stack.enter_context(tcp_pair(server))
        after = stack.enter_context(tcp_pair(server))
        assert is_alive(inside)
        connections.cut()
        assert [is_alive(pair) for pair in (before, inside, after)] == [True, False, True]
        connections.cut()
        connections.close()


def test_listening_unix_and_datagram_sockets_are_left_alone() -> None:
    connections = Connections()
    with ExitStack() as stack:
        with connections.recording():
            server = stack.enter_context(listener())
            unix = socket.socketpair()
            udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            udp.bind(("127.0.0.1", 0))
        connections.cut()
        with tcp_pair(server) as pair:
            assert is_alive(pair)
        assert is_alive(unix)
        udp.connect(udp.getsockname())
        assert udp.send(b"x") == 1
        assert udp.recv(1) == b"x"
        connections.close()
        for end in unix:
            end.close()


def test_a_descriptor_that_is_reused_is_not_shut(server: socket.socket) -> None:
    connections = Connections()
    with ExitStack() as stack:
        other = stack.enter_context(tcp_pair(server))
        with connections.recording():
            ours = socket.create_connection(server.getsockname(), timeout=DEADLINE_S)
            theirs = stack.enter_context(server.accept()[0])
        number = ours.fileno()
        ours.close()
        os.dup2(other[0].fileno(), number)
        assert is_alive(other)
        connections.cut()
        assert is_alive(other)
        theirs.settimeout(DEADLINE_S)
        assert theirs.recv(1) == b"", "the connection itself is cut, though the number means something else now"
        os.close(number)
        connections.close()


def test_a_cut_while_building_ends_what_is_there_and_what_comes(server: socket.socket) -> None:
    connections = Connections()
    with ExitStack() as stack:
        with connections.recording():
            first = stack.enter_context(tcp_pair(server))
            cutting = threading.Thread(target=connections.cut)
            cutting.start()
            cutting.join(DEADLINE_S)
            assert not is_alive(first), "who builds may wait in this connection, so it ends at once"
            second = stack.enter_context(tcp_pair(server))
        assert not is_alive(second)
        connections.close()


def test_a_build_that_fails_leaves_its_connections_to_be_cut(server: socket.socket) -> None:
    connections = Connections()
    with ExitStack() as stack:
        with suppress(RuntimeError), connections.recording():
            pair = stack.enter_context(tcp_pair(server))
            raise RuntimeError("a member did not come")
        connections.cut()
        assert not is_alive(pair)
        connections.close()


def test_a_connection_the_peer_has_ended_does_no_harm(server: socket.socket) -> None:
    connections = Connections()
    with connections.recording():
        ours = socket.create_connection(server.getsockname(), timeout=DEADLINE_S)
    theirs, _address = server.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    theirs.close()  # a reset, as after a kill
    with pytest.raises(ConnectionResetError):
        ours.recv(1)
    connections.cut()
    connections.close()
    ours.close()


def test_no_descriptor_is_kept_after_close(server: socket.socket) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        connections = Connections()
        with ExitStack() as stack:
            with connections.recording():
                stack.enter_context(tcp_pair(server))
                stack.enter_context(listener())
            connections.cut()
            connections.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_two_groups_are_cut_apart(server: socket.socket) -> None:
    first, second = Connections(), Connections()
    with ExitStack() as stack:
        with first.recording():
            one = stack.enter_context(tcp_pair(server))
        with second.recording():
            two = stack.enter_context(tcp_pair(server))
        first.cut()
        assert [is_alive(one), is_alive(two)] == [False, True]
        second.cut()
        assert not is_alive(two)
        first.close()
        second.close()


def test_what_another_thread_opens_meanwhile_to_elsewhere_is_left_alone() -> None:
    connections = Connections()
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.2", 0)))
        pairs: list[Pair] = []
        with connections.recording():
            # The user's own thread: a logger's connection to its server, or a data loader's to a store.
            thread = threading.Thread(target=lambda: pairs.append(stack.enter_context(tcp_pair(server))))
            thread.start()
            thread.join(DEADLINE_S)
        stack.callback(connections.close)
        connections.cut()
        assert is_alive(pairs[0])


def test_where_members_listen_tells_which_connections_are_gloos(server: socket.socket) -> None:
    """Among those of the same address, which on several machines may lead anywhere."""
    connections = Connections()
    with ExitStack() as stack, listener() as other, connections.recording():
        connections.restrict([server.getsockname()])
        gloos, scripts = stack.enter_context(tcp_pair(server)), stack.enter_context(tcp_pair(other))
        connections.cut()
        assert [is_alive(gloos), is_alive(scripts)] == [False, True]
        connections.close()


def test_what_listens_since_a_moment(server: socket.socket) -> None:
    before = socket_inodes()
    with listener() as later, tcp_pair(server):
        assert listening_since(before) == [later.getsockname()]
    assert listening_since(before) == []


# ---- real gloo, real processes --------------------------------------------------------------------------------------


def wait_for_a_stopped_peer(rank: int, size: int, path: Path) -> list[bool]:
    """The last rank stops; the others wait in a collective that only a cut can end (gloo's deadline is far away)."""
    connections = Connections()
    with listener() as before, tcp_pair(before) as unrelated:
        with connections.recording():
            group = plain_gloo(path, rank, size)
            inside = listener()
        meet(path, size, "built")
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        tensor = torch.ones(1 << 16)
        work = group.allreduce([tensor], AllreduceOptions())
        raised = threading.Event()

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError:
                raised.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        connections.cut()
        waiting.join()
        with inside, tcp_pair(inside) as pair:
            return [raised.is_set(), is_alive(unrelated), is_alive(pair)]


@pytest.mark.parametrize("size", [2, 3])
def test_a_cut_frees_who_waits_for_a_stopped_peer(size: int, tmp_path: Path) -> None:
    answers = run_ranks(size, wait_for_a_stopped_peer, tmp_path, silent=frozenset({size - 1}))
    assert answers == [[True, True, True]] * (size - 1) + [None]


def opened_meanwhile(rank: int, size: int, path: Path) -> list[bool]:
    """A thread of the script opens a connection between the same addresses while the group is being built."""
    with ExitStack() as stack:
        other, pairs = stack.enter_context(listener()), list[Pair]()
        create = ProcessGroupGloo.create_device

        def create_device(**settings: Any) -> Any:
            pairs.append(stack.enter_context(tcp_pair(other)))
            return create(**settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ProcessGroupGloo, "create_device", create_device)
            group = GlooCommunicator("world", Watcher())
            group.connect(file_store(path), rank, size, timedelta(seconds=DEADLINE_S), timedelta(seconds=DEADLINE_S))
        tensor = torch.ones(3)
        group.begin(
            Operation.ALL_REDUCE, lambda inner: inner.allreduce([tensor], AllreduceOptions()), [], is_raised
        ).wait()
        num_cut = len(group._connections._sockets)
        group.abort()
        return [is_alive(pairs[0]), num_cut == size - 1, tensor.tolist() == [size] * 3]


@pytest.mark.parametrize("size", [2, 3])
def test_connections_of_the_script_outlive_a_group_that_was_built_meanwhile(size: int, tmp_path: Path) -> None:
    assert run_ranks(size, opened_meanwhile, tmp_path) == [[True] * 3] * size
