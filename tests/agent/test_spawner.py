"""The spawner, with real processes: how workers begin and how they end, by both methods."""

import asyncio
import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests.agent.crew import DEADLINE_S, PYTHON, Crew, Worker

from keepstep.agent.spawner import SpawnerClient, SpawnerProcess, SpawnerSettings
from keepstep.transports.spawning import (
    LIFELINE_FD,
    LINK_FD,
    MAX_PACKET_BYTES,
    PAGE_FD,
    SNAPSHOTS_FD,
    SpawnWorker,
    WorkerRefused,
    decode_report,
    send_request,
)
from keepstep.worker.process.spawner import Spawner

SCRIPT = str(Path(__file__).with_name("worker_script.py"))


@pytest.fixture(scope="module", params=["fork", "spawn"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    found = Crew(request.param == "fork")
    yield found
    found.close()


@pytest.fixture
def own_crew() -> Iterator[Crew]:
    """One that the test may break; fresh interpreters, for it is there at once."""
    found = Crew(fork=False)
    yield found
    found.close()


@pytest.fixture(scope="module")
def forker() -> Iterator[Crew]:
    found = Crew(fork=True)
    yield found
    found.close()


def run(crew: Crew, *arguments: str) -> Worker:
    """The script in the quickest way: forked, or as a raw command, for keepstep's own first lines import torch."""
    return crew.spawn(SCRIPT, *arguments) if crew.fork else crew.spawn(PYTHON, SCRIPT, *arguments, raw=True)


def run_text(crew: Crew, folder: Path, text: str) -> Worker:
    """The same with a script that is given as text."""
    script = write(folder, text)
    return crew.spawn(script) if crew.fork else crew.spawn(PYTHON, script, raw=True)


def write(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def ended(link: socket.socket) -> bool:
    """Whether every process that held the other end is gone, within the deadline."""
    readable, _, _ = select.select([link], [], [], DEADLINE_S)
    return bool(readable) and link.recv(1) == b""


# ---- how it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("exit", "0"), 0),
        (("exit", "3"), 3),
        (("exit-text",), 1),
        (("exit-hard", "7"), 7),
        (("raise",), 1),
        (("signal", "SIGKILL"), -signal.SIGKILL),
        (("signal", "SIGTERM"), -signal.SIGTERM),
        (("signal", "SIGSEGV"), -signal.SIGSEGV),
    ],
)
def test_exit_codes_and_signals_are_reported(crew: Crew, arguments: tuple[str, ...], status: int) -> None:
    worker = run(crew, *arguments)
    assert worker.status == status
    report = worker.exited.result()
    assert (report.worker, report.pid) == (worker.number, worker.pid)
    if arguments == ("exit-text",):
        assert worker.stderr == "a last word\n"
    if arguments == ("raise",):
        assert "Traceback" in worker.stderr
        assert "ValueError: not today" in worker.stderr


def test_a_fresh_interpreter_reports_how_its_script_ended(crew: Crew) -> None:
    workers = [crew.spawn(SCRIPT, *arguments) for arguments in (("exit", "3"), ("raise",), ("signal", "SIGKILL"))]
    assert [worker.status for worker in workers] == [3, 1, -signal.SIGKILL]
    assert "ValueError: not today" in workers[1].stderr


def test_a_worker_that_is_killed_from_outside_is_reported(crew: Crew) -> None:
    worker = run(crew, "hold")
    assert worker.link.recv(1) == b"x"
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.status == -signal.SIGKILL


@pytest.mark.parametrize("limit", [0, -1])
def test_a_core_file_is_reported_where_there_is_one(limit: int, crew: Crew, tmp_path: Path) -> None:
    """As the kernel tells a parent of any other process that ends like this."""
    text = f"import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, ({limit}, {limit}))\n"
    text += f"os.chdir({str(tmp_path)!r}); os.kill(os.getpid(), signal.SIGSEGV)"
    pid = os.posix_spawn(PYTHON, [PYTHON, "-c", text], os.environ)
    _pid, status = os.waitpid(pid, 0)
    worker = run_text(crew, tmp_path, text)
    assert (worker.status, worker.exited.result().has_dumped) == (-signal.SIGSEGV, os.WCOREDUMP(status))
    assert limit != 0 or not os.WCOREDUMP(status)


def test_a_worker_can_be_killed_as_soon_as_it_is_known(crew: Crew) -> None:
    """By its process group, as the agent does it."""
    for _ in range(10):
        worker = run(crew, "hold")
        os.killpg(worker.pid, signal.SIGKILL)
        assert worker.status == -signal.SIGKILL


def test_a_raw_command_is_run_as_it_is(crew: Crew) -> None:
    worker = crew.spawn("/bin/sh", "-c", "echo $0 $GIVEN; exit 5", "argument", raw=True, GIVEN="value")
    assert (worker.status, worker.stdout) == (5, "argument value\n")


def test_a_module_is_run_by_its_name(crew: Crew) -> None:
    worker = crew.spawn("calendar", "2024", "1", module=True)
    assert worker.status == 0
    assert "January 2024" in worker.stdout


def test_many_at_once_are_all_reported(crew: Crew) -> None:
    workers = [crew.spawn("/bin/sh", "-c", f"exit {number}", raw=True) for number in range(12)]
    assert [worker.status for worker in workers] == list(range(12))
    assert len({worker.pid for worker in workers}) == 12


def test_more_than_a_socket_holds_may_be_asked_for_at_once(own_crew: Crew) -> None:
    os.kill(own_crew.spawner_pid, signal.SIGSTOP)
    workers = [own_crew.spawn("/bin/sh", "-c", f"exit {number}", "x" * 4000, raw=True) for number in range(60)]
    os.kill(own_crew.spawner_pid, signal.SIGCONT)
    assert [worker.status for worker in workers] == list(range(60))


def test_arguments_may_be_long(crew: Crew) -> None:
    """A shell's ``data/*`` with thousands of files; longer than any packet."""
    assert run(crew, "exit", "4", *(f"data/{'part' * 10}-{number}" for number in range(6000))).status == 4


# ---- how it begins --------------------------------------------------------------------------------------------------

LOOK_AROUND = """
    import json, os, signal, stat, sys
    fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    fds = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
    def kind(fd):
        mode = os.fstat(fd).st_mode
        return "socket" if stat.S_ISSOCK(mode) else os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
    print(json.dumps(dict(
        name=__name__, argv=sys.argv, path=sys.path[0], launcher=os.environ.get("FROM_THE_LAUNCHER"),
        own=os.environ.get("OWN"), group=os.getpgid(0) == os.getpid(), session=os.getsid(0) == os.getpid(),
        interrupt=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        child=signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, torch="torch" in sys.modules,
        kinds=[kind(3), kind(4)], fds=fds, main=sys.modules["__main__"].__dict__.get("fds") == fds,
    )))
"""


def test_an_interrupt_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    """In the background of a shell script. A command of the user's own inherits it, too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        crew = Crew(fork=True)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        script = write(tmp_path, "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)")
        assert [crew.spawn(script).stdout, crew.spawn(PYTHON, script, raw=True).stdout] == ["True\n"] * 2
    finally:
        crew.close()


@pytest.fixture(scope="module")
def seen(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    script = write(tmp_path_factory.mktemp("script"), LOOK_AROUND)
    worker = crew.spawn(script, "one", "--two", OWN="1")
    assert worker.status == 0, worker.stderr
    found: dict[str, object] = json.loads(worker.stdout)
    assert found["argv"] == [script, "one", "--two"]
    assert found["path"] == str(Path(script).parent)
    return found


def test_the_script_is_main_in_a_session_of_its_own(seen: dict[str, object]) -> None:
    assert [seen[key] for key in ("name", "group", "session", "child", "main")] == ["__main__", True, True, True, True]


def test_it_sees_the_launchers_environment_and_its_own(seen: dict[str, object]) -> None:
    assert (seen["launcher"], seen["own"]) == ("here", "1")


def test_it_finds_link_and_page_where_it_expects_them(seen: dict[str, object]) -> None:
    assert seen["kinds"] == ["socket", "/memfd"]


def test_a_forked_worker_has_torch_already(seen: dict[str, object], crew: Crew) -> None:
    if crew.fork:
        assert seen["torch"]
        assert crew.ready.worker_bytes > 0
    else:
        assert crew.ready.worker_bytes == 0


def test_a_line_that_it_prints_is_out_at_once_and_whole(crew: Crew, tmp_path: Path) -> None:
    """The last words of a worker that is killed would be lost in a buffer, or mix with another's if in pieces."""
    read, write_end = os.pipe2(os.O_DIRECT)  # what was written at once is read at once, and no more than that
    script = write(tmp_path, "import os; print('last', 1); print('words'); os.kill(os.getpid(), 9)")
    worker = crew.spawn(script, stdout=write_end)
    os.close(write_end)
    assert worker.status == -signal.SIGKILL
    assert [os.read(read, 100) for _ in range(3)] == [b"last 1\n", b"words\n", b""]
    os.close(read)


def test_it_can_be_interrupted(seen: dict[str, object]) -> None:
    assert seen["interrupt"]


def test_it_has_no_descriptor_that_is_not_its_own(seen: dict[str, object]) -> None:
    assert seen["fds"] == [0, 1, 2, LINK_FD, PAGE_FD, LIFELINE_FD, SNAPSHOTS_FD]


def test_the_spawner_keeps_no_descriptor_of_a_worker(own_crew: Crew) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{own_crew.spawner_pid}/fd"))

    assert run(own_crew, "exit", "0").status == 0
    before = count()
    assert [run(own_crew, "exit", "0").status for _ in range(3)] == [0] * 3
    assert count() == before


def test_an_environment_is_one_workers_own(crew: Crew) -> None:
    first = crew.spawn("/bin/sh", "-c", "echo [$ONLY_MINE]", raw=True, ONLY_MINE="x")
    second = crew.spawn("/bin/sh", "-c", "echo [$ONLY_MINE]", raw=True)
    assert (first.stdout, second.stdout) == ("[x]\n", "[]\n")


def test_the_link_is_connected_to_the_agent(forker: Crew, tmp_path: Path) -> None:
    script = write(tmp_path, "import os; os.write(3, os.read(3, 10)[::-1])")
    worker = forker.spawn(script)
    worker.link.sendall(b"abc")
    assert worker.link.recv(10) == b"cba"
    assert worker.status == 0
    assert ended(worker.link), "the end of the worker is the end of its link"


def test_what_is_left_at_the_end_is_done(forker: Crew, tmp_path: Path) -> None:
    """Exit handlers, threads, executors that were never shut down, and what is still in a buffer."""
    script = write(
        tmp_path,
        """
        import atexit, sys, threading
        from concurrent.futures import ThreadPoolExecutor
        atexit.register(print, "handler", end=";")
        gate = threading.Event()
        threading.Thread(target=lambda: (gate.wait(), print("thread", end=";"))).start()
        executor = ThreadPoolExecutor(1)
        executor.submit(print, "executor", end=";").result()
        print("script", end=";")
        executor.submit(gate.set)
        """,
    )
    worker = forker.spawn(script)
    assert worker.status == 0
    assert worker.stdout == "executor;script;thread;handler;"


@pytest.mark.parametrize("left", ["None", "object()", "open(os.devnull)", "Broken()", "sys.stdout.close()"])
def test_a_script_may_leave_anything_in_place_of_its_output(left: str, forker: Crew, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        f"""
        import io, os, sys
        class Broken(io.TextIOBase):
            def writable(self): return True
            def flush(self): raise RuntimeError("not today")
        print("before")
        sys.stdout = {left}
        """,
    )
    worker = forker.spawn(script)
    assert (worker.status, worker.stdout, worker.stderr) == (0, "before\n", "")


def test_a_script_may_end_without_its_streams(crew: Crew, tmp_path: Path) -> None:
    worker = crew.spawn(write(tmp_path, "import sys; print('before'); sys.stdout = sys.stderr = None"))
    assert (worker.status, worker.stdout, worker.stderr) == (0, "before\n", "")


def test_a_fork_has_one_thread_and_nothing_to_say(forker: Crew, tmp_path: Path) -> None:
    worker = forker.spawn(write(tmp_path, "import threading; print(threading.active_count(), end='')"))
    assert (worker.status, worker.stdout, worker.stderr) == (0, "1", "")


# ---- nothing is left ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_children_of_a_worker_die_with_it(crew: Crew, how: str) -> None:
    worker = run(crew, "leave-a-child")
    assert worker.link.recv(1) == b"x", "the child is there"
    if how == "ends":
        worker.link.sendall(b"g")
        assert worker.status == 0
    else:
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.status == -signal.SIGKILL
    assert ended(worker.link)


def holding(crew: Crew, *arguments: str) -> Worker:
    worker = run(crew, *arguments)
    assert worker.link.recv(1) == b"x"
    return worker


def test_stopping_the_spawner_ends_every_worker(own_crew: Crew) -> None:
    workers = [holding(own_crew, "hold") for _ in range(2)]
    own_crew.stop()
    assert all(ended(worker.link) for worker in workers)


def test_a_stopped_worker_is_ended_too(own_crew: Crew) -> None:
    worker = holding(own_crew, "hold")
    os.kill(worker.pid, signal.SIGSTOP)
    own_crew.stop()
    assert ended(worker.link)


def test_the_workers_of_a_killed_spawner_die(own_crew: Crew) -> None:
    """And what they have started; each holds its end of the worker's link."""
    workers = [holding(own_crew, "hold"), holding(own_crew, "hold-with-child")]
    os.kill(own_crew.spawner_pid, signal.SIGKILL)
    own_crew.lost.result(DEADLINE_S)
    assert all(ended(worker.link) for worker in workers)


def test_what_was_asked_of_a_dead_spawner_is_forgotten(own_crew: Crew) -> None:
    os.kill(own_crew.spawner_pid, signal.SIGSTOP)
    workers = [run(own_crew, "exit", "0") for _ in range(3)]
    os.kill(own_crew.spawner_pid, signal.SIGKILL)
    own_crew.lost.result(DEADLINE_S)
    late = run(own_crew, "exit", "0")
    own_crew.stop()
    assert all(ended(worker.link) for worker in (*workers, late)), "their descriptors are closed"


def test_the_children_of_workers_end_with_the_spawner(own_crew: Crew) -> None:
    worker = holding(own_crew, "hold-with-child")
    own_crew.stop()
    assert ended(worker.link)


AGENT = """
    import signal, sys
    from tests.agent.crew import Crew
    crew = Crew(fork=False)
    worker = crew.spawn(sys.executable, sys.argv[1], "hold-with-child", raw=True, stdout=int(sys.argv[2]))
    assert worker.link.recv(1) == b"x"
    print(crew.spawner_pid, worker.pid, flush=True)
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("what_else", ["nothing", "kill the spawner", "stop the spawner", "stop the worker"])
def test_nothing_outlives_an_agent_that_was_killed(what_else: str) -> None:
    """A pipe tells: it ends when all who hold its other end are gone, here the worker and its child."""
    read, write_end = os.pipe()
    agent = subprocess.Popen(
        [PYTHON, "-c", textwrap.dedent(AGENT), SCRIPT, str(write_end)],
        stdout=subprocess.PIPE,
        pass_fds=[write_end],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    os.close(write_end)
    assert agent.stdout is not None
    spawner, worker = map(int, agent.stdout.readline().split())
    match what_else:
        case "kill the spawner":
            os.kill(spawner, signal.SIGKILL)
        case "stop the spawner":
            os.kill(spawner, signal.SIGSTOP)
        case "stop the worker":
            os.killpg(worker, signal.SIGSTOP)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    agent.stdout.close()
    try:
        readable, _, _ = select.select([read], [], [], DEADLINE_S)
        assert readable
        assert os.read(read, 1) == b""
    finally:
        os.close(read)
        for group in (worker, spawner):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def test_a_killed_sweeper_disturbs_no_process(own_crew: Crew) -> None:
    spawner = own_crew.spawner_pid
    (sweeper,) = map(int, Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split())
    worker = holding(own_crew, "hold")
    os.kill(sweeper, signal.SIGKILL)
    assert run(own_crew, "exit", "3").status == 3
    assert not worker.exited.done()
    own_crew.stop()
    assert ended(worker.link)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_ends_without_a_word(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Python's end would complain of objects that the garbage collector does not see."""
    crew = Crew(method == "fork")
    assert run(crew, "exit", "0").status == 0
    crew.close()
    assert capfd.readouterr() == ("", "")


# ---- what cannot be started -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("nowhere", 127, "No such file or directory"),
        ("text", 126, "Permission denied"),
        ("damaged", 126, "Exec format error"),
        (".", 126, "Permission denied"),
    ],
)
def test_a_command_that_cannot_be_executed_is_that_workers_end(
    crew: Crew, name: str, status: int, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "damaged").write_bytes(b"\0")
    (tmp_path / "damaged").chmod(0o700)
    other = holding(crew, "hold")
    command = str(tmp_path / name)
    worker = crew.spawn(command, raw=True)
    wait([worker.exited, crew.lost], DEADLINE_S, FIRST_COMPLETED)
    assert worker.status == status
    assert worker.stderr == f"keepstep: cannot run {command!r}: {reason}\n"
    assert not other.exited.done()


