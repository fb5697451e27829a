"""A device's listener: who comes in, who does not, and what becomes of a listener whose process is gone."""

import os
import queue
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.weights.channels.descriptors import given_back
from tests.worker.ranks import DEADLINE_S, run_ranks

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import ConfigurationError, RemoteProtocolError, StaleGeneration
from keepstep.protocol.transfer.messages import (
    AnyTransferMessage,
    BufferPlace,
    DeviceCalled,
    MovementSeen,
    Refused,
    Welcomed,
    encode,
)
from keepstep.weights.channels import listener as listeners
from keepstep.weights.channels.connection import Connection, ConnectionEnded, ConnectionStalled
from keepstep.weights.channels.listener import MAX_PATH_BYTES, Listener, dial, listener_path, make_private

INTRODUCTION = DeviceCalled(1, 2)
WELCOME = Welcomed(0, 2, BufferPlace(3, 4096, None))
SOON_S = 0.1
"""For what is not going to come."""
NOBODY = 65534
TO_STRANGERS = b"m" + encode(Refused("the caller runs as another user", stale=False))
IS_ROOT = os.geteuid() == 0
Visit = tuple[Connection, AnyTransferMessage]


def soon() -> float:
    return time.monotonic() + SOON_S


def later() -> float:
    return time.monotonic() + DEADLINE_S


class Visits:
    """What a listener's answer was given. ``reply`` goes back to the process that dialled."""

    def __init__(self, reply: AnyTransferMessage | None = WELCOME) -> None:
        self.reply = reply
        self.queue: queue.Queue[Visit] = queue.Queue()

    def answer(self, connection: Connection, message: AnyTransferMessage) -> None:
        if self.reply is not None:
            connection.send(self.reply, later())
        self.queue.put((connection, message))

    def next(self) -> Visit:
        return self.queue.get(timeout=DEADLINE_S)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with given_back():
        yield listener_path(tmp_path, 0)


def end_of(connection: Connection) -> None:
    """Waits until the other end is closed."""
    with pytest.raises(ConnectionEnded):
        connection.receive(later())
    connection.close()


def raw_call(path: Path) -> socket.socket:
    """A bare socket that has come to the listener."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(DEADLINE_S)
    found.connect(os.fspath(path))
    return found


def last_words(caller: socket.socket) -> bytes:
    """What the listener says before it closes the connection, if that can still be read."""
    heard = b""
    with caller, suppress(ConnectionResetError):  # it closes without having read what we sent
        while packet := caller.recv(1000):
            heard += packet
    return heard


# ---- Names and folders ----------------------------------------------------------------------------------------------


def folder_of(parent: Path, door_bytes: int) -> Path:
    """A folder in which the name of rank 0's listener is so long."""
    name = "x" * (door_bytes - len(os.fsencode(parent)) - len("//0.sock"))
    return parent / name


def test_a_name_that_is_too_long_for_a_socket_is_reported(short_folder: Path) -> None:
    folder = folder_of(short_folder, MAX_PATH_BYTES + 1)
    with pytest.raises(ConfigurationError, match=r"is too long for a socket's name \(96 bytes\): use a shorter"):
        listener_path(folder, 0)


def test_a_name_counts_in_bytes(short_folder: Path) -> None:
    folder = folder_of(short_folder, MAX_PATH_BYTES)
    listener_path(folder, 0)
    with pytest.raises(ConfigurationError):
        listener_path(folder.with_name(folder.name[:-1] + "é"), 0)


@pytest.mark.parametrize("spare", [0, 1, 8, 20])
def test_a_door_can_be_made_wherever_its_name_is_not_too_long(short_folder: Path, spare: int) -> None:
    folder = folder_of(short_folder, MAX_PATH_BYTES - spare)
    folder.mkdir(parents=True)
    path = listener_path(folder, 0)
    assert len(os.fsencode(path)) == MAX_PATH_BYTES - spare
    with given_back():
        visits = Visits()
        listener = Listener(path, visits.answer)
        connection, _welcomed = dial(path, INTRODUCTION, "rank 0", later())
        connection.close()
        visits.next()[0].close()
        listener.close()


@pytest.fixture
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose name leaves room to choose how long a socket's is."""
    folder = tmp_path_factory.mktemp("d")
    assert len(os.fsencode(folder)) < MAX_PATH_BYTES - 40
    return folder


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    make_private(folder)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720, 0o702])
def test_a_folder_others_may_write_in_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigurationError, match=r"must belong to this user, and no other user may write in it"):
        make_private(folder)


def test_a_folder_others_may_only_look_into_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()
    folder.chmod(0o755)
    make_private(folder)


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(ConfigurationError, match="must belong to this user"):
        make_private(tmp_path)


