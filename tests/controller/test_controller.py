"""The loop around the controller's machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.protocol.toy_cluster import ToyCluster
from tests.support.published import FOLDER, news
from tests.transports.rpc.served import connected, served

from keepstep.controller.controller import MAX_TOGETHER, Controller
from keepstep.errors import LeaseLost, RemoteProtocolError
from keepstep.protocol.controller import ControllerMachine
from keepstep.protocol.messages import (
    AnyMessage,
    ClockAsked,
    ClockTold,
    EndJob,
    NodeJoined,
    Packet,
    PhasesObserved,
    PublicationStage,
    StartWorker,
    StoreAnswered,
    StoreRequested,
    WorkerStarted,
)
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings, Stage
from keepstep.trace.record import runfolder
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.weights.publications import Publications
from keepstep.transports.interface import Arrival, Connected
from keepstep.transports.memory import OneNode, channel_pair

DEADLINE_S = 20.0


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_meets_a_message_is_not_lost(tmp_path: Path, turns: int) -> None:
    """Found as a launcher that never ended after SIGTERM: a report came in at the same moment."""

    async def cancel_while_a_message_comes() -> bool:
        ours, theirs = channel_pair()
        machine = ControllerMachine(RecoverySettings(1, 0), lease_s=None)
        running = asyncio.create_task(Controller(machine, OneNode("node", ours), recorder).run())
        theirs.send(Packet("node", 1, 0, 0, (NodeJoined("node", 1, "", 0, 0, (), 0),), misses=False))
        answer = await theirs.receive()
        assert isinstance(answer, Packet)
        assert isinstance(answer.messages[0], StartWorker)
        theirs.send(Packet("node", 1, 1, 1, (WorkerStarted(0, 1),), misses=False))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running}, timeout=DEADLINE_S)
        return running.cancelled()

    with Recorder(tmp_path) as recorder:
        assert asyncio.run(cancel_while_a_message_comes())


class Lines:
    """Lines on which everything has arrived already; keeps what is sent."""

    def __init__(self, *arrivals: Arrival) -> None:
        self._arrivals = list(arrivals)
        self.sent: list[AnyMessage] = []

    def send(self, node: str, message: AnyMessage) -> None:
        self.sent.append(message)

    async def receive(self) -> Arrival:
        return self._arrivals.pop(0)

    def more(self) -> Arrival | None:
        return self._arrivals.pop(0) if self._arrivals else None

    def refuse(self, node: str, why: str) -> None:
        raise AssertionError(why)


def test_nothing_is_lost_of_what_comes_together(tmp_path: Path) -> None:
    """Found as the one of a thousand agents that had to say everything twice: its message was the first too many."""
    num = 2 * MAX_TOGETHER + 10
    lines = Lines(*(Arrival(f"node-{number}", ClockAsked(f"node-{number}", number)) for number in range(num)))

    with Recorder(tmp_path) as recorder, pytest.raises(IndexError):  # nothing more comes
        asyncio.run(Controller(ControllerMachine(RecoverySettings(1, 0)), lines, recorder).run())
    assert [each.asked_ns for each in lines.sent if isinstance(each, ClockTold)] == list(range(num))


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_quiet_moment_is_reported_once_and_not_where_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr("keepstep.controller.controller.CALM_S", 0.0)
    machine = ToyCluster().go().controller
    num_told = 0

    def tell() -> None:
        nonlocal num_told
        num_told += 1

    async def scene() -> None:
        controller = Controller(machine, Lines(), recorder, when_calm=tell)
        assert machine.job.stage is Stage.TRAINING
        controller._settle()
        if not goes_on:
            machine.call_off(EndJob(1, "called off"), 0.0)
        for _ in range(5):
            controller._settle()
            await asyncio.sleep(0)

    with Recorder(tmp_path) as recorder:
        asyncio.run(scene())
    assert num_told == goes_on


def test_what_ranks_tell_of_weights_is_shown_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, where much comes at once; from a worker that the controller does not know, or no longer, nothing."""
    monkeypatch.setattr("keepstep.controller.controller.GATHER_S", 0.0)
    machine = ToyCluster().go().controller
    node = machine.job.roster.workers[0].node

    async def scene() -> None:
        controller = Controller(machine, Lines(), recorder)
        for version in (1, 2):
            controller._arrived(node, news(0, PublicationStage.COMMITTED, version, float(version)))
        controller._arrived(node, news(99, PublicationStage.COMMITTED, 3, 3.0))
        assert not path.exists()
        await asyncio.sleep(0.01)
        found = Publications.read(path).found[FOLDER]
        assert (found.version, found.num_committed, list(found.devices)) == (2, 2, [0])
        with pytest.raises(RemoteProtocolError, match="node stranger told of weights of worker 0"):
            controller._arrived("stranger", news(0, PublicationStage.COMMITTED, 4, 4.0))

    path = tmp_path / runfolder.WEIGHTS
    with Recorder(tmp_path) as recorder:
        asyncio.run(scene())


