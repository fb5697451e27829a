"""Agents and a controller over gRPC: messages arrive, callers without a token are refused by address."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import struct
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from tests.transports.rpc.served import DEADLINE_S, Served, connected, served

from keepstep.errors import ConfigurationError, PeerLost
from keepstep.protocol.messages import ClockAsked, ClockTold, NodeJoined, Packet, PhasesObserved
from keepstep.transports.codec import MAX_MESSAGE_BYTES
from keepstep.transports.framing import frame
from keepstep.transports.interface import Arrival, Connected
from keepstep.transports.rpc import client, server
from keepstep.transports.rpc.wire import AUTHORIZATION, BEARER, PATH
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, mint

BOTH = pytest.mark.parametrize("is_tls", [True, False], ids=["tls", "plain"])


def play(scene: Callable[[Served], Awaitable[None]], *, is_tls: bool = True) -> None:
    """Lives through a scene with a controller's end."""

    async def whole() -> None:
        async with asyncio.timeout(3 * DEADLINE_S), served(is_tls=is_tls) as controller:
            await scene(controller)

    asyncio.run(whole())


async def still_serves(controller: Served, node: str = "witness") -> None:
    """Another agent comes, speaks and is answered."""
    line = controller.line(controller.credentials(node))
    async with connected(line):
        assert await controller.connections.receive() == Arrival(node, Connected())
        assert await line.receive() == Connected()
        line.send(ClockAsked(node, 7))
        assert await controller.connections.receive() == Arrival(node, ClockAsked(node, 7))
        controller.connections.send(node, ClockTold(7, 8, 0.2))
        assert await line.receive() == ClockTold(7, 8, 0.2)


# ---- what is said ---------------------------------------------------------------------------------------------------


@BOTH
def test_what_is_said_arrives(is_tls: bool) -> None:
    play(still_serves, is_tls=is_tls)


def test_large_and_many_messages_arrive_in_order() -> None:
    async def scene(controller: Served) -> None:
        line = controller.line(controller.credentials("a"))
        sent = [PhasesObserved("a", n, bytes([n]) * (n * 5_000)) for n in range(100)]
        async with connected(line):
            await controller.connections.receive()
            await line.receive()
            for message in sent:
                line.send(message)
            assert [(await controller.connections.receive()).message for _ in sent] == sent

    play(scene)


def test_what_is_said_before_the_end_arrives() -> None:
    async def scene(controller: Served) -> None:
        line = controller.line(controller.credentials("a"))
        async with connected(line) as running:
            await controller.connections.receive()
            await line.receive()
            line.send(ClockAsked("a", 1))
            line.close()
            assert await controller.connections.receive() == Arrival("a", ClockAsked("a", 1))
            async with asyncio.timeout(DEADLINE_S):
                await running

    play(scene)


def test_a_controller_that_comes_back_is_found_again() -> None:
    async def whole() -> None:
        async with asyncio.timeout(3 * DEADLINE_S):
            async with served() as first:
                line = first.line(first.credentials("a"))
                running = asyncio.create_task(line.run())
                assert await line.receive() == Connected()
            line.send(ClockAsked("a", 1))  # to no process
            async with served(port=first.port, secret=first.secret) as second:
                assert await line.receive() == Connected()
                assert await second.connections.receive() == Arrival("a", Connected())
                line.send(ClockAsked("a", 2))
                assert await second.connections.receive() == Arrival("a", ClockAsked("a", 2))
                running.cancel()
                await asyncio.wait({running})

    asyncio.run(whole())


def test_a_controller_of_an_earlier_term_is_not_listened_to() -> None:
    """It has stood still, and has not found out yet that another one took its place."""
    secret = Secret.new()

    async def whole() -> None:
        async with asyncio.timeout(3 * DEADLINE_S):
            async with served(secret=secret, term=3) as latter:
                line = latter.line(latter.credentials("a"))
                troubles: asyncio.Queue[str] = asyncio.Queue()
                line.on_trouble = troubles.put_nowait
                running = asyncio.create_task(line.run())
                assert await line.receive() == Connected()
            async with served(port=latter.port, secret=secret, term=2):
                while "serves no more: its term is 2, and 3 has begun" not in await troubles.get():
                    pass
            async with served(port=latter.port, secret=secret, term=4) as last:
                assert await line.receive() == Connected()
                assert await last.connections.receive() == Arrival("a", Connected())
                running.cancel()
                await asyncio.wait({running})

    asyncio.run(whole())