# ---- Knocking -------------------------------------------------------------------------------------------------------


def test_a_dial_is_answered_and_the_connection_stands(path: Path) -> None:
    visits = Visits()
    listener = Listener(path, visits.answer)
    connection, welcomed = dial(path, INTRODUCTION, "rank 0", later())
    theirs, message = visits.next()
    assert (message, welcomed, connection.who) == (INTRODUCTION, WELCOME, "rank 0")
    connection.send(MovementSeen(1), later())
    assert theirs.receive(later()) == MovementSeen(1)
    listener.close()
    theirs.send(MovementSeen(2), later())
    assert connection.receive(later()) == MovementSeen(2), "a connection stays when the listener is closed"
    connection.close()
    theirs.close()


def test_each_dial_gets_a_connection_of_its_own(path: Path) -> None:
    visits = Visits()
    listener = Listener(path, visits.answer)
    connections = [dial(path, DeviceCalled(rank, 2), "rank 0", later())[0] for rank in range(5)]
    came = {
        message.rank: connection
        for connection, message in (visits.next() for _ in connections)
        if isinstance(message, DeviceCalled)
    }
    for rank, connection in enumerate(connections):
        came[rank].send(MovementSeen(rank), later())
        assert connection.receive(later()) == MovementSeen(rank)
        connection.close()
        came[rank].close()
    listener.close()


def test_only_this_user_may_open_the_door_and_it_goes_when_it_is_closed(path: Path) -> None:
    listener = Listener(path, Visits().answer)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    listener.close()
    assert list(path.parent.iterdir()) == []
    listener.close()


def test_a_door_that_is_not_there_yet_is_waited_for(path: Path) -> None:
    visits, found = Visits(), queue.Queue[Connection]()
    caller = threading.Thread(target=lambda: found.put(dial(path, INTRODUCTION, "rank 0", later())[0]), daemon=True)
    caller.start()
    listener = Listener(path, visits.answer)
    found.get(timeout=DEADLINE_S).close()
    visits.next()[0].close()
    caller.join()
    listener.close()


def test_no_door_in_time(path: Path) -> None:
    with pytest.raises(ConnectionStalled, match=r"rank 0 does not answer at .*0\.sock"):
        dial(path, INTRODUCTION, "rank 0", soon())


@pytest.mark.usefixtures("_impatient")
def test_a_door_that_does_not_answer_in_time(path: Path) -> None:
    with listener(path), pytest.raises(ConnectionStalled, match="rank 0 does not answer"):
        dial(path, INTRODUCTION, "rank 0", soon())