@pytest.mark.parametrize("has_lease", [True, False])
def test_who_has_lost_the_lease_says_nothing(tmp_path: Path, has_lease: bool) -> None:
    """Not even what is in no journal: what time it is, and what the store holds."""

    def confirm() -> None:
        assert (tmp_path / "journal.jsonl").read_bytes().endswith(b"\n"), "the journal was written before"
        if not has_lease:
            raise LeaseLost("another one serves the run")

    joined = Packet("node", 1, 0, 0, (NodeJoined("node", 1, "", 0, 0, (), 0),), misses=False)
    asked = StoreRequested(0, 1, 1, "check", ("key",), b"")
    lines = Lines(*(Arrival("node", message) for message in (ClockAsked("node", 1), joined, asked)))
    with Recorder(tmp_path) as recorder:
        controller = Controller(ControllerMachine(RecoverySettings(1, 0)), lines, recorder, confirm=confirm)
        if has_lease:
            asyncio.run(controller._turn())
            assert {type(message) for message in lines.sent} == {ClockTold, Packet, StoreAnswered}
        else:
            with pytest.raises(LeaseLost):
                asyncio.run(controller._turn())
            assert lines.sent == []


def test_a_journal_that_cannot_be_written_may_be_another_controllers_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system says so of a file that was replaced by another machine."""

    def confirm() -> None:
        raise LeaseLost("another one serves the run")

    def stale(_entries: object) -> None:
        raise OSError(116, "Stale file handle")

    with Recorder(tmp_path) as recorder:
        monkeypatch.setattr(recorder, "decided", stale)
        machine = ControllerMachine(RecoverySettings(1, 0))
        with pytest.raises(LeaseLost):
            asyncio.run(Controller(machine, Lines(), recorder, confirm=confirm).run())
        with pytest.raises(OSError, match="Stale"):
            asyncio.run(Controller(machine, Lines(), recorder).run())


@pytest.mark.parametrize(
    "said",
    [
        Packet("node-b", 1, 0, 0, (NodeJoined("node-b", 1, "", 0, 0, (), 0),), misses=False),
        Packet("node-a", 1, 0, 0, (NodeJoined("node-b", 1, "", 0, 0, (), 0),), misses=False),
        ClockAsked("node-b", 1),
        PhasesObserved("node-b", 1, b""),
        PhasesObserved("node-a", 1, b"no records"),
        StoreRequested(0, 1, 1, "set", ("key",), b"value"),
        StartWorker(0, 0, 0, 0, 1, "an agent gives no orders"),
    ],
)
def test_an_agent_reports_for_its_own_node_only(tmp_path: Path, said: AnyMessage) -> None:
    """It has a token, and the controller knows for which node; the worker that it names is on another one."""

    async def scene() -> tuple[str, RecoveryMachine]:
        machine = ControllerMachine(RecoverySettings(1, 0))
        async with served() as network, asyncio.timeout(DEADLINE_S):
            controller = Controller(machine, network.connections, recorder)
            running = asyncio.create_task(controller.run())
            honest, thief = (network.line(network.credentials(name)) for name in ("node-b", "node-a"))
            async with connected(honest), connected(thief):
                assert await honest.receive() == Connected()
                honest.send(Packet("node-b", 1, 0, 0, (NodeJoined("node-b", 1, "", 0, 0, (), 0),), misses=False))
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
