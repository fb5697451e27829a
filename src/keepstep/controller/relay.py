"""A relay: a child process of the controller that serves some of the agents, and bundles their messages.

    python -m keepstep.controller.relay DESCRIPTOR PARENT

It gets its settings, including the job's secret, over an inherited socket. It ends when the controller closes it.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time

from keepstep import eventloop
from keepstep.errors import KeepstepError, PeerLost
from keepstep.programs import begin, end_with_parent, leave, leave_signals_to_parent
from keepstep.protocol.relay.bundle import NodeConnected, NodeSaid, PacketBundle
from keepstep.protocol.relay.gathering import BEAT_S, Gathering
from keepstep.protocol.transfer.directory import PublishingNode
from keepstep.systemcalls import needed, open_files
from keepstep.transports.interface import Arrival, Connected, RelayLost
from keepstep.transports.relay import wire
from keepstep.transports.relay.pipe import Pipe
from keepstep.transports.rpc.directory import WeightsDirectory
from keepstep.transports.rpc.server import RpcNodeConnections
from keepstep.trust.certificates import ServerFiles
from keepstep.trust.tokens import Role, Secret, check

CONTROLLER_SILENT_S = 5.0
"""A controller that is paused for so long may have a successor. The relay ends then, so that agents find that one."""
GC_THRESHOLD = 50_000
"""Number of young objects that triggers Python's garbage collector. Bundles are many small objects without cycles."""


class Relay:
    """Passes messages between the connected agents and the controller."""

    def __init__(self, pipe: Pipe, connections: RpcNodeConnections, directory: WeightsDirectory) -> None:
        self._pipe = pipe
        self._connections = connections
        self._directory = directory
        self._gathering = Gathering()
        self._passed_on_s = time.monotonic()
        """When the last frame was sent. The next one waits until the controller has taken it."""

    async def run(self) -> None:
        """Passes messages in both directions until the controller closes the socket.

        Raises:
            PeerLost: the controller has taken no frame for `CONTROLLER_SILENT_S`.
        """
        tasks = [asyncio.create_task(each) for each in (self._listen(), self._transmit(), self._beat())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            arrival: Arrival | None = await self._connections.receive()
            while arrival is not None:
                self._gather(arrival)
                arrival = self._connections.more()
            self._pass_on()

    def _gather(self, arrival: Arrival) -> None:
        node, message = arrival.node, arrival.message
        if isinstance(message, Connected):
            self._gathering.add(NodeConnected(node))
        elif (speaks_for := getattr(message, "node", node)) != node:
            self._connections.refuse(node, f"node {node} spoke for node {speaks_for}")
        elif not isinstance(message, PacketBundle | RelayLost):
            self._gathering.add(NodeSaid(node, message))

    def _pass_on(self, *, even_nothing: bool = False) -> None:
        items = self._gathering.take(even_nothing=even_nothing)
        if items is not None:
            self._passed_on_s = time.monotonic()
            self._pipe.write(wire.encode(wire.Upward(items)))

    async def _beat(self) -> None:
        while True:
            self._pass_on(even_nothing=True)
            if time.monotonic() > self._passed_on_s + CONTROLLER_SILENT_S:
                raise PeerLost(f"the controller has taken nothing for {CONTROLLER_SILENT_S:g} s")
            await asyncio.sleep(BEAT_S)

    async def _transmit(self) -> None:
        while (data := await self._pipe.read()) is not None:
            frame = wire.decode_downward(data)
            for publishing in frame.publishing:
                self._directory.hear(publishing)
            for node, why in frame.refused:
                self._connections.refuse(node, why)
            for said in frame.others:
                self._connections.send(said.node, said.message)
            for bundle in frame.bundles:
                for node, packet in bundle.packets():
                    self._connections.send_encoded(node, packet)
            if frame.has_taken:
                self._gathering.taken()
                self._pass_on()


async def serve(descriptor: int) -> None:
    """Reads the settings from the controller's socket, and serves agents until the controller closes it.

    Args:
        descriptor: the socket.
    """
    pipe = await Pipe.open(socket.socket(fileno=descriptor))
    first = await pipe.read()
    if first is None:
        return
    begin = wire.decode_begin(first)
    secret = Secret.parse(begin.secret, "the controller's words")
    tls = None if begin.key is None or begin.certificate is None else ServerFiles(begin.key, begin.certificate)

    def refused(address: str, why: str) -> None:
        pipe.write(wire.encode(wire.ConnectionRefused(address, why)))

    def announced(node: PublishingNode) -> None:
        pipe.write(wire.encode(wire.WeightsAnnounced(node)))

    directory = WeightsDirectory(lambda token: check(secret, token, Role.PUBLISHER, Role.RECEIVER), refused, announced)
    connections = RpcNodeConnections(lambda token: check(secret, token).name, refused, begin.term, directory)
    await connections.start(begin.host, begin.port, tls, is_shared=True)
    pipe.write(wire.encode(wire.Ready()))
    try:
        await Relay(pipe, connections, directory).run()
    finally:
        await connections.stop()


def main() -> None:
    """Runs the relay's process; see the module."""
    begin()
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with_parent(parent)
    leave_signals_to_parent()  # the relay ends when the controller closes the socket
    open_files()  # each connection takes one
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        with needed():
            eventloop.run(serve(descriptor))
    except KeepstepError as error:
        print(f"keepstep relay: {error}", file=sys.stderr, flush=True)
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
