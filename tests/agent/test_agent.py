"""The agent's loop with a real spawner and real processes; the controller is the test itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import select
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from keepstep.agent.agent import Agent
from keepstep.agent.settings import AgentSettings, NodePlace
from keepstep.protocol import messages as msg
from keepstep.protocol.deadlines import DEADLINES, Deadlines
from keepstep.protocol.messages import Cause, Tag
from keepstep.protocol.phases import Phase
from keepstep.protocol.reliable_channel import ReliableChannel
from keepstep.shared.tagpage import PHASES
from keepstep.trace.record.phaselog import records_of
from keepstep.transports.memory import MemoryChannel, channel_pair

DEADLINE_S = 60.0
"""Ends a test that hangs; no measure of anything."""
NODE = "node-a"
START = msg.StartWorker(0, 0, 0, 0, 1, "the job starts")
AT_START = Tag(0, 0, Phase.STARTING)
COMPANION = """
import os, signal, sys
from keepstep.protocol.messages import *
from keepstep.transports.framing import FrameDecoder, frame
from keepstep.transports.spawning import LINK_FD

decoder = FrameDecoder()
def orders(count):
    found = []
    while len(found) < count and (data := os.read(LINK_FD, 65536)):
        found += decoder.feed(data)
    return found
"""


class Controller:
    """The other end of an agent's channel."""

    def __init__(self, channel: MemoryChannel) -> None:
        self.channel = channel
        self.line: ReliableChannel | None = None
        self.asides: list[msg.Aside] = []
        """What the agent said that nothing is decided by."""

    def order(self, *orders: msg.AgentOrder) -> None:
        """Orders that go out in one packet."""
        assert self.line is not None
        self.line.say(orders)
        for packet in self.line.packets(0.0):
            self.channel.send(packet)

    async def hear(self, count: int) -> list[object]:
        """The next so many reports, or questions outside of packets."""
        found: list[object] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(found) < count:
                message = await self.channel.receive()
                if isinstance(message, msg.Aside):
                    self.asides.append(message)
                    continue
                if not isinstance(message, msg.Packet):
                    found.append(message)
                    continue
                if self.line is None or self.line.incarnation != message.incarnation:
                    self.line = ReliableChannel(NODE, message.incarnation)
                found += self.line.receive(message, 0.0)
        return found


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, script: str, deadlines: Deadlines = DEADLINES
) -> AsyncIterator[tuple[Controller, Agent, asyncio.Task[None]]]:
    """An agent whose workers run a script that speaks with `COMPANION`."""
    path = tmp_path / "worker.py"
    path.write_text(COMPANION + script)
    command = (sys.executable, str(path))
    settings = AgentSettings(
        command,
        False,
        True,
        False,
        NodePlace(NODE, 1, 1, 2),
        tmp_path,
        environment=dict(os.environ),
        deadlines=deadlines,
    )
    ours, theirs = channel_pair()
    agent = Agent(settings, theirs)
    await agent.start()
    running = asyncio.create_task(agent.run())
    try:
        yield Controller(ours), agent, running
    finally:
        running.cancel()
        await asyncio.wait({running})


def play(
    tmp_path: Path,
    script: str,
    scene: Callable[[Controller, Agent, asyncio.Task[None]], Awaitable[None]],
    deadlines: Deadlines = DEADLINES,
) -> None:
    """Lives through a scene between a controller and an agent."""

    async def whole() -> None:
        async with serving(tmp_path, script, deadlines) as (controller, agent, running):
            assert await controller.hear(1) == [msg.NodeJoined(NODE, 2, NODE, 0, 1, (), 0)]
            await scene(controller, agent, running)

    asyncio.run(whole())