def test_an_endpoint_that_does_not_answer_does_not_keep_an_agent_from_another(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the other one is there only later: its machine's power is off, and one takes its place."""
    monkeypatch.setattr(client, "CONNECT_S", 10 * DEADLINE_S)
    secret = Secret.new()

    async def whole() -> None:
        async with asyncio.timeout(3 * DEADLINE_S):
            with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as later:
                later.bind(("127.0.0.1", 0))  # refuses
                ports = [silent.getsockname()[1], later.getsockname()[1]]
                random.Random(seed).shuffle(ports)
                own = Served(None, 0, secret, True)  # type: ignore[arg-type]  # not served
                line = own.line(own.credentials("a"), ports=ports)
                troubles: asyncio.Queue[str] = asyncio.Queue()
                line.on_trouble = troubles.put_nowait
                async with connected(line):
                    assert "onnection refused" in await troubles.get()
                    port = later.getsockname()[1]
                    later.close()
                    async with served(port=port, secret=secret) as controller:
                        assert await controller.connections.receive() == Arrival("a", Connected())

    asyncio.run(whole())


def test_an_agent_that_connects_again_takes_the_place_of_its_former_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 10 * DEADLINE_S)  # or the former one would soon be back

    async def scene(controller: Served) -> None:
        former, latter = (controller.line(controller.credentials("a")) for _ in range(2))
        async with connected(former):
            await controller.connections.receive()
            async with connected(latter):
                assert await controller.connections.receive() == Arrival("a", Connected())
                assert await latter.receive() == Connected()
                controller.connections.send("a", ClockTold(1, 2, 0.2))
                assert await latter.receive() == ClockTold(1, 2, 0.2)
                assert "has connected again" in (await controller.next_refusal())[1]

    play(scene)


def test_a_controller_that_lets_an_agent_in_and_refuses_what_it_says_is_none() -> None:
    async def scene(controller: Served) -> None:
        async def refuse() -> None:
            while True:
                controller.connections.refuse((await controller.connections.receive()).node, "of another run")

        refusing = asyncio.create_task(refuse())
        with pytest.raises(PeerLost, match=r"no controller was reachable for 1 s; .*: of another run"):
            await controller.line(controller.credentials("a"), patience_s=1.0).run()
        refusing.cancel()
        await asyncio.wait({refusing})
        assert "of another run" in (await controller.next_refusal())[1]

    play(scene)


def test_patience_has_an_end() -> None:
    async def whole() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
            controller = Served(None, silent.getsockname()[1], Secret.new(), True)  # type: ignore[arg-type]  # not served
            with pytest.raises(PeerLost, match=r"no controller was reachable for 0\.1 s"):
                await controller.line(controller.credentials("a"), patience_s=0.1).run()

    asyncio.run(whole())


# ---- who may speak --------------------------------------------------------------------------------------------------


@BOTH
def test_the_token_of_another_job_is_refused(is_tls: bool) -> None:
    async def scene(controller: Served) -> None:
        with pytest.raises(ConfigurationError, match="was not made with this job's secret"):
            await controller.line(controller.credentials("a", Secret.new())).run()
        address, why = await controller.next_refusal()
        assert address.startswith("127.0.0.1:")
        assert "agent 'a' was not made with this job's secret" in why
        await still_serves(controller)

    play(scene, is_tls=is_tls)


@BOTH
@pytest.mark.parametrize("token", [None, "", "Bearer", BEARER + "ks1.agent.YQ.AAAA"])
def test_no_token_is_refused(is_tls: bool, token: str | None) -> None:
    async def scene(controller: Served) -> None:
        metadata = () if token is None else ((AUTHORIZATION, token),)
        async with channel_to(controller) as channel:
            call = channel.stream_stream(PATH)(metadata=metadata)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await controller.next_refusal())[0].startswith("127.0.0.1:")
        await still_serves(controller)

    play(scene, is_tls=is_tls)


def test_the_controller_of_another_job_is_not_believed() -> None:
    """Its certificate is from another authority, so not even the token is shown to it."""

    async def scene(controller: Served) -> None:
        line = controller.line(Credentials.of(Secret.new(), Claim(Role.AGENT, "a")))
        with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:\d+ is not of this job: this node's token"):
            await line.run()
        await still_serves(controller)

    play(scene)


