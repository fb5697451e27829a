"""Ray: runs an agent on each of several Ray nodes. Ray replaces a lost node.

Needs the extra ``ray``. Ray alone chooses the nodes: the job is one placement group with a bundle for each node, no two
bundles on the same node. If a node dies, Ray places its bundle on another node as soon as one is available. In each
bundle an actor runs ``keepstep agent`` as its child process and forwards the agent's output. Everything else is the
same as in other jobs on several nodes: agents and controller use the same protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from keepstep import eventloop
from keepstep.config import TOKEN_VARIABLE, script_environment
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.flags import endpoint_of, split
from keepstep.launcher.cluster.hosting import EXIT_USAGE, HostedController
from keepstep.launcher.signals import StopSignal, ended_by, stop_signal
from keepstep.programs import ending, own_command
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret

OF_THIS_NODE = "auto"
"""Ray's name for the address of the cluster that this node belongs to."""
REACH_S = 10.0
"""Timeout for a TCP connection to the cluster."""
LISTEN_S = 10.0
"""The longest time that `NodeAgent.listen` waits for output before it answers."""
POLL_INTERVAL_S = 1.0
"""Interval between two checks whether Ray has placed the nodes, and the longest delay before a signal takes effect."""
PAUSE_S, MAX_PAUSE_S = 2.0, 60.0
"""Pause between the end of an agent and the start of the next. The first is long enough for this process to learn that
the job has ended. It doubles with each agent in a row that ends quickly, up to the maximum."""
QUICK_S = 30.0
MAX_QUICK_ENDS = 3
"""After more than ``MAX_QUICK_ENDS`` agents in a row that each end within ``QUICK_S``, the job fails, unless an
earlier agent in the bundle lasted longer."""
LAST_WORDS_S = 20.0
"""How long agents may take to end when the job has."""
PIPE_BYTES = MAX_LINE_BYTES = 1 << 16
"""Capacity of a pipe (`man 7 pipe`). Lines of different nodes are not mixed unless they are longer."""

MAX_GIST_CHARS = 300
"""How much of Ray's message about a lost node is printed."""

Bundle = Mapping[str, float]
"""Resources that Ray reserves on each node, by Ray's names: ``CPU``, ``GPU``, ``memory``, or a custom resource."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[str]:
    """Connects this process to a Ray cluster as a driver, and disconnects on exit.

    Args:
        address: address of the cluster as HOST:PORT, or `OF_THIS_NODE`.

    Yields:
        the address at which the other nodes can reach this one.

    Raises:
        ConfigurationError: the address is not HOST:PORT, or no cluster can be reached there.
    """
    if "://" in address or address == "local":
        raise ConfigurationError(
            f"the Ray address {address}: must be HOST:PORT. The controller has to run on a node of the cluster, so "
            "give the command there"
        )
    if address != OF_THIS_NODE:
        _reach(address)  # Ray would try for a quarter of an hour
    try:
        # `NodeAgent` forwards the output of the agents: Ray's own log forwarding drops similar lines and the last ones.
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"the Ray address {address}: no cluster to be reached; start one with 'ray start' ({_gist(error)})"
        ) from error
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    try:
        socket.create_connection(split(endpoint_of("the Ray address", address)), REACH_S).close()
    except OSError as error:
        raise ConfigurationError(f"the Ray address {address}: no Ray cluster answers there ({error})") from error


# ---- on each node ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class AgentCommand:
    """The command line and environment of an agent; the same on all nodes."""

    flags: tuple[str, ...]
    """Flags of ``keepstep agent`` that are the same on all nodes."""
    script: tuple[str, ...]
    """The training script, with its arguments."""
    folder: str
    """The working directory of ``keepstep``. Agents use it too, unless Ray's runtime environment sets another one."""
    num_threads: str
    """``OMP_NUM_THREADS`` of the workers. It replaces Ray's value, which assumes one process per actor."""
    run_dir: str | None
    """Parent folder of each node's run folder; None: each node uses a temporary folder."""