def test_orders_that_come_with_the_one_to_start_arrive(tmp_path: Path) -> None:
    async def scene(controller: Controller, _agent: Agent, _running: asyncio.Task[None]) -> None:
        controller.order(START, msg.Stop(2, "why", None), msg.Rescue("why", False))
        started, lost = await controller.hear(2)
        assert isinstance(started, msg.WorkerStarted)
        assert isinstance(lost, msg.WorkerLost)
        assert (lost.detail, lost.gone, lost.tag) == ("exit code 7", True, AT_START)

    play(tmp_path, "sys.exit(7 if [type(x) for x in orders(2)] == [Stop, Rescue] else 1)", scene)


def test_last_messages_come_before_the_end(tmp_path: Path) -> None:
    failed = msg.WorkerFailed(0, "ValueError: bad", "Traceback ...", False)

    async def scene(controller: Controller, _agent: Agent, _running: asyncio.Task[None]) -> None:
        controller.order(START)
        _, said, lost = await controller.hear(3)
        assert said == failed
        assert isinstance(lost, msg.WorkerLost)
        assert (lost.cause, lost.detail) == (Cause.SIGNAL, "killed by SIGKILL")

    script = "os.write(LINK_FD, frame(WorkerFailed(0, 'ValueError: bad', 'Traceback ...', False)))\n"
    script += "os.kill(os.getpid(), signal.SIGKILL)"
    play(tmp_path, script, scene)


@pytest.mark.parametrize("number", [34, 35, 63, 64])
def test_a_worker_that_a_real_time_signal_kills_is_reported(number: int, tmp_path: Path) -> None:
    async def scene(controller: Controller, _agent: Agent, _running: asyncio.Task[None]) -> None:
        controller.order(START)
        _, lost = await controller.hear(2)
        assert isinstance(lost, msg.WorkerLost)
        assert (lost.cause, lost.gone) == (Cause.SIGNAL, True)
        assert lost.detail == {34: "killed by SIGRTMIN", 64: "killed by SIGRTMAX"}.get(
            number, f"killed by signal {number}"
        )

    play(tmp_path, f"os.kill(os.getpid(), {number})", scene)


class Broken(Exception):
    """An error that no code of keepstep raises or catches by its type."""


@pytest.mark.parametrize("where", ["a worker's end", "a worker's words", "the spawner's report", "a lifeline"])
def test_an_unexpected_error_in_the_background_ends_the_agent(where: str, tmp_path: Path) -> None:
    """As one in its main tasks does. It printed it, and the worker was lost to it without a word."""
    method, script = {
        "a worker's end": ("exited", ""),
        "a worker's words": ("said", "os.write(LINK_FD, frame(RankAwaited(0))); signal.pause()"),
        "the spawner's report": ("spawned", "signal.pause()"),
        "a lifeline": (
            "training_thread_died",
            "import threading\nfrom keepstep.shared.lifeline import Lifeline\n"
            "from keepstep.transports.spawning import LIFELINE_FD\nline = Lifeline(LIFELINE_FD)\n"
            "thread = threading.Thread(target=line.hold)\nthread.start()\nthread.join()\n"
            "os.write(LINK_FD, frame(WorkerJoined(0, os.getpid())))\nsignal.pause()",
        ),
    }[where]

    async def scene(controller: Controller, agent: Agent, running: asyncio.Task[None]) -> None:
        are_known: list[bool] = []

        def fail(*_arguments: object) -> None:
            are_known.append(0 in agent.workers)
            raise Broken

        setattr(agent._machine, method, fail)
        controller.order(START)
        with pytest.raises(Broken):
            await asyncio.wait_for(running, DEADLINE_S)
        assert all(are_known), "a worker is forgotten only when its report has been made"
        assert agent.workers == {}

    play(tmp_path, script, scene)


def test_a_question_to_the_store_passes_by_the_packets(tmp_path: Path) -> None:
    question = msg.StoreRequested(0, 1, 5, "get", ("key",), b"")

    async def scene(controller: Controller, _agent: Agent, _running: asyncio.Task[None]) -> None:
        controller.order(START)
        assert (await controller.hear(2))[1] == question
        controller.channel.send(msg.StoreAnswered(0, 5, (b"value",), ""))
        assert await controller.hear(1) == [msg.WorkerDone(0, None)]

    script = "os.write(LINK_FD, frame(StoreRequested(0, 1, 5, 'get', ('key',), b'')))\n"
    script += "sys.exit(0 if orders(1) == [StoreAnswered(0, 5, (b'value',), '')] else 1)"
    play(tmp_path, script, scene)