def test_one_of_several_endpoints_may_be_that_of_another_job() -> None:
    async def scene(controller: Served) -> None:
        async with served() as own:
            line = own.line(own.credentials("a"), ports=[controller.port])
            line._endpoints += ("127.0.0.1:1",)
            troubles: asyncio.Queue[str] = asyncio.Queue()
            line.on_trouble = troubles.put_nowait
            async with connected(line) as running:
                while "its certificate is not of this job: " not in await troubles.get():
                    pass
                assert not running.done()
                assert not line.has_opened

    play(scene)


# ---- what is no agent -----------------------------------------------------------------------------------------------

HANDSHAKE = bytes.fromhex("160301") + struct.pack(">H", 512)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""RFC 9113, section 3.4."""


@BOTH
@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 100,
        b"\xff" * 100_000,
        frame(ClockAsked("a", 1)),
        struct.pack("<I", 1 << 30) + b"x" * 100,
    ],
    ids=["http", "zeros", "ones", "a frame", "1 GiB"],
)
def test_rubbish_is_refused(is_tls: bool, rubbish: bytes) -> None:
    async def scene(controller: Served) -> None:
        await expect_end_of(controller, rubbish)
        await still_serves(controller)

    play(scene, is_tls=is_tls)


@BOTH
@pytest.mark.parametrize("said", ["nothing", "half a handshake", "rubbish in a handshake"])
def test_a_handshake_has_to_end_in_time(is_tls: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ADMISSION_S", 1.0)
    first = HANDSHAKE if is_tls else HTTP2_PREFACE
    words = {"nothing": b"", "half a handshake": first, "rubbish in a handshake": first + b"\x5a" * 4096}[said]

    async def scene(controller: Served) -> None:
        await expect_end_of(controller, words)
        await still_serves(controller)

    play(scene, is_tls=is_tls)


@BOTH
def test_a_connection_without_a_call_is_ended(is_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It speaks HTTP/2, and has no token to show."""
    monkeypatch.setattr(server, "ADMISSION_S", 1.0)

    async def scene(controller: Served) -> None:
        async with channel_to(controller) as channel:
            await channel.channel_ready()
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await still_serves(controller)

    play(scene, is_tls=is_tls)


