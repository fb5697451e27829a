"""Runs many agents without workers, for benchmarks/controller.py: each with the real machine and a real connection.

    python benchmarks/fleet.py ENDPOINT FIRST COUNT WORLD_SIZE      the job's secret is in KEEPSTEP_JOB_SECRET

These are the agents FIRST to FIRST + COUNT - 1 of a job of WORLD_SIZE ranks, one rank each, and one more for the spare.
Their workers are simulated: they start at once, train without computing anything, and reach a safe point when they are
ordered to stop. The line ``lose N`` on standard input kills the worker of agent N. On standard output the program
prints how long, by its own clock, the agents have waited for the order to stop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time

import numpy as np

from keepstep.agent.phases import PhaseReporter
from keepstep.config import SECRET_VARIABLE
from keepstep.protocol import messages as msg
from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.node.agent import AgentMachine
from keepstep.protocol.node.effects import HandOver, Kill, Spawn
from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import EVENT_BYTES, RING_EVENTS
from keepstep.transports.interface import Connected
from keepstep.transports.rpc.client import RpcControllerConnection
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, mint

POLL_INTERVAL_S = 0.01
"""Interval at which the program checks the deadlines of the agents."""
STEP_S = 0.2
"""Length of a simulated step. It has five phase changes."""
PHASES_PER_S = 5 / STEP_S


class Page:
    """Simulates the tag page of a worker that trains all the time. See `keepstep.shared.tagpage.TagReader`."""

    def copy_since(self, events_read: int) -> tuple[bytes, int]:
        """Returns the phase changes since the last call, in the layout of the ring buffer."""
        now_ns = time.monotonic_ns()
        end = int(now_ns / 1e9 * PHASES_PER_S)
        num_new = min(end - events_read, RING_EVENTS)
        events = np.zeros((num_new, EVENT_BYTES // 8), "<i8")
        events[:, 0] = now_ns
        return events.tobytes(), end


class Agent:
    """The agent of one node, with its machine, its connection, and at most one simulated worker."""

    def __init__(self, number: int, world_size: int, endpoint: str, credentials: Credentials) -> None:
        self.name = f"node-{number}"
        joined = msg.NodeJoined(self.name, 1, self.name, number, world_size, (), 0)
        self.machine = AgentMachine(joined, time.time_ns(), Deadlines(long_s=1e9))
        self.connection = RpcControllerConnection([endpoint], credentials)
        self.phases = PhaseReporter(self.name, self.connection)
        self.worker: int | None = None
        self.rank: int | None = None
        self.page = Page()
        self.phases_read = 0
        self.step = 0
        self.is_training = False
        self.stopped_s: float | None = None
        """When the order to stop arrived."""

    async def listen(self) -> None:
        """Receives the controller's messages until it is cancelled."""
        while True:
            message = await self.connection.receive()
            if isinstance(message, Connected):
                self.machine.reconnected(time.monotonic())
            elif isinstance(message, msg.ClockTold):
                self.machine.clock_offset_s = self.phases.told(message)
            elif isinstance(message, msg.Packet | msg.NodeEvicted):
                self.machine.receive(message, time.monotonic())
            self.act()

    def tick(self, now_s: float) -> None:
        """Polls the worker and the deadlines."""
        self.machine.tick(now_s)
        is_sending = self.act()
        self.phases.tick([self] if self.is_training else [], now_s, is_sending=is_sending)

    def act(self) -> bool:
        """Performs the machine's effects, and transmits its packets."""
        now_s = time.monotonic()
        while effects := self.machine.take():
            for effect in effects:
                match effect:
                    case Spawn():
                        self._start(effect, now_s)
                    case Kill():
                        self.lose()
                    case HandOver():
                        self._obey(effect.order, now_s)
                    case _:
                        pass
        packets = self.machine.packets(now_s)
        for packet in packets:
            self.connection.send(packet)
        return bool(packets)

    def lose(self) -> None:
        """Makes the worker die."""
        if self.worker is not None:
            number, self.worker, self.is_training = self.worker, None, False
            tag = msg.Tag(1, self.step, Phase.BACKWARD)
            self.machine.exited(number, msg.Cause.SIGNAL, "killed by SIGKILL", tag, time.monotonic())

    def _start(self, effect: Spawn, now_s: float) -> None:
        self.worker = effect.worker
        self.machine.spawned(effect.worker, 1 << 22)
        self.machine.said(effect.worker, msg.WorkerJoined(effect.worker, 1 << 22), now_s)
        if effect.rank is None:
            self.machine.said(effect.worker, msg.WorkerReady(effect.worker, 0, (), (), False, False, "0", 0.0), now_s)

    def _obey(self, order: msg.WorkerOrder, now_s: float) -> None:
        assert self.worker is not None
        me = (self.worker,)
        match order:
            case msg.Assign() if order.generation == 1:
                self.machine.said(self.worker, msg.GroupsReset(me, 1), now_s)
                self.machine.said(self.worker, msg.WorkerReady(self.worker, 1, (0,), (), False, False, "0", 0.0), now_s)
            case msg.Stop():
                self.is_training, self.stopped_s = False, now_s
                reach = (self.step,)
                at = self.step - 1
                self.machine.said(
                    self.worker,
                    msg.SafePointReached(
                        me, order.generation, at, Phase.UPDATED, reach, self.step, (), False, (), None, None
                    ),
                    now_s,
                )
            case msg.Recover():
                self.step = order.resume_step
                self.machine.said(self.worker, msg.GroupsReset(me, order.generation), now_s)
                self.machine.said(self.worker, msg.StateRecovered(me, order.generation, 0, False), now_s)
            case msg.Resume():
                self.is_training = True
                _, self.phases_read = self.page.copy_since(0)
                self.machine.step_completed(self.worker, order.generation, self.step, now_s, STEP_S)
            case _:
                pass


async def main() -> None:
    """Runs the agents until standard input ends."""
    endpoint, first, count, world_size = sys.argv[1], *map(int, sys.argv[2:5])
    gc.disable()  # a collection of the heap of five hundred agents would pause all; a real agent has one
    secret = Secret.parse(os.environ[SECRET_VARIABLE], SECRET_VARIABLE)
    authority = certificates.authority(secret)
    agents = {
        number: Agent(
            number,
            world_size,
            endpoint,
            Credentials(mint(secret, Claim(Role.AGENT, f"node-{number}")), authority),
        )
        for number in range(first, first + count)
    }
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(each) for agent in agents.values() for each in (agent.connection.run(), agent.listen())
        ]
        running.append(group.create_task(tick(agents)))
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            word, _, number = line.decode().strip().partition(" ")
            if word == "lose":
                agents[int(number)].lose()
                agents[int(number)].act()
            print(f"{word} {time.monotonic()}", flush=True)
        for task in running:
            task.cancel()


async def tick(agents: dict[int, Agent]) -> None:
    """Runs each agent's heartbeat at its own time. Their workers need no polling, because they do nothing."""
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        due_s += POLL_INTERVAL_S
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        now_s = time.monotonic()
        for agent in agents.values():
            if agent.machine.next_deadline() <= now_s:
                agent.tick(now_s)


if __name__ == "__main__":
    asyncio.run(main())