def test_a_worker_that_reports_for_another_is_lost(tmp_path: Path) -> None:
    async def scene(controller: Controller, _agent: Agent, _running: asyncio.Task[None]) -> None:
        controller.order(START)
        _, lost = await controller.hear(2)
        assert isinstance(lost, msg.WorkerLost)
        assert "it broke the protocol: worker 0 sent RankAwaited" in lost.detail
        assert not lost.gone
        controller.order(msg.FenceWorker(0, lost.detail))
        assert await controller.hear(1) == [msg.WorkerFenced(0)]

    script = "os.write(LINK_FD, frame(RankAwaited(1)))\nsignal.pause()"
    play(tmp_path, script, scene)


def test_a_node_that_was_evicted_ends_its_processes_and_joins_again(tmp_path: Path) -> None:
    async def scene(controller: Controller, agent: Agent, _running: asyncio.Task[None]) -> None:
        controller.order(START)
        await controller.hear(1)
        assert controller.line is not None
        incarnation = controller.line.incarnation
        pid = agent.workers[0].pid
        assert pid is not None
        descriptor = os.pidfd_open(pid)
        controller.channel.send(msg.NodeEvicted(NODE, incarnation, "not heard of", False))
        assert await controller.hear(1) == [msg.NodeJoined(NODE, 2, NODE, 0, 1, (), 0)]
        assert controller.line.incarnation == incarnation + 1
        assert agent.workers == {}
        assert select.select([descriptor], [], [], DEADLINE_S)[0], "the worker still runs"
        os.close(descriptor)

    play(tmp_path, "signal.pause()", scene)


def test_the_end_of_the_job_ends_the_agent_and_its_workers(tmp_path: Path) -> None:
    async def scene(controller: Controller, agent: Agent, running: asyncio.Task[None]) -> None:
        controller.order(START)
        await controller.hear(1)
        pid = agent.workers[0].pid
        assert pid is not None
        descriptor = os.pidfd_open(pid)
        controller.order(msg.EndJob(0, "all ranks have finished"))
        await asyncio.wait_for(running, DEADLINE_S)
        assert select.select([descriptor], [], [], DEADLINE_S)[0], "the worker still runs"
        os.close(descriptor)

    play(tmp_path, "signal.pause()", scene)


def test_phases_are_told_on_the_controllers_clock(tmp_path: Path) -> None:
    """The controller's clock is a thousand seconds ahead; the agent asks for it, and sends nothing before it knows."""
    ahead_ns = 1_000_000_000_000
    told: list[msg.PhasesObserved] = []

    async def scene(controller: Controller, agent: Agent, _running: asyncio.Task[None]) -> None:
        controller.order(START)
        await controller.hear(1)
        begun_ns = time.monotonic_ns()
        async with asyncio.timeout(DEADLINE_S):
            while sum(len(records_of(each)) for each in told) < 3:
                match aside := await controller.channel.receive():
                    case msg.ClockAsked():
                        assert aside.node == NODE
                        assert told == []
                        answer = msg.ClockTold(aside.asked_ns, time.monotonic_ns() + ahead_ns, 0.0)
                        controller.channel.send(answer)
                    case msg.PhasesObserved():
                        told.append(aside)
                    case _:
                        pass
        records = np.concatenate([records_of(each) for each in told])
        assert [PHASES[phase] for phase in records["phase"]] == [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED]
        assert records[["generation", "step", "worker"]].tolist() == [(2, 7, 0)] * 3
        error_ns = told[0].error_ns
        assert 0 <= error_ns < 10**10
        now_ns = time.monotonic_ns()
        assert all(begun_ns - error_ns - 10**10 < at - ahead_ns < now_ns + error_ns for at in records["at_ns"])
        assert records["entered_ns"][:2].tolist() == [0, 0]
        assert records["at_ns"][1] <= records["entered_ns"][2] <= records["at_ns"][2]
        assert agent.workers[0].phases_read == 3

    script = "from keepstep.shared.tagpage import TagWriter\nfrom keepstep.protocol.phases import Phase\n"
    script += "from keepstep.transports.spawning import PAGE_FD\nimport time\n"
    script += "from keepstep.protocol.waiting.operations import Operation\n"
    script += "page = TagWriter(PAGE_FD)\npage.write(2, 7, Phase.FORWARD)\npage.write(2, 7, Phase.BACKWARD)\n"
    script += "page.operation_entered('world', Operation.ALL_REDUCE)\npage.write(2, 7, Phase.SYNCED)\norders(1)\n"
    play(tmp_path, script, scene)