def listener(path: Path) -> socket.socket:
    """A listener that no process serves, such as that of a stopped process."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.bind(os.fspath(path))
    found.listen(1)
    return found


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "INTRODUCTION_S", SOON_S / 3)


@pytest.mark.parametrize("is_there", [False, True], ids=["no listener", "no answer"])
@pytest.mark.usefixtures("_impatient")
def test_a_token_ends_a_dial(path: Path, is_there: bool) -> None:
    listening = listener(path) if is_there else None
    stop = CancelToken()
    stop.set()
    with pytest.raises(Cancelled):
        dial(path, INTRODUCTION, "rank 0", later(), stop)
    stop.close()
    if listening is not None:
        listening.close()


def test_a_door_that_is_full_is_waited_for(path: Path) -> None:
    """Such as that of a stopped process, at which many have dialled."""
    with listener(path), ExitStack() as stack:
        for _ in range(5):
            caller = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            caller.setblocking(False)
            caller.connect_ex(os.fspath(path))
        with pytest.raises(ConnectionStalled, match="rank 0 does not answer"):
            dial(path, INTRODUCTION, "rank 0", soon())


# ---- What is answered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        (Refused("no room", stale=False), RemoteProtocolError, "rank 0 refuses this process: no room"),
        (Refused("it is over", stale=True), StaleGeneration, "rank 0 refuses this process: it is over"),
        (MovementSeen(1), RemoteProtocolError, "rank 0 answers a dial with MovementSeen"),
    ],
    ids=["refused", "stale", "nonsense"],
)
def test_a_refusal_is_reported(path: Path, reply: AnyTransferMessage, error: type[Exception], told: str) -> None:
    visits = Visits(reply)
    listener = Listener(path, visits.answer)
    with pytest.raises(error, match=told) as caught:
        dial(path, INTRODUCTION, "rank 0", later())
    assert caught.type is error
    end_of(visits.next()[0])
    listener.close()


def test_a_door_that_hangs_up_is_knocked_at_again(path: Path) -> None:
    visits = Visits()
    calls = iter([False, True])

    def answer(connection: Connection, message: AnyTransferMessage) -> None:
        if next(calls):
            visits.answer(connection, message)
        else:
            connection.close()

    listener = Listener(path, answer)
    dial(path, INTRODUCTION, "rank 0", later())[0].close()
    visits.next()[0].close()
    listener.close()


@pytest.mark.parametrize("packet", [b"x", b"m\xff", b"f", b"m" + encode(MovementSeen(1)) + b"\x00"])
def test_who_says_nothing_that_can_be_understood_is_sent_away(path: Path, packet: bytes) -> None:
    visits = Visits()
    listener = Listener(path, visits.answer)
    caller = raw_call(path)
    caller.send(packet)
    assert last_words(caller) == b""
    assert visits.queue.empty()
    listener.close()


@pytest.mark.usefixtures("_impatient")
def test_who_says_nothing_is_sent_away(path: Path) -> None:
    visits = Visits()
    listener = Listener(path, visits.answer)
    assert last_words(raw_call(path)) == b""
    assert visits.queue.empty()
    listener.close()


def test_a_client_that_says_nothing_keeps_no_other_waiting(path: Path) -> None:
    visits = Visits()
    listener = Listener(path, visits.answer)
    silent = raw_call(path)
    dial(path, INTRODUCTION, "rank 0", later())[0].close()
    visits.next()[0].close()
    silent.shutdown(socket.SHUT_WR)  # not its own end too: the last words end when the listener has closed
    assert last_words(silent) == b""
    listener.close()


# ---- Other users ----------------------------------------------------------------------------------------------------


def test_another_users_process_is_not_let_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visits = Visits()
    listener = Listener(path, visits.answer)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    caller = raw_call(path)
    assert last_words(caller) in (b"", TO_STRANGERS)
    assert visits.queue.empty()
    listener.close()


def test_another_users_door_is_not_spoken_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(path) as listening:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
        with pytest.raises(RemoteProtocolError, match=r"0\.sock belongs to another user's process"):
            dial(path, INTRODUCTION, "rank 0", later())
        connection, _address = listening.accept()
        assert last_words(connection) == b"", "not even the introduction"


def stranger(rank: int, size: int, folder: Path) -> tuple[bytes, str]:
    """Another user, who finds the listener open for all: what it hears there."""
    os.chdir(folder)  # the folders above it are closed to others
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    caller = raw_call(Path("0.sock"))
    with suppress(ConnectionError):  # it may be closed already
        caller.send(b"m" + encode(INTRODUCTION))
    heard = last_words(caller)
    try:
        dial(Path("0.sock"), INTRODUCTION, "rank 0", later())
    except RemoteProtocolError as error:
        return heard, str(error)
    return heard, "it was let in"


@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_a_process_of_another_user_is_not_let_in(tmp_path: Path) -> None:
    visits = Visits()
    listener = Listener(listener_path(tmp_path, 0), visits.answer)
    tmp_path.chmod(0o755)
    listener_path(tmp_path, 0).chmod(0o666)
    ((heard, told),) = run_ranks(1, stranger, tmp_path)
    assert heard in (b"", TO_STRANGERS)
    assert told == "0.sock belongs to another user's process"
    assert visits.queue.empty()
    listener.close()


# ---- Doors that are gone, and newer ones ----------------------------------------------------------------------------


def test_a_newer_door_takes_the_place_of_an_older_one(path: Path) -> None:
    older, newer = Visits(), Visits()
    first = Listener(path, older.answer)
    second = Listener(path, newer.answer)
    first.close()
    dial(path, INTRODUCTION, "rank 0", later())[0].close()
    newer.next()[0].close()
    assert older.queue.empty()
    second.close()
    assert not path.exists()


def killed_with_its_door(rank: int, size: int, path: Path) -> None:
    """Has a listener and is killed."""
    Listener(path, Visits().answer)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_listener_of_a_killed_process_leads_nowhere_until_another_takes_its_place(tmp_path: Path) -> None:
    path = listener_path(tmp_path, 0)
    with pytest.raises(AssertionError, match="died without an answer"):
        run_ranks(1, killed_with_its_door, path)
    assert path.exists()
    with given_back():
        with pytest.raises(ConnectionStalled, match="rank 0 does not answer"):
            dial(path, INTRODUCTION, "rank 0", soon())
        visits = Visits()
        listener = Listener(path, visits.answer)
        dial(path, INTRODUCTION, "rank 0", later())[0].close()
        visits.next()[0].close()
        listener.close()


def test_what_a_killed_process_left_half_made_is_removed(path: Path) -> None:
    """The number of a process may come again."""
    left = path.with_name(f".{path.stem}.{os.getpid()}")
    left.touch()
    listener = Listener(path, Visits().answer)
    listener.close()
    assert not left.exists()