class NodeAgent:
    """The actor in a bundle. It runs this node's agent; when the actor dies, the agent ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: dict[str, _Output] = {}
        self._selector = selectors.DefaultSelector()
        self._answer: tuple[int, Any] = (-1, None)

    def where(self) -> tuple[str, str]:
        """Returns the name and address of the host that Ray has chosen."""
        return socket.gethostname(), str(ray.util.get_node_ip_address())

    def start(self, command: AgentCommand, place: tuple[str, ...], credentials: str) -> None:
        """Starts the agent.

        Args:
            command: the command line of the agent.
            place: further flags for this agent only: node name, node rank, address.
            credentials: the agent's credentials, valid for this node name only.
        """
        words = own_command("keepstep.cli.main", "agent", "--parent", str(os.getpid()))
        words += [*command.flags, *place, *command.script]
        own_folder = ray.get_runtime_context().runtime_env.get("working_dir")
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, and a child would inherit that
        self._process = subprocess.Popen(
            words,
            cwd=None if own_folder else command.folder,
            env=script_environment() | {TOKEN_VARIABLE: credentials, "OMP_NUM_THREADS": command.num_threads},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            assert pipe is not None
            self._output[name] = _Output(pipe)
            self._selector.register(pipe, selectors.EVENT_READ, self._output[name])
        self._selector.register(os.pidfd_open(self._process.pid), selectors.EVENT_READ)

    def listen(self, number: int) -> tuple[bytes, bytes, int | None]:
        """Returns the agent's new output on stdout and stderr, and its exit code after it has ended (else None).

        Args:
            number: number of the request. A repeated request gets the same answer: its first answer may be lost.
        """
        if number != self._answer[0]:
            self._answer = number, self._listen()
        answer: tuple[bytes, bytes, int | None] = self._answer[1]
        return answer

    def _listen(self) -> tuple[bytes, bytes, int | None]:
        assert self._process is not None
        for key, _ in self._selector.select(LISTEN_S):
            if key.data is not None and key.data.read() == 0:
                self._selector.unregister(key.fileobj)
        # Do not wait for the end of the pipes: a child of the ended process may still hold them open.
        code = self._process.poll()
        stdout, stderr = (self._output[name].take(is_last=code is not None) for name in ("stdout", "stderr"))
        return stdout, stderr, code


class _Output:
    """One output stream of an agent, read in complete lines."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._descriptor = pipe.fileno()
        os.set_blocking(self._descriptor, False)
        self._unfinished = b""
        self._whole = b""

    def read(self) -> int | None:
        """Reads the available bytes of the pipe. Returns 0 at its end, None if there is nothing to read now."""
        try:
            data = os.read(self._descriptor, PIPE_BYTES)
        except BlockingIOError:
            return None
        self._unfinished += data
        end = max(self._unfinished.rfind(b"\n"), self._unfinished.rfind(b"\r")) + 1  # a progress bar's lines end in \r
        if not end and len(self._unfinished) > MAX_LINE_BYTES:
            end = len(self._unfinished)
        self._whole, self._unfinished = self._whole + self._unfinished[:end], self._unfinished[end:]
        return len(data)

    def take(self, *, is_last: bool) -> bytes:
        """Returns the complete lines; with ``is_last``, when the agent has ended, also an incomplete one."""
        if is_last:
            self.read()
            self._whole, self._unfinished = self._whole + self._unfinished, b""
        taken, self._whole = self._whole, b""
        return taken


# ---- on the node of the driver --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RayJob:
    """A job on Ray, as specified on the command line."""

    num_nodes: int
    bundle: Bundle
    command: AgentCommand
    secret: Secret
    timeout_s: float
    """Timeout for Ray to place the nodes, and to start an actor on each."""


