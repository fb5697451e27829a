"""The loop of an agent: orders in, processes started and killed, tag pages watched, reports out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import time
from pathlib import Path

from keepstep import lifeline, tagpage
from keepstep.agent.outputs import WorkerOutput
from keepstep.agent.settings import AgentSettings
from keepstep.agent.spawner import SpawnerClient
from keepstep.config import WorkerConfig, worker_environment
from keepstep.errors import ProtocolError
from keepstep.protocol.liveness import LivenessMachine, Observation
from keepstep.protocol.messages import (
    AgentJoined,
    AnyMessage,
    Assign,
    Cause,
    EndJob,
    FenceWorker,
    Recover,
    Resume,
    SafePointReached,
    StartWorker,
    StepObserved,
    Stop,
    WorkerDone,
    WorkerEnded,
    WorkerFenced,
    WorkerJoined,
    WorkerLost,
    WorkerReport,
    WorkerStarted,
)
from keepstep.protocol.phases import Phase
from keepstep.transports.framing import FrameDecoder, frame
from keepstep.transports.memory import MemoryChannel
from keepstep.transports.spawning import (
    LIFELINE_FD,
    LINK_FD,
    PAGE_FD,
    SpawnerReady,
    SpawnerReport,
    SpawnWorker,
    WorkerExited,
    WorkerSpawned,
)

TICK_S = 0.02
"""How often the tag pages are looked at; a look costs a few microseconds a worker."""
STAND_S = 0.2
"""A worker that has not moved for so long is looked up in /proc, and again as often: is its process stopped?"""
DRAIN_DEADLINE_S = 0.5
"""How long a dead worker's last words may take to be read; they are in the socket already."""


@dataclasses.dataclass(slots=True)
class AgentWorker:
    """One worker's process as its agent sees it."""

    worker: int
    rank: int | None
    local_rank: int
    page: tagpage.TagReader
    output: WorkerOutput
    writer: asyncio.StreamWriter
    listener: asyncio.Task[None]
    lifeline: lifeline.Lifeline
    pid: int | None = None
    told_lost: bool = False
    fenced: bool = False
    resume_step: int = 0
    watched_generation: int | None = None
    events_read: int = 0
    last_forward_ns: int = 0
    progress: int = -1
    moved_s: float = 0.0
    stopped: bool = False


