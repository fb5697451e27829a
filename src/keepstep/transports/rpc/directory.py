"""The gRPC call with which a node asks the controller for the nodes that publish weights, and announces itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from keepstep.errors import PeerLost, RemoteProtocolError, TokenRefused
from keepstep.protocol.transfer.directory import (
    KEEP_S,
    PublishingNode,
    PublishingNodes,
    WeightsAsked,
    decode_answer,
    decode_question,
    encode,
)
from keepstep.transports.rpc.wire import AUTHORIZATION, BEARER, SERVICE, SETTINGS, address_of, bearer_in
from keepstep.trust.certificates import CONTROLLER_NAME
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role

METHOD = "FindWeights"
PATH = f"/{SERVICE}/{METHOD}"
CALL_S = 5.0
"""How long one call may take."""
TELL_S = KEEP_S / 3
"""Interval at which a relay tells all other relays that a node has announced itself again."""
_STOPPED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


class WeightsDirectory:
    """The server's end of the call, in a controller or in one of its relays."""

    def __init__(
        self,
        who: Callable[[str], Claim],
        on_refused: Callable[[str, str], None],
        on_announced: Callable[[PublishingNode], None] = lambda node: None,
    ) -> None:
        """Args:
        who: returns the claim of a token; raises `TokenRefused`.
        on_refused: called with the address of each refused caller, and the reason.
        on_announced: called with a node that announces itself: when its address changes, and every `TELL_S`.
        """
        self._who, self._on_refused, self._on_announced = who, on_refused, on_announced
        self.on_admitted: Callable[[str], None] = lambda address: None
        """Called with the address of each caller whose token is valid."""
        self._nodes = PublishingNodes()
        self._told: dict[str, tuple[str, float]] = {}

    def hear(self, node: PublishingNode) -> None:
        """Records a node that has announced itself to another relay. Ignores it if there are too many nodes."""
        with contextlib.suppress(RemoteProtocolError):
            self._nodes.seen(node, time.monotonic())

    @property
    def handler(self) -> Any:
        """The method handler for gRPC."""
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        now_s = time.monotonic()
        try:
            claim = self._who(bearer_in(context.invocation_metadata()))
            self.on_admitted(address_of(context.peer()))
            asked = decode_question(request)
            if asked.address is not None:
                if claim.role is not Role.PUBLISHER:
                    raise TokenRefused(f"the token of {claim.role} {claim.name!r} is not good for publishing")
                node = PublishingNode(claim.name, asked.address)
                self._nodes.seen(node, now_s)
                address, at_s = self._told.get(node.name, ("", 0.0))
                if address != node.address or now_s >= at_s + TELL_S:
                    self._told[node.name] = node.address, now_s
                    self._on_announced(node)
        except (TokenRefused, RemoteProtocolError) as error:
            is_stranger = isinstance(error, TokenRefused)
            self._on_refused(address_of(context.peer()), str(error))
            status = grpc.StatusCode.UNAUTHENTICATED if is_stranger else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(status, str(error))
        return encode(self._nodes.present(now_s))


class DirectoryCaller:
    """The client's end of the call. Not thread-safe."""

    def __init__(
        self, endpoints: Sequence[str], credentials: Credentials, host_name: str | None = CONTROLLER_NAME
    ) -> None:
        """Args:
        endpoints: HOST:PORT of each possible controller.
        credentials: credentials of this node, for the role of a publisher or receiver.
        host_name: host name in the controller's certificate; None: the certificate contains its address.
        """
        self._credentials = credentials
        self._endpoints = tuple(endpoints)
        self._channels = [self._channel(endpoint, host_name) for endpoint in endpoints]

    def find(self, own_address: str | None) -> tuple[PublishingNode, ...]:
        """Asks the controllers in turn, and returns the nodes that publish weights, from the first that answers.

        Args:
            own_address: the address to announce for this node; None: it only asks.

        Raises:
            TokenRefused: the controller refuses the token, for example because it is of another job.
            PeerLost: no controller answers within `CALL_S`.
            RemoteProtocolError: the answer is invalid, or the server refuses the call for another reason.
        """
        trouble = ""
        for endpoint, channel in zip(self._endpoints, self._channels, strict=True):
            metadata = ((AUTHORIZATION, BEARER + self._credentials.token),)
            call: Any = channel.unary_unary(PATH)
            try:
                return decode_answer(call(encode(WeightsAsked(own_address)), timeout=CALL_S, metadata=metadata))
            except grpc.RpcError as error:
                status, details = error.code(), error.details()
            if status is grpc.StatusCode.UNAUTHENTICATED:
                raise TokenRefused(f"the controller at {endpoint} refuses: {details}")
            if status not in _STOPPED:
                raise RemoteProtocolError(f"the controller at {endpoint} refuses: {details}")
            trouble = f"{endpoint}: {details}"
        raise PeerLost(f"no controller answers; {trouble}")

    def close(self) -> None:
        """Closes all connections."""
        for channel in self._channels:
            channel.close()

    def _channel(self, endpoint: str, host_name: str | None) -> grpc.Channel:
        settings: list[tuple[str, int | str]] = [*SETTINGS, ("grpc.use_local_subchannel_pool", 1)]
        authority = self._credentials.authority
        if authority is None:
            return grpc.insecure_channel(endpoint, settings)
        if host_name is not None:
            settings.append(("grpc.ssl_target_name_override", host_name))
        return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(authority), settings)