def run_on_ray(job: RayJob, host: Callable[[], HostedController]) -> int:
    """Runs a job on the cluster that this process is connected to, and returns its exit code.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT end the job at once, without draining it.

    Args:
        job: the job.
        host: creates the controller, after Ray has placed the nodes.

    Raises:
        ConfigurationError: Ray did not place the nodes in time, or no agent can run on one of them.
    """
    return eventloop.run(_run(job, host))


async def _run(job: RayJob, host: Callable[[], HostedController]) -> int:
    with stop_signal() as stopped:
        group = placement_group([dict(job.bundle)] * job.num_nodes, strategy="STRICT_SPREAD")
        try:
            if not await _is_placed(job, group, stopped):
                return ended_by(stopped.result()).exit_code
            return await _Job(job, group, host()).run(stopped)
        finally:
            with contextlib.suppress(RayError):  # what this driver has started ends with it in any case
                remove_placement_group(group)  # and what is left in it


async def _is_placed(job: RayJob, group: PlacementGroup, stopped: StopSignal) -> bool:
    """Waits until Ray has placed the nodes. False if a signal arrived first."""
    deadline_s = time.monotonic() + job.timeout_s
    is_told = False
    while not await asyncio.to_thread(group.wait, POLL_INTERVAL_S):
        if stopped.done():
            return False
        if time.monotonic() >= deadline_s:
            raise ConfigurationError(_what_is_missing(job))
        if not is_told:
            _tell(f"waiting until Ray has {job.num_nodes} nodes with {_written(job.bundle)} free on each")
            is_told = True
    return not stopped.done()


def _what_is_missing(job: RayJob) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if all(node["Resources"].get(k, 0) >= v for k, v in job.bundle.items())]
    sizes = ", ".join(f"{n['NodeManagerAddress']} ({_written(n['Resources'], *job.bundle)})" for n in nodes)
    return (
        f"Ray has not found {job.num_nodes} nodes with {_written(job.bundle)} free on each within {job.timeout_s:g} s "
        f"(--ray-timeout). {len(fitting)} of its nodes are large enough"
        + (", but others use them" if len(fitting) >= job.num_nodes else "")
        + f"; all there are: {sizes}. Start more nodes, or ask for less with --nnodes or --ray-bundle"
    )