def test_a_command_is_looked_for_where_a_shell_would(crew: Crew, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\necho it is there")
    (tmp_path / "program").chmod(0o700)
    assert crew.spawn("program", raw=True, PATH=f"{tmp_path}:/bin").stdout == "it is there\n"
    assert crew.spawn("program", raw=True).status == 127


def test_a_script_that_is_not_there_is_that_workers_end(forker: Crew) -> None:
    worker = forker.spawn("/no/such/script.py")
    assert worker.status == 1
    assert "No such file" in worker.stderr or "can't open" in worker.stderr or "FileNotFoundError" in worker.stderr


def test_a_script_with_a_syntax_error_is_that_workers_end(forker: Crew, tmp_path: Path) -> None:
    worker = forker.spawn(write(tmp_path, "this is no python :"))
    assert worker.status == 1
    assert "SyntaxError" in worker.stderr


@pytest.mark.parametrize("is_wanted", [True, False])
def test_one_that_was_started_ahead_is_taken_or_ended(is_wanted: bool) -> None:
    begun = SpawnerProcess(SpawnerSettings(fork=False, environment=dict(os.environ)))
    wanted = SpawnerSettings(fork=False, environment=dict(os.environ) | ({} if is_wanted else {"ANOTHER": "1"}))

    async def start_and_stop() -> int:
        client = SpawnerClient(lambda report: None, lambda: None)
        await client.start(wanted, begun)
        assert client._process is not None
        taken = client._process.pid
        await client.stop()
        return taken

    assert (asyncio.run(start_and_stop()) == begun.pid) is is_wanted
    assert not psutil.pid_exists(begun.pid)


def test_a_process_too_many_is_one_worker_the_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spawner and the workers that run are not concerned."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull) as file:
        spawner = Spawner(theirs, SimpleNamespace(), None, {})  # type: ignore[arg-type]  # no process is started
        send_request(ours, SpawnWorker(7, ("script",), False, False, {}, False, False), [file.fileno()] * 4)
        num_files = len(os.listdir("/proc/self/fd"))

        def fork() -> int:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        monkeypatch.setattr(os, "fork", fork)
        assert spawner._answer()
        report = decode_report(ours.recv(MAX_PACKET_BYTES))
        assert len(os.listdir("/proc/self/fd")) == num_files
        assert isinstance(report, WorkerRefused)
        assert report.worker == 7
        assert report.reason.startswith("fork: Resource temporarily unavailable: raise the limit on processes")