@pytest.mark.parametrize("is_answered", [True, False])
def test_the_stack_of_a_rank_that_stands_comes_from_its_link_thread_or_by_a_signal(
    is_answered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C code may hold the interpreter's lock, so that no other thread runs."""
    if not is_answered:
        monkeypatch.setattr("keepstep.agent.agent.ANSWER_S", 0.2)

    async def scene(controller: Controller, agent: Agent, _running: asyncio.Task[None]) -> None:
        controller.order(START)
        await controller.hear(2)
        async with asyncio.timeout(DEADLINE_S):
            while "in stands" not in (stack := agent.workers[0].page.stack()):  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.01)
        seen = agent.workers[0].examination
        assert seen is not None
        assert seen.was_signalled is not is_answered
        assert re.match(r"in stands\(\) at worker\.py:\d+", seen.text(stack, time.monotonic()))

    script = (
        "import threading\n"
        "from keepstep.protocol.phases import Phase\n"
        "from keepstep.shared import tracebacks\n"
        "from keepstep.shared.tagpage import TagWriter\n"
        "from keepstep.transports.spawning import PAGE_FD\n"
        "tracebacks.install(PAGE_FD)\n"
        "def stands():\n"
        "    os.write(LINK_FD, frame(WorkerJoined(0, os.getpid())))\n"
        "    while True: signal.pause()\n"
        "def training(): stands()\n"
        "def answer():\n"
        "    assert isinstance(orders(1)[0], DumpTraceback)\n"
        "    tracebacks.dump(PAGE_FD, threading.main_thread().ident)\n"
        "TagWriter(PAGE_FD).write(1, 0, Phase.FORWARD)\n"
    )
    script += "threading.Thread(target=answer, daemon=True).start()\n" if is_answered else ""
    play(tmp_path, script + "training()\n", scene, dataclasses.replace(DEADLINES, explain_s=1.0))


def test_the_last_phases_of_a_dead_worker_come_before_the_news_of_its_death(tmp_path: Path) -> None:
    async def scene(controller: Controller, _agent: Agent, _running: asyncio.Task[None]) -> None:
        asked = await controller.channel.receive()
        assert isinstance(asked, msg.ClockAsked)
        controller.channel.send(msg.ClockTold(asked.asked_ns, time.monotonic_ns(), 0.0))
        controller.order(START)
        await controller.hear(2)
        phases = [
            PHASES[p]
            for each in controller.asides
            if isinstance(each, msg.PhasesObserved)
            for p in records_of(each)["phase"]
        ]
        assert phases == [Phase.FORWARD, Phase.BACKWARD]

    script = "from keepstep.shared.tagpage import TagWriter\nfrom keepstep.protocol.phases import Phase\n"
    script += "from keepstep.transports.spawning import PAGE_FD\n"
    script += "page = TagWriter(PAGE_FD)\npage.write(1, 0, Phase.FORWARD)\npage.write(1, 0, Phase.BACKWARD)\n"
    script += "os.kill(os.getpid(), signal.SIGKILL)\n"
    play(tmp_path, script, scene)