def _written(resources: Bundle, *names: str) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names or resources)


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """How an agent ended."""

    name: str
    """Of its node."""
    why: str
    lasted_s: float
    is_hopeless: bool
    """Whether a new agent would fail in the same way."""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class _Job:
    """Runs the controller in this process, and keeps an agent in each bundle, until the job has ended."""

    def __init__(self, job: RayJob, group: PlacementGroup, hosted: HostedController) -> None:
        self._job = job
        self._group = group
        self._hosted = hosted
        self._hosting: asyncio.Task[int] | None = None

    async def run(self, stopped: StopSignal) -> int:
        """Runs until the job has ended; returns its exit code."""
        self._hosting = asyncio.create_task(self._hosted.run())
        serving = {asyncio.create_task(self._serve(number)) for number in range(self._job.num_nodes)}
        awaited: set[asyncio.Future[Any]] = {self._hosting, stopped, *serving}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for each in serving:
                if each.done():
                    each.result()  # raises ConfigurationError: no agent can run in the bundle
            if stopped.done():
                await self._hosted.end(stopped.result())
            code = await self._hosting
            await asyncio.wait(serving, timeout=LAST_WORDS_S)
            return ended_by(stopped.result()).exit_code if stopped.done() else code
        finally:
            await self._hosted.end()
            for task in awaited - {stopped}:
                task.cancel()
            await asyncio.gather(*serving, self._hosting, return_exceptions=True)

    async def _serve(self, number: int) -> None:
        """Keeps an agent in a bundle until the job has ended.

        Raises:
            ConfigurationError: every agent in the bundle ended soon after its start, and another one would, too.
        """
        has_lasted, num_quick = False, 0
        for life in itertools.count():
            end = await self._live(number, life)
            is_quick = end.lasted_s < QUICK_S
            has_lasted = has_lasted or not (is_quick or end.is_hopeless)  # on a busy node a refusal may take long, too
            num_quick = num_quick + 1 if is_quick else 0
            if await self._is_over(min(PAUSE_S * 2 ** max(0, num_quick - 1), MAX_PAUSE_S)):
                return
            if not has_lasted and (end.is_hopeless or num_quick > MAX_QUICK_ENDS):
                raise ConfigurationError(f"nothing can be run as asked on a node that Ray has found: {end}")
            _tell(f"{end}; an agent is started where Ray finds room")

    async def _live(self, number: int, life: int) -> _End:
        """Runs one agent from its start to its end."""
        name = f"bundle {number}"
        begun_s: float | None = None
        actor = self._placed(number)

        def end(why: str, *, is_hopeless: bool = False) -> _End:
            return _End(name, why, 0.0 if begun_s is None else time.monotonic() - begun_s, is_hopeless)

        try:
            host, address = await self._found(actor, self._job.timeout_s if life == 0 else None)
            begun_s = time.monotonic()
            name = f"{host}-{number}" + (f".{life}" if life else "")  # a new one: the lost node may still speak
            credentials = Credentials.of(self._job.secret, Claim(Role.AGENT, name))
            place = ["--node-name", name, "--node-rank", str(number), "--local-addr", address]
            if self._job.command.run_dir is not None:
                place += ["--run-dir", str(Path(self._job.command.run_dir) / "nodes" / name)]
            await actor.start.remote(self._job.command, tuple(place), credentials.text())
            code = await self._hand_on(actor)
            return end(f"its agent has ended: {ending(code)}", is_hopeless=code == EXIT_USAGE)
        except TimeoutError:
            return end(
                f"Ray has started nothing there within {self._job.timeout_s:g} s (--ray-timeout)", is_hopeless=True
            )
        except RayError as error:
            return end(_gist(error))
        finally:
            ray.kill(actor)

    async def _found(self, actor: Any, timeout_s: float | None) -> tuple[str, str]:
        """Returns the name and address of the host on which Ray has placed an actor.

        Raises:
            TimeoutError: Ray did not place the actor in time, or the job ended first.
        """
        assert self._hosting is not None
        where = asyncio.ensure_future(actor.where.remote())
        either: set[asyncio.Future[Any]] = {where, self._hosting}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not where.done():
            where.cancel()
            raise TimeoutError
        host, address = where.result()
        return host, address

    async def _hand_on(self, actor: Any) -> int:
        """Forwards the output of an agent until it has ended; returns its exit code."""
        number = 0
        while True:
            try:
                stdout, stderr, code = await actor.listen.remote(number)
            except ActorUnavailableError:  # it may be back, or Ray finds out that it is dead
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            number += 1
            for stream, data in ((sys.stdout, stdout), (sys.stderr, stderr)):
                stream.write(data.decode(errors="replace"))
                stream.flush()
            if code is not None:
                return int(code)

    def _placed(self, number: int) -> Any:
        """Creates an actor in a bundle. Ray starts the actor as soon as the bundle is on a node."""
        resources = dict(self._job.bundle)
        memory = resources.pop("memory", None)
        return (
            ray.remote(NodeAgent)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                memory=None if memory is None else int(memory),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
            )
            .remote()
        )

    async def _is_over(self, pause_s: float) -> bool:
        """Whether the job has ended, or ends within ``pause_s`` seconds."""
        assert self._hosting is not None
        await asyncio.wait({self._hosting}, timeout=pause_s)
        return self._hosting.done()


def _gist(error: Exception) -> str:
    """The line of a Ray error message that states the cause: the last line that is not indented."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
    return lines[-1][:MAX_GIST_CHARS].rstrip(". ") if lines else type(error).__name__


def _tell(text: str) -> None:
    print(f"keepstep: {text}", file=sys.stderr, flush=True)
