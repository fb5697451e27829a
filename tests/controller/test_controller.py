"""The loop around the controller's machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from keepstep.controller.controller import Controller
from keepstep.protocol.messages import NodeJoined, Packet, StartWorker, WorkerStarted
from keepstep.protocol.recovery import RecoverySettings
from keepstep.transports.memory import channel_pair

DEADLINE_S = 20.0


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_meets_a_message_is_not_lost(tmp_path: Path, turns: int) -> None:
    """Found as a launcher that never ended after SIGTERM: a report came in at the same moment."""

    async def cancel_while_a_message_comes() -> bool:
        ours, theirs = channel_pair()
        running = asyncio.create_task(Controller(RecoverySettings(1, 0), ours, tmp_path).run())
        theirs.send(Packet("node", 1, 0, 0, (NodeJoined("node", 1, ""),)))
        answer = await theirs.receive()
        assert isinstance(answer, Packet)
        assert isinstance(answer.messages[0], StartWorker)
        theirs.send(Packet("node", 1, 1, 1, (WorkerStarted(0, 1),)))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running}, timeout=DEADLINE_S)
        return running.cancelled()

    assert asyncio.run(cancel_while_a_message_comes())
