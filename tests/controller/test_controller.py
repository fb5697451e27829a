"""The loop around the controller's machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.transports.rpc.served import connected, served

from keepstep.controller.controller import Controller
from keepstep.protocol.controller import ControllerMachine
from keepstep.protocol.messages import (
    AnyMessage,
    ClockAsked,
    NodeJoined,
    Packet,
    PhasesObserved,
    StartWorker,
    StoreRequested,
    WorkerStarted,
)
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings
from keepstep.trace.record.recorder import Recorder
from keepstep.transports.lines import Connected
from keepstep.transports.memory import OneNode, channel_pair

DEADLINE_S = 20.0


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_meets_a_message_is_not_lost(tmp_path: Path, turns: int) -> None:
    """Found as a launcher that never ended after SIGTERM: a report came in at the same moment."""

    async def cancel_while_a_message_comes() -> bool:
        ours, theirs = channel_pair()
        machine = ControllerMachine(RecoverySettings(1, 0), lease_s=None)
        running = asyncio.create_task(Controller(machine, OneNode("node", ours), recorder).run())
        theirs.send(Packet("node", 1, 0, 0, (NodeJoined("node", 1, "", 0, 0),)))
        answer = await theirs.receive()
        assert isinstance(answer, Packet)
        assert isinstance(answer.messages[0], StartWorker)
        theirs.send(Packet("node", 1, 1, 1, (WorkerStarted(0, 1),)))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running}, timeout=DEADLINE_S)
        return running.cancelled()

    with Recorder(tmp_path) as recorder:
        assert asyncio.run(cancel_while_a_message_comes())


@pytest.mark.parametrize(
    "said",
    [
        Packet("node-b", 1, 0, 0, (NodeJoined("node-b", 1, "", 0, 0),)),
        Packet("node-a", 1, 0, 0, (NodeJoined("node-b", 1, "", 0, 0),)),
        ClockAsked("node-b", 1),
        PhasesObserved("node-b", 1, b""),
        PhasesObserved("node-a", 1, b"no records"),
        StoreRequested(0, 1, 1, "set", ("key",), b"value"),
        StartWorker(0, 0, "an agent gives no orders"),
    ],
)
def test_an_agent_speaks_for_its_own_node_only(tmp_path: Path, said: AnyMessage) -> None:
    """It has a token, and the controller knows for which node; the worker that it names is on another one."""

    async def scene() -> tuple[str, RecoveryMachine]:
        machine = ControllerMachine(RecoverySettings(1, 0))
        async with served() as network, asyncio.timeout(DEADLINE_S):
            controller = Controller(machine, network.lines, recorder)
            running = asyncio.create_task(controller.run())
            honest, thief = (network.line(network.credentials(name)) for name in ("node-b", "node-a"))
            async with connected(honest), connected(thief):
                assert await honest.receive() == Connected()
                honest.send(Packet("node-b", 1, 0, 0, (NodeJoined("node-b", 1, "", 0, 0),)))
                assert isinstance(await honest.receive(), Packet)  # to start the worker
                assert await thief.receive() == Connected()
                thief.send(said)
                address, why = await network.next_refusal()
            running.cancel()
            await asyncio.wait({running})
        assert address.startswith("127.0.0.1:")
        return why, machine.job

    with Recorder(tmp_path) as recorder:
        why, job = asyncio.run(scene())
    assert why.startswith("node node-a: ")
    assert set(job.roster.nodes) == {"node-b"}
    assert [worker.lost for worker in job.roster.workers.values()] == [False]
