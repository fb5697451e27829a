"""The event loop around the agent's machine: it receives packets, starts and kills workers, and reads tag pages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time

from keepstep.agent.durations import longest_phases
from keepstep.agent.environment import environment_of
from keepstep.agent.health.guard import DeviceGuard
from keepstep.agent.outputs import WorkerOutput
from keepstep.agent.phases import PhaseReporter
from keepstep.agent.processes import ANSWER_S, RENEW_S, AgentWorker, Examination, ProcessState
from keepstep.agent.settings import AgentSettings
from keepstep.agent.snapshots import SnapshotMemory
from keepstep.agent.spawner import SpawnerClient, SpawnerProcess
from keepstep.background import BackgroundTasks
from keepstep.errors import ProtocolError, RemoteProtocolError
from keepstep.freememory import killed_together
from keepstep.programs import ending
from keepstep.protocol.messages import (
    AnyMessage,
    Assign,
    Cause,
    ClockTold,
    DumpTraceback,
    EndJob,
    InheritSnapshots,
    NodeEvicted,
    NodeJoined,
    Packet,
    Recover,
    Resume,
    StoreAnswered,
    StoreRequested,
    WeightsObserved,
    WorkerJoined,
    WorkerOrder,
)
from keepstep.protocol.node.agent import AgentMachine
from keepstep.protocol.node.effects import (
    Depart,
    HandOver,
    Kill,
    Leave,
    LookCloser,
    PassMemory,
    ReleaseMemory,
    Signal,
    Spawn,
)
from keepstep.protocol.node.liveness import Observation
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import EXIT_FAILED
from keepstep.shared import lifeline, tagpage, tracebacks
from keepstep.transports.framing import FrameDecoder, frame
from keepstep.transports.interface import Connected, ControllerConnection
from keepstep.transports.spawning import (
    SpawnerFailed,
    SpawnerReady,
    SpawnerReport,
    SpawnWorker,
    WorkerExited,
    WorkerRefused,
    WorkerSpawned,
)

TICK_S = 0.02
"""How often the agent reads the tag pages while a rank makes no progress, or during a recovery."""
CALM_TICK_S = 0.05
"""How often it reads them while all ranks train. One read takes 0.3 ms of a core: every 20 ms, that is 1.5 % of a core
(measured on two cores with two ranks). It finds a hang later by the difference of the two intervals."""
STAND_S = 0.2
"""If a worker makes no progress for this long, the agent reads its process state in /proc, and repeats this."""
EXAMINE_SHARE = 0.25
"""After this share of the shortest deadline without progress, the agent asks the rank for its stack."""
DRAIN_DEADLINE_S = 0.5
"""How long the agent reads the last messages of a dead worker; they are in the socket already."""


class Agent:
    """Serves one node of a job over a connection to its controller."""

    def __init__(self, settings: AgentSettings, connection: ControllerConnection) -> None:
        self.settings = settings
        self.workers: dict[int, AgentWorker] = {}
        self.worker_bytes = 0
        self.step_durations_s: list[float] = []
        """Durations of the steps in the tag pages of workers that have ended."""
        self.closed: dict[int, str] = {}
        """Unhealthy device -> the reason why the agent starts no worker on it any more."""
        self._background = BackgroundTasks(self._fail)
        self._error: Exception | None = None
        """What has failed in the background, and ends `run`."""
        self._guard = DeviceGuard(settings, self._background.guarded(self._close))
        self._connection = connection
        self._machine = self._new_machine()
        self._phases = PhaseReporter(settings.place.node, connection)
        self._snapshots = SnapshotMemory()
        self._asked: dict[tuple[int, int], StoreRequested] = {}
        """(worker, request number) -> store request without an answer yet."""
        self._ending = asyncio.Event()
        self.left: Leave | None = None
        """How and why the controller has ended this node's part of the job; None if it has not."""
        self._lost_spawner = False
        self._why_lost = ""
        self._spawner = SpawnerClient(self._background.guarded(self._spawner_reported), self._spawner_lost)

    def _new_machine(self) -> AgentMachine:
        place = self.settings.place
        closed = tuple(sorted(self.closed))
        domain, num_devices = place.domain or place.node, len(self.settings.devices)
        joined = NodeJoined(place.node, place.slots, domain, place.position, place.world_size, closed, num_devices)
        # The incarnation is the time of day: unlike the monotonic clock, it also increases over a reboot.
        of_parked = num_devices if self.settings.parks_spares else 0
        return AgentMachine(joined, time.time_ns(), self.settings.deadlines, of_parked)

    # ---- life -----------------------------------------------------------------------------------------------------

    async def start(self, begun: SpawnerProcess | None = None) -> SpawnerReady:
        """Starts the spawner and checks the health of the node's devices.

        Args:
            begun: see `SpawnerClient.start`.

        Raises:
            PeerLost: the spawner did not start.
            ConfigurationError: see `DeviceGuard.start`.
        """
        if (group := killed_together()) is not None:
            print(
                f"keepstep: memory.oom.group is 1 in {group}: if a process of this node runs out of memory, the kernel "
                "kills all of them, the agent too, and no rank on this node can be replaced: set it to 0",
                file=sys.stderr,
                flush=True,
            )
        looking = asyncio.create_task(self._guard.start())
        try:
            ready = await self._spawner.start(self.settings.spawner, begun)
            self.closed = await looking
        finally:
            looking.cancel()
        if self.closed:
            self._machine = self._new_machine()
        return ready

    async def run(self) -> None:
        """Serves the job until it has ended and no process of it is left on this node."""
        self._act()
        orders = asyncio.create_task(self._hear())
        ticks = asyncio.create_task(self._tick())
        ending = asyncio.create_task(self._ending.wait())
        try:
            done, _ = await asyncio.wait({orders, ticks, ending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {ending}:
                task.result()
            if self._error is not None:
                raise self._error
        finally:
            for task in (orders, ticks, ending):
                task.cancel()
            await self.stop()

    def drain(self, reason: str) -> None:
        """Makes this node leave once its ranks have moved. `run` returns when the controller has acknowledged it."""
        self._machine.drain(reason, time.monotonic())
        self._act()

    def depart(self, reason: str) -> None:
        """Ends this node's workers, delivers what they have reported, and leaves the job.

        `run` returns when the controller has acknowledged that.
        """
        self._machine.depart(reason, time.monotonic())
        self._act()

    async def stop(self) -> None:
        """Ends every process of this node's part of the job."""
        self._guard.stop()
        for number in self.workers:
            self._kill(number)
        await self._spawner.stop()
        for worker in list(self.workers.values()):
            self._drop(worker)
        self._snapshots.release(None, ())

    # ---- the machine ----------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        while True:
            message = await self._connection.receive()
            match message:
                case Connected():
                    self._machine.reconnected(time.monotonic())
                    self._phases.reconnected()
                    for request in self._asked.values():
                        self._connection.send(request)
                    self._act()
                case StoreAnswered():
                    self._asked.pop((message.worker, message.request), None)
                    self._hand_over((message.worker,), message)
                case ClockTold():
                    self._machine.clock_offset_s = self._phases.told(message)
                case Packet() | NodeEvicted():
                    self._machine.receive(message, time.monotonic())
                    self._act()
                case _:
                    raise RemoteProtocolError(f"a controller sent {type(message).__name__} outside of any packet")

    def _act(self) -> bool:
        """Performs the machine's effects and sends its packets, after every event. Returns whether it sent any."""
        for effect in self._machine.take():
            match effect:
                case Spawn():
                    self._spawn(effect)
                case Kill():
                    self._kill(effect.worker)
                case Signal():
                    for number in effect.workers:
                        self._terminate(number)
                case HandOver():
                    self._note(effect)
                    self._hand_over(effect.workers, effect.order)
                case Depart():
                    self._connection.send(effect.message)
                case LookCloser():
                    self._look_closer(effect.workers)
                case PassMemory():
                    self._pass_snapshots(effect)
                case ReleaseMemory():
                    self._snapshots.release(effect.workers, self.workers)
                case Leave():
                    self.left = effect
                    self._ending.set()
        packets = self._machine.packets(time.monotonic())
        for packet in packets:
            self._connection.send(packet)
        return bool(packets)

    def _note(self, effect: HandOver) -> None:
        """Updates the agent's own records of the workers from an order to them."""
        order = effect.order
        for worker in (self.workers[number] for number in effect.workers if number in self.workers):
            match order:
                case Assign():
                    worker.rank = order.rank
                case Recover():
                    worker.resume_step = order.resume_step
                case Resume():
                    worker.watched_generation, worker.last_forward_ns = order.generation, 0
                    worker.events_read = worker.page.read().events_written
                case _:
                    pass

    def _pass_snapshots(self, effect: PassMemory) -> None:
        for keeper in effect.keepers:
            steps = dict(self._snapshots.of(keeper)).get(effect.rank, ())
            if (path := self._snapshots.path(keeper)) is not None and steps:
                self._hand_over((effect.worker,), InheritSnapshots(effect.worker, effect.rank, path, steps))

    def _hand_over(self, workers: tuple[int, ...], order: WorkerOrder) -> None:
        data = frame(order)
        for worker in (self.workers[number] for number in workers if number in self.workers):
            if worker.writer is None:
                worker.unwritten += data
            elif not worker.writer.is_closing():
                worker.writer.write(data)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error  # the first one may be the cause of others
        self._ending.set()

    # ---- processes ------------------------------------------------------------------------------------------------

    def _spawn(self, effect: Spawn) -> None:
        settings = self.settings
        ours, theirs = socket.socketpair()
        page = tagpage.create(f"worker-{effect.worker}")
        line = lifeline.create(f"lifeline-{effect.worker}")
        number = effect.device if effect.local_rank is None else effect.local_rank
        output = WorkerOutput(settings.output, effect.worker, number, lambda: self._label(effect.worker))
        self.workers[effect.worker] = AgentWorker(
            effect.worker,
            effect.rank,
            tagpage.TagReader(page),
            output,
            lifeline.Lifeline(line),
            self._background.begin(self._listen(effect.worker, ours)),
        )
        request = SpawnWorker(
            effect.worker,
            settings.command,
            settings.module,
            settings.raw,
            environment_of(effect, settings),
            bool(output.redirects[0]),
            bool(output.redirects[1]),
        )
        memory = self._snapshots.create(effect.worker)
        self._spawner.spawn(request, [theirs.fileno(), page, line, memory, *output.descriptors])
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
            case SpawnerFailed():
                self._why_lost = f": {report.reason}"
            case WorkerSpawned():
                worker = self.workers[report.worker]
                worker.pid = report.pid
                self._machine.spawned(report.worker, report.pid)
                self._act()
            case WorkerRefused():
                self._background.begin(self._exited(report.worker, Cause.EXIT, report.reason, report.at_s))
            case WorkerExited():
                cause = Cause.SIGNAL if report.status < 0 else Cause.EXIT
                how = ending(report.status, has_dumped=report.has_dumped) if report.status else ""
                self._background.begin(self._exited(report.worker, cause, how, report.at_s))

    def _spawner_lost(self) -> None:
        """Ends this node's part of the job: its workers die with the spawner, and it cannot start new ones."""
        self._lost_spawner = True
        self._ending.set()

    def deserted(self) -> EndJob | None:
        """Returns how this node's part of the job has ended if the spawner has died; else None."""
        if not self._lost_spawner:
            return None
        return EndJob(EXIT_FAILED, f"the process that starts workers died, and its workers with it{self._why_lost}")

    async def _exited(self, number: int, cause: Cause, how: str, at_s: float) -> None:
        """Reports the end of a worker. ``how`` is empty for exit code 0, which may be a normal end."""
        worker = self.workers.get(number)
        if worker is None:
            return
        await asyncio.wait({worker.listener}, timeout=DRAIN_DEADLINE_S)
        view = worker.page.read()
        self.step_durations_s += tagpage.step_durations(worker.page.events_since(0))
        self._watch_first_step(worker)
        self._phases.gather(self.workers.values())  # of all workers: the job may end now
        self._machine.exited(number, cause, how, view.tag, at_s, self._snapshots.of(number))
        self._drop(worker)
        self._act()

    def _watch_lifeline(self, number: int) -> None:
        """Watches the worker's lifeline, so that the agent notices the death of its training thread at once."""
        loop = asyncio.get_running_loop()

        def died() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
                loop.call_soon_threadsafe(self._background.guarded(self._training_thread_died), number)

        self.workers[number].lifeline.watch(died)

    def _training_thread_died(self, number: int) -> None:
        worker = self.workers.get(number)
        if worker is None or self._spawner.has_ended:
            return  # the spawner has died, and all workers with it: none of them is the cause
        self._watch_first_step(worker)
        self._phases.gather(self.workers.values())
        snapshots = self._snapshots.of(number)
        self._machine.training_thread_died(number, worker.page.read().tag, time.monotonic(), snapshots)
        self._act()

    def _drop(self, worker: AgentWorker) -> None:
        self._asked = {key: request for key, request in self._asked.items() if request.worker != worker.worker}
        worker.output.close()  # while `_label` still knows the worker
        self.workers.pop(worker.worker, None)
        self._snapshots.ended(worker.worker)
        worker.listener.cancel()
        if worker.writer is not None:
            worker.writer.close()
        worker.page.close()

    def _kill(self, number: int) -> None:
        worker = self.workers.get(number)
        if worker is not None and worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)

    def _terminate(self, number: int) -> None:
        """Sends SIGTERM to the process only and not to its group, as torchrun does."""
        worker = self.workers.get(number)
        if worker is not None and worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)

    def pass_signal(self, number: int) -> int:
        """Sends a signal to those ranks that handle it; the others would be ended by it. Returns to how many."""
        ranks = [each.pid for each in self.workers.values() if each.rank is not None and each.pid is not None]
        handle = [pid for pid in ranks if tracebacks.handles(pid, number)]
        for pid in handle:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(handle)

    # ---- what workers say -------------------------------------------------------------------------------------------

    async def _listen(self, number: int, line: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=line)
        worker = self.workers[number]
        worker.writer = writer
        writer.write(worker.unwritten)
        decoder = FrameDecoder()
        try:
            while data := await reader.read(1 << 16):
                for message in decoder.feed(data):
                    self._worker_said(number, message)
                self._act()
        except ConnectionError:  # the spawner reports how the worker ended
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()  # retrieves the error, which asyncio may print otherwise
        except ProtocolError as error:
            tag = worker.page.read().tag
            self._machine.broke_protocol(number, str(error), tag, time.monotonic())
            self._act()

    def _worker_said(self, number: int, message: AnyMessage) -> None:
        if isinstance(message, StoreRequested) and message.worker == number:
            # Not in a packet, because it is void after its generation. It is sent again on a new connection.
            self._asked[number, message.request] = message
            self._connection.send(message)
            return
        if isinstance(message, WeightsObserved) and message.worker == number:
            self._connection.send(self._phases.on_job_clock(message))
            return
        self._machine.said(number, message, time.monotonic())
        if isinstance(message, WorkerJoined):
            self.workers[number].has_joined = True
            self._watch_lifeline(number)

    # ---- devices ----------------------------------------------------------------------------------------------------

    def _close(self, devices: tuple[int, ...], reason: str, at_once: bool) -> None:
        """Closes unhealthy devices. Their ranks are lost ``at_once``, or move as soon as spares are warm."""
        self.closed |= dict.fromkeys(devices, reason)
        if at_once:
            tags = {number: worker.page.read().tag for number, worker in self.workers.items()}
            self._machine.devices_failed(devices, reason, tags, time.monotonic())
        else:
            self._machine.close_devices(devices, reason)
        self._act()

    # ---- what can be seen -------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            now_s = time.monotonic()
            is_calm = True
            for worker in self.workers.values():
                if worker.pid is not None:
                    has_moved = self._look(worker, now_s)
                    is_calm &= worker.rank is None or (has_moved and worker.watched_generation is None)
            self._machine.tick(now_s)
            is_sending = self._act()
            self._phases.tick(self.workers.values(), now_s, is_sending=is_sending)
            due_s = min(now_s + CALM_TICK_S, self._machine.next_deadline()) if is_calm else 0.0
            await asyncio.sleep(max(due_s, now_s + TICK_S) - time.monotonic())

    def _look(self, worker: AgentWorker, now_s: float) -> bool:
        """Passes an observation of a worker to the machine. Returns whether the worker has made progress since."""
        view = worker.page.read()
        has_moved = view.progress != worker.progress
        if has_moved:
            worker.progress, worker.moved_s, worker.looked_s = view.progress, now_s, now_s
            worker.stopped = worker.unread = False
            worker.examination = None
        elif now_s - worker.looked_s > STAND_S:
            worker.looked_s, state = now_s, ProcessState.of(worker.pid)
            worker.stopped = state is not None and state.is_stopped
            worker.unread = state is not None and state.sleeps and worker.output.is_unread()
            self._examine(worker, now_s)
        look = Observation(view.tag, view.progress, view.waiting, view.awaited > 0, worker.stopped, worker.unread)
        self._machine.observe(worker.worker, look, now_s)
        if view.events_written > worker.durations_read:
            events = worker.page.events_since(worker.durations_read - 1 - tagpage.MOST_MOMENTS)
            for phase, began_s, ended_s in longest_phases(events, worker.durations_ns):
                self._machine.passed(worker.worker, phase, began_s, ended_s)
            worker.durations_read = view.events_written
            worker.durations_ns = events[-1].at_ns if events else worker.durations_ns
        self._watch_first_step(worker)
        return has_moved

    def _examine(self, worker: AgentWorker, now_s: float) -> None:
        """Asks for the stack of a rank that makes no progress, ahead of the sentence in which it may be needed."""
        deadlines = self.settings.deadlines
        stands_s = now_s - worker.moved_s
        if worker.rank is None or worker.pid is None or not worker.has_joined:
            return
        seen = worker.examination
        if seen is None:
            if stands_s < EXAMINE_SHARE * min(deadlines.hang_after_s, deadlines.explain_s):
                return
            worker.page.clear_stack()
            worker.examination = Examination.begin(worker.pid, now_s)
        elif not worker.page.stack():
            if now_s - seen.asked_s > ANSWER_S and not (seen.was_signalled or worker.stopped):
                seen.was_signalled = True
                self._ask_training_thread(worker.pid)
            return
        elif seen.was_signalled or now_s - seen.asked_s < RENEW_S:
            return
        else:
            seen.asked_s = now_s
        self._hand_over((worker.worker,), DumpTraceback())

    def _ask_training_thread(self, pid: int) -> None:
        if tracebacks.handles(pid, tracebacks.SIGNAL):  # else it would end the process
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, tracebacks.SIGNAL)

    def _look_closer(self, workers: tuple[int, ...]) -> None:
        now_s = time.monotonic()
        pages = {number: self.workers[number].page for number in workers if number in self.workers}
        counts = {number: page.operation_counts() for number, page in pages.items()}
        snapshots = {number: self._snapshots.of(number) for number in pages}
        seen = ((number, page, self.workers[number].examination) for number, page in pages.items())
        doing = {number: each.text(page.stack(), now_s) for number, page, each in seen if each is not None}
        self._machine.looked_closer(counts, snapshots, doing, now_s)

    def _watch_first_step(self, worker: AgentWorker) -> None:
        """Reports the first step that the worker completes after a recovery, with its times from the ring buffer."""
        if worker.watched_generation is None:
            return
        num_events = worker.page.read().events_written
        for event in worker.page.events_since(worker.events_read):
            if event.generation != worker.watched_generation or event.step < worker.resume_step:
                continue
            if event.phase is Phase.FORWARD and worker.last_forward_ns == 0:
                worker.last_forward_ns = event.at_ns
            if event.phase is Phase.UPDATED:
                step_s = (event.at_ns - worker.last_forward_ns) / 1e9 if worker.last_forward_ns else 0.0
                self._machine.step_completed(worker.worker, event.generation, event.step, event.at_ns / 1e9, step_s)
                worker.watched_generation, worker.last_forward_ns = None, 0
                return
        worker.events_read = num_events

    def status(self) -> list[dict[str, object]]:
        """Returns an entry for each worker with its current tag."""
        entries: list[dict[str, object]] = []
        for worker in sorted(self.workers.values(), key=lambda entry: entry.worker):
            tag = worker.page.read().tag
            entries.append(
                {
                    "worker": worker.worker,
                    "pid": worker.pid,
                    "node": self.settings.place.node,
                    "rank": worker.rank,
                    "role": "spare" if worker.rank is None else "worker",
                    "generation": tag.generation,
                    "step": tag.step,
                    "phase": str(tag.phase),
                }
            )
        return entries