class Agent:
    """Serves one node of a job over the channel to its controller."""

    def __init__(self, settings: AgentSettings, channel: MemoryChannel) -> None:
        self.settings = settings
        self.workers: dict[int, AgentWorker] = {}
        self.worker_bytes = 0
        self.step_durations_s: list[float] = []
        """Of every step that a worker which has ended still had in its page."""
        self._channel = channel
        self._liveness = LivenessMachine(settings.node, settings.liveness)
        self._ending = asyncio.Event()
        self._lost_spawner = False
        self._spawner = SpawnerClient(self._spawner_reported, self._spawner_lost)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> SpawnerReady:
        """Starts the spawner.

        Raises:
            PeerLost: it did not come up.
        """
        return await self._spawner.start(self.settings.fork, self.settings.environment)

    async def run(self) -> None:
        """Serves until the job has ended and no process of it is left."""
        self._channel.send(AgentJoined(self.settings.node))
        orders = asyncio.create_task(self._obey())
        ticks = asyncio.create_task(self._tick())
        ending = asyncio.create_task(self._ending.wait())
        try:
            done, _ = await asyncio.wait({orders, ticks, ending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {ending}:
                task.result()
        finally:
            for task in (orders, ticks, ending):
                task.cancel()
            await self.stop()

    async def stop(self) -> None:
        """Ends every process of this node's part of the job."""
        for worker in self.workers.values():
            self._kill(worker)
        await self._spawner.stop()
        for worker in list(self.workers.values()):
            self._drop(worker)

    # ---- orders ---------------------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        while True:
            self._order(await self._channel.receive(), time.monotonic())

    def _order(self, order: AnyMessage, now_s: float) -> None:
        match order:
            case StartWorker():
                self._run_later(self._start(order))
            case FenceWorker():
                self._fence(order.worker)
            case EndJob():
                self._ending.set()
            case Stop():
                self._liveness.stopping(order.workers, now_s)
                self._send(order.workers, order)
            case Resume():
                self._liveness.resumed(now_s)
                for number in order.workers:
                    if number in self.workers:
                        worker = self.workers[number]
                        worker.watched_generation, worker.last_forward_ns = order.generation, 0
                        worker.events_read = worker.page.read().events_written
                self._send(order.workers, order)
            case Assign():
                if order.worker in self.workers:
                    self.workers[order.worker].rank = order.rank
                    self._liveness.watch(order.worker, order.rank, now_s)
                self._send((order.worker,), order)
            case Recover():
                if order.worker in self.workers:
                    self.workers[order.worker].resume_step = order.resume_step
                    self._liveness.recovering(order.worker, now_s)
                self._send((order.worker,), order)
            case _:
                one = getattr(order, "worker", None)
                self._send(getattr(order, "workers", ()) if one is None else (one,), order)

    def _send(self, workers: tuple[int, ...], order: AnyMessage) -> None:
        data = frame(order)
        for number in workers:
            worker = self.workers.get(number)
            if worker is not None and not worker.writer.is_closing():
                worker.writer.write(data)

    def _run_later(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]  # any coroutine of ours
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- processes ------------------------------------------------------------------------------------------------

    async def _start(self, order: StartWorker) -> None:
        settings = self.settings
        alive = [worker for worker in self.workers.values() if not (worker.told_lost or worker.fenced)]
        taken = {worker.local_rank for worker in alive}
        local_rank = next(number for number in range(len(taken) + 1) if number not in taken)
        if order.rank is not None:
            local_rank = order.rank
        ours, theirs = socket.socketpair()
        page = tagpage.create(f"worker-{order.worker}")
        line = lifeline.create(f"lifeline-{order.worker}")
        output = WorkerOutput(settings.output, order.worker, local_rank, lambda: self._label(order.worker))
        config = WorkerConfig(
            worker=order.worker,
            rank=order.rank,
            local_rank=local_rank,
            world_size=settings.world_size,
            run_dir=str(settings.run_dir),
            link_fd=LINK_FD,
            page_fd=PAGE_FD,
            lifeline_fd=LIFELINE_FD,
            digest=settings.digest,
            observer=settings.observer,
            checkpoint_root=settings.checkpoint_root,
        )
        reader, writer = await asyncio.open_connection(sock=ours)
        listener = asyncio.create_task(self._listen(order.worker, reader))
        worker = AgentWorker(
            order.worker,
            order.rank,
            local_rank,
            tagpage.TagReader(page),
            output,
            writer,
            listener,
            lifeline.Lifeline(line),
        )
        self.workers[order.worker] = worker
        self._liveness.watch(order.worker, order.rank, time.monotonic())
        request = SpawnWorker(
            order.worker,
            settings.command,
            settings.module,
            settings.raw,
            worker_environment(config),
            bool(output.redirects[0]),
            bool(output.redirects[1]),
        )
        self._spawner.spawn(request, [theirs.fileno(), page, line, *output.descriptors])
        output.handed_over()
        theirs.close()
        os.close(page)
        os.close(line)

    def _label(self, number: int) -> str:
        worker = self.workers.get(number)
        rank = "spare" if worker is None or worker.rank is None else worker.rank
        return f"[{self.settings.output.role}{rank}]:"

    def _spawner_reported(self, report: SpawnerReport) -> None:
        match report:
            case SpawnerReady():
                self.worker_bytes = report.worker_bytes
            case WorkerSpawned():
                worker = self.workers[report.worker]
                worker.pid = report.pid
                self._channel.send(WorkerStarted(report.worker, report.pid))
                if worker.fenced:
                    self._kill(worker)
            case WorkerExited():
                self._run_later(self._exited(report))

    def _spawner_lost(self) -> None:
        """Its workers die with it; each is reported as lost, and new ones cannot be made."""
        self._lost_spawner = True
        self._ending.set()

    @property
    def lost_spawner(self) -> bool:
        """Whether the process that starts workers died, which ends the node's part of the job."""
        return self._lost_spawner

    async def _exited(self, report: WorkerExited) -> None:
        worker = self.workers.get(report.worker)
        if worker is None:
            return
        await asyncio.wait({worker.listener}, timeout=DRAIN_DEADLINE_S)
        view = worker.page.read()
        self.step_durations_s += tagpage.step_durations(worker.page.events_since(0))
        self._drop(worker)
        cause = Cause.SIGNAL if report.status < 0 else Cause.EXIT
        if worker.told_lost:
            self._channel.send(WorkerEnded(worker.worker, cause, _ending(report.status)))
        elif worker.fenced:
            self._channel.send(WorkerFenced(worker.worker))
        elif report.status == 0 and view.tag.phase in (Phase.STARTING, Phase.UPDATED):
            self._channel.send(WorkerDone(worker.worker))
        else:
            lost = WorkerLost(worker.worker, cause, _ending(report.status), True, view.tag, report.at_s)
            self._channel.send(lost)

    def _watch_lifeline(self, number: int) -> None:
        """From now on the death of the worker's training thread is told at once."""
        loop = asyncio.get_running_loop()

        def died() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
                loop.call_soon_threadsafe(self._training_thread_died, number)

        self.workers[number].lifeline.watch(died)

    def _training_thread_died(self, number: int) -> None:
        """In a step that is a loss, whatever the exit status: the process can touch nothing any more.

        Outside of a step it may have ended well, which its exit status tells when the kernel is done with it.
        """
        worker = self.workers.get(number)
        if worker is None or worker.fenced or self._spawner.has_ended:
            return  # without its spawner no worker lives, and none is the cause of anything
        tag = worker.page.read().tag
        if tag.phase in (Phase.STARTING, Phase.UPDATED):
            return
        worker.told_lost = True
        self._liveness.forget(number)
        self._kill(worker)
        now_s = time.monotonic()
        self._channel.send(WorkerLost(number, Cause.EXIT, "its process died", True, tag, now_s))

    def _drop(self, worker: AgentWorker) -> None:
        worker.output.close()  # while its lines still get its label
        self.workers.pop(worker.worker, None)
        self._liveness.forget(worker.worker)
        worker.listener.cancel()
        worker.writer.close()
        worker.page.close()

    def _fence(self, number: int) -> None:
        worker = self.workers.get(number)
        if worker is None:
            self._channel.send(WorkerFenced(number))
            return
        worker.fenced = True
        self._kill(worker)

    def _kill(self, worker: AgentWorker) -> None:
        if worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)

    # ---- what workers say -------------------------------------------------------------------------------------------

    async def _listen(self, number: int, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        try:
            while data := await reader.read(1 << 16):
                for message in decoder.feed(data):
                    self._worker_said(number, message)
        except (ConnectionError, ProtocolError) as error:
            worker = self.workers.get(number)
            if worker is not None and isinstance(error, ProtocolError):
                view = worker.page.read()
                detail = f"it broke the protocol: {error}"
                self._channel.send(WorkerLost(number, Cause.EXIT, detail, False, view.tag, time.monotonic()))

    def _worker_said(self, number: int, message: AnyMessage) -> None:
        if not isinstance(message, WorkerReport) or message.worker != number:
            raise ProtocolError(f"worker {number} sent {type(message).__name__}, which is not for it to send")
        if isinstance(message, WorkerJoined):
            self._watch_lifeline(number)
        if isinstance(message, SafePointReached):
            self._liveness.safe(number)
        self._channel.send(message)

    # ---- what can be seen -------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - loop.time()))
            now_s = time.monotonic()
            for worker in self.workers.values():
                if worker.pid is not None:
                    self._look(worker, now_s)
            for verdict in self._liveness.judge(now_s):
                self._channel.send(verdict)

    def _look(self, worker: AgentWorker, now_s: float) -> None:
        view = worker.page.read()
        if view.progress != worker.progress:
            worker.progress, worker.moved_s, worker.stopped = view.progress, now_s, False
        elif now_s - worker.moved_s > STAND_S:
            worker.moved_s, worker.stopped = now_s, _is_stopped(worker.pid)
        look = Observation(view.tag, view.progress, view.waiting, view.entered > view.left, worker.stopped)
        self._liveness.observe(worker.worker, look, now_s)
        if worker.watched_generation is not None:
            self._watch_first_step(worker)
            worker.events_read = view.events_written

    def _watch_first_step(self, worker: AgentWorker) -> None:
        """Reports the first step that the worker completes after a recovery, with its times from the ring."""
        for event in worker.page.events_since(worker.events_read):
            if event.generation != worker.watched_generation or event.step < worker.resume_step:
                continue
            if event.phase is Phase.FORWARD and worker.last_forward_ns == 0:
                worker.last_forward_ns = event.at_ns
            if event.phase is Phase.UPDATED:
                step_s = (event.at_ns - worker.last_forward_ns) / 1e9 if worker.last_forward_ns else 0.0
                report = StepObserved(worker.worker, event.generation, event.step, event.at_ns / 1e9, step_s)
                self._channel.send(report)
                worker.watched_generation, worker.last_forward_ns = None, 0
                return

    def status(self) -> list[dict[str, object]]:
        """One entry a worker: where it is, as its tag page shows it."""
        entries: list[dict[str, object]] = []
        for worker in sorted(self.workers.values(), key=lambda entry: entry.worker):
            tag = worker.page.read().tag
            entries.append(
                {
                    "pid": worker.pid,
                    "node": self.settings.node,
                    "rank": worker.rank,
                    "role": "spare" if worker.rank is None else "worker",
                    "generation": tag.generation,
                    "step": tag.step,
                    "phase": str(tag.phase),
                }
            )
        return entries


def _ending(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit code {status}" + (" in the middle of a step" if status == 0 else "")


def _is_stopped(pid: int | None) -> bool:
    """Whether the kernel holds the process stopped (state T)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] == "T"