def test_strangers_that_do_not_leave_keep_no_agent_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill all connections that gRPC accepts, and none of them ends by itself."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 30)
    monkeypatch.setattr(server, "MAX_STRANGERS", 10)
    monkeypatch.setattr(server, "ADMISSION_S", 1000.0)

    async def visit(controller: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", controller.port, local_addr=("127.0.0.2", 0))
        try:
            await expect_end(reader)
        finally:
            writer.close()

    async def scene(controller: Served) -> None:
        line = controller.line(controller.credentials("a"))
        async with connected(line):
            assert await controller.connections.receive() == Arrival("a", Connected())
            assert await line.receive() == Connected()
            for _ in range(3):
                strangers = [asyncio.create_task(visit(controller)) for _ in range(60)]
                while sum(each.done() for each in strangers) < 15:  # there are as many as gRPC accepts
                    await asyncio.wait({each for each in strangers if not each.done()}, return_when=FIRST_COMPLETED)
                await still_serves(controller)  # a node that connects again
                line.send(ClockAsked("a", 7))  # over its first connection
                assert await controller.connections.receive() == Arrival("a", ClockAsked("a", 7))
                for each in strangers:
                    each.cancel()
                await asyncio.wait(strangers)
            assert line._arrived.empty()  # the agent has not connected again

    play(scene)


def test_connections_leave_open_files_for_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    most = server.MAX_CONNECTIONS + server.MAX_STRANGERS
    few = 1024 - server.OTHER_DESCRIPTORS
    limits = ((1 << 20, most, server.MAX_STRANGERS), (1024, few, few // 5), (64, 2, 1))
    for limit, num, num_strangers in limits:
        monkeypatch.setattr(resource, "getrlimit", lambda _which, limit=limit: (limit, limit))
        assert (server.num_connections(), server.num_strangers()) == (num, num_strangers)


@pytest.mark.parametrize("ends", ["reading", "writing"])
def test_an_unforeseen_error_of_a_connection_is_seen(
    ends: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def break_down(*arguments: object) -> None:
        raise KeyError("a bug, \x1b[2J")

    if ends == "reading":
        monkeypatch.setattr(server.RpcNodeConnections, "_read", break_down)
    else:
        monkeypatch.setattr(server, "_write", break_down)

    async def scene(controller: Served) -> None:
        async with channel_to(controller) as channel:
            call = channel.stream_stream(PATH)(metadata=bearer(controller, "a"))
            await call.code()

    play(scene)
    told = capfd.readouterr().err
    assert "keepstep: an error has ended the connection to node a:\nTraceback" in told
    assert "in break_down" in told
    assert "KeyError: 'a bug, \\x1b[2J'" in told


@BOTH
def test_the_end_of_a_connection_is_no_error(is_tls: bool, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene(controller: Served) -> None:
        line = controller.line(controller.credentials("a"))
        async with connected(line):
            await controller.connections.receive()
            await line.receive()
        for number in range(1000):
            controller.connections.send("a", PhasesObserved("a", number, bytes(20_000)))  # fails: the node is gone
            await asyncio.sleep(0)
        await still_serves(controller)

    play(scene, is_tls=is_tls)
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_reported() -> None:
    async def scene(controller: Served) -> None:
        with pytest.raises(
            ConfigurationError, match=rf"cannot listen on 127\.0\.0\.1:{controller.port}: Address already"
        ):
            async with served(port=controller.port):
                pass
        with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign"):
            await server.RpcNodeConnections(str, lambda address, why: None).start("192.0.2.1", 0, None)

    play(scene)


@BOTH
@pytest.mark.parametrize(
    "said",
    [b"", b"\x01", b"\x05\x00\x00\x00abc", frame(ClockAsked("a", 1))[:-1], struct.pack("<I", 1 << 30), b"\xc1" * 50],
    ids=["empty", "a byte", "half a frame", "all but a byte", "1 GiB", "no message"],
)
def test_an_agent_that_talks_rubbish_is_cut_off(is_tls: bool, said: bytes) -> None:
    async def scene(controller: Served) -> None:
        async with channel_to(controller) as channel:
            call = channel.stream_stream(PATH)(metadata=bearer(controller, "a"))
            await call.initial_metadata()
            assert await controller.connections.receive() == Arrival("a", Connected())
            await call.write(said)
            if not said:
                return  # no frames are no rubbish
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        address, why = await controller.next_refusal()
        assert address.startswith("127.0.0.1:")
        assert why.startswith("node a: ")
        await still_serves(controller)

    play(scene, is_tls=is_tls)


def test_a_node_that_joins_with_an_endless_text_is_told_which() -> None:
    async def scene(controller: Served) -> None:
        troubles: asyncio.Queue[str] = asyncio.Queue()
        line = controller.line(controller.credentials("a"))
        line.on_trouble = troubles.put_nowait
        joined = NodeJoined("a", 1, "r" * 8_000_000, 0, 0, (), 0)
        async with connected(line):
            await controller.connections.receive()
            await line.receive()
            line.send(Packet("a", 1, 0, 0, (joined,), misses=False))
            why = "Packet.messages[0] NodeJoined.domain: Expected `str` of length <= 256"
            assert (await controller.next_refusal())[1] == f"node a: not a message of this protocol: {why}"
            assert why in await troubles.get()

    play(scene)


def test_a_call_beyond_the_limit_is_refused_before_it_is_read() -> None:
    async def scene(controller: Served) -> None:
        async with channel_to(controller) as channel:
            call = channel.stream_stream(PATH)(metadata=bearer(controller, "a"))
            await call.initial_metadata()
            await controller.connections.receive()
            await call.write(bytes(MAX_MESSAGE_BYTES + 100))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await still_serves(controller)

    play(scene)


def channel_to(controller: Served) -> grpc.aio.Channel:
    """A channel of a caller that knows the authority, and need not be an agent."""
    where = f"127.0.0.1:{controller.port}"
    if not controller.is_tls:
        return grpc.aio.insecure_channel(where)
    credentials = grpc.ssl_channel_credentials(certificates.authority(controller.secret))
    return grpc.aio.secure_channel(
        where, credentials, options=[("grpc.ssl_target_name_override", certificates.CONTROLLER_NAME)]
    )


def bearer(controller: Served, node: str) -> tuple[tuple[str, str], ...]:
    """What an agent shows."""
    return ((AUTHORIZATION, BEARER + mint(controller.secret, Claim(Role.AGENT, node))),)


async def expect_end_of(controller: Served, said: bytes) -> None:
    """A stranger connects and says something, and the controller ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", controller.port)
    writer.write(said)
    await expect_end(reader)
    writer.close()


async def expect_end(reader: asyncio.StreamReader) -> None:
    """The other end has ended the connection; what came before does not matter."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
