"""Nodes find out from the controller where weights are published; strangers do not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest

from keepstep.errors import KeepstepError, PeerLost, RemoteProtocolError, TokenRefused
from keepstep.launcher.cluster import weights
from keepstep.launcher.cluster.weights import Publishers
from keepstep.protocol.transfer.directory import PublishingNode
from keepstep.transports.rpc.directory import DirectoryCaller, WeightsDirectory
from keepstep.transports.rpc.server import RpcNodeConnections
from keepstep.transports.rpc.strangers import StrangerLimit
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, check

SECRET = Secret(bytes(range(32)))
PATIENCE_S = 20.0


@contextlib.asynccontextmanager
async def controller(*, port: int = 0, tells: bool = True, is_tls: bool = True) -> AsyncIterator[str]:
    """A controller's end; yields its endpoint."""

    def refused(_address: str, _why: str) -> None:
        pass

    directory = WeightsDirectory(lambda token: check(SECRET, token, Role.PUBLISHER, Role.RECEIVER), refused)
    connections = RpcNodeConnections(lambda token: check(SECRET, token).name, refused, 0, directory if tells else None)
    port = await connections.start("127.0.0.1", port, certificates.server(SECRET) if is_tls else None)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await connections.stop()


def caller(*endpoints: str, role: Role = Role.RECEIVER, name: str = "e", secret: Secret = SECRET) -> DirectoryCaller:
    """A node."""
    found = Credentials.of(SECRET, Claim(role, name))
    if secret is not SECRET:
        found = dataclasses.replace(found, token=Credentials.of(secret, Claim(role, name)).token)
    return DirectoryCaller(endpoints, found)


async def find(by: DirectoryCaller, own_address: str | None = None) -> tuple[PublishingNode, ...]:
    """One call, beside the controller's loop."""
    with contextlib.closing(by):
        return await asyncio.to_thread(by.find, own_address)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """A coroutine function, to its end."""
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_connection_is_admitted_by_a_call_with_a_valid_token(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[str] = []
    monkeypatch.setattr(StrangerLimit, "admit", lambda self, address, until_s: admitted.append(address))

    async def test() -> None:
        async with controller() as endpoint:
            with pytest.raises(TokenRefused):
                await find(caller(endpoint, secret=Secret.new()))
            assert admitted == []
            await find(caller(endpoint))
            (address,) = admitted
            assert re.fullmatch(r"127\.0\.0\.1:\d+", address)

    run(test)


def test_publishers_announce_themselves_and_others_hear_of_them() -> None:
    async def test() -> None:
        async with controller() as endpoint:
            assert await find(caller(endpoint)) == ()
            first = PublishingNode("t0", "10.0.0.1:5")
            assert await find(caller(endpoint, role=Role.PUBLISHER, name="t0"), first.address) == (first,)
            assert await find(caller("127.0.0.1:9", endpoint)) == (first,)  # no process at the first one

    run(test)


@pytest.mark.parametrize(
    ("role", "secret", "own_address", "told"),
    [
        (Role.AGENT, SECRET, None, "is not good for the role of publisher or receiver"),
        (Role.RECEIVER, SECRET, "10.0.0.1:5", "is not good for publishing"),
        (Role.PUBLISHER, Secret.new(), "10.0.0.1:5", "was not made with this job's secret"),
    ],
)
def test_who_may_not_ask_or_announce(role: Role, secret: Secret, own_address: str | None, told: str) -> None:
    async def test() -> None:
        async with controller() as endpoint:
            with pytest.raises(TokenRefused, match=told):
                await find(caller(endpoint, role=role, secret=secret), own_address)
            assert await find(caller(endpoint)) == ()

    run(test)


@pytest.mark.parametrize(
    ("is_there", "error", "told"),
    [(True, RemoteProtocolError, "refuses: Method not found"), (False, PeerLost, "no controller")],
)
def test_a_controller_that_does_not_tell(is_there: bool, error: type[KeepstepError], told: str) -> None:
    async def test() -> None:
        async with controller(tells=False) as endpoint:
            with pytest.raises(error, match=told):
                await find(caller(endpoint if is_there else "127.0.0.1:9"))

    run(test)


def test_nodes_are_found_again_by_a_controller_that_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile they are remembered."""

    monkeypatch.setattr(weights, "ANNOUNCE_S", 0.05)

    def wait_for(condition: Callable[[], bool]) -> None:
        while not condition():
            threading.Event().wait(0.02)

    async def until(condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(wait_for, condition)

    async def test() -> None:
        with contextlib.ExitStack() as stack:
            heard: list[list[str]] = []
            notes: list[str] = []
            async with controller() as endpoint:
                publisher = Publishers(
                    caller(endpoint, role=Role.PUBLISHER, name="t0"), "t0:5", heard.append, notes.append
                )
                stack.callback(publisher.close)
                await until(lambda: bool(heard))
                receiver = Publishers(caller(endpoint), None, lambda _addresses: None, notes.append)
                stack.callback(receiver.close)
                await until(lambda: receiver.addresses == ["t0:5"])
            await until(lambda: len(notes) == 2)
            assert all("no controller answers" in note for note in notes)
            assert receiver.after(None) == receiver.after("t0:5") == receiver.after("gone:1") == "t0:5"
            num_heard = len(heard)
            async with controller(port=int(endpoint.rpartition(":")[2])):
                await until(lambda: len(heard) > num_heard)
                late = Publishers(caller(endpoint), None, lambda _addresses: None, notes.append)
                stack.callback(late.close)
                await until(lambda: late.addresses == ["t0:5"])
            assert heard[0] == heard[-1] == []  # it is no peer of its own
            await asyncio.to_thread(stack.pop_all().close)

    run(test)
