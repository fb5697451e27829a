"""Buckets over NIXL, NVIDIA's library for RDMA: the receiving node reads them from the sending node's memory.

Each end registers its node's buffer once. The sender offers a bucket in a message on the link. The receiver reads the
bucket into a slot of its own with a one-sided RDMA read, in which the sender's Python takes no part. Then it confirms
the read in another message. So only the node itself writes into its buffer, a bucket is complete when its read has
ended, and slots provide flow control, as with TCP. The ends exchange only NIXL's own metadata, addresses and lengths.

NIXL uses UCX over InfiniBand or RoCE. UCX has no authentication: docs/WEIGHTS.md describes the consequences.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import secrets
import threading
import time
from types import ModuleType
from typing import Any

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.weights.channels.connection import ConnectionEnded, ConnectionLost, ConnectionStalled
from keepstep.weights.memory.buffers import SlotBuffer, SlotPart
from keepstep.weights.remote.link import SILENCE_SHARE, Bring, NodeLink
from keepstep.weights.remote.messages import AnyLinkMessage, BucketOffered, BucketRead, MemoryShared
from keepstep.weights.remote.switch import BucketInSlot

BACKEND = "UCX"
UCX_CONFIG = "TLS=^tcp"
"""Excludes UCX's TCP transport, unless the variable UCX_TLS overrides it. Over TCP, UCX emulates RDMA and opens a port
without authentication, through which any memory of the process can be written."""
PROGRESS_US = 10_000
"""The longest sleep of NIXL's thread on the sender, in microseconds. Events wake it up. With 0, the default of NIXL's
Python API, it would busy-wait as long as the link is open."""
LOOK_S = 5e-5
"""Polling interval for the end of a read, because NIXL has no blocking wait. 4 MiB take 0.1 ms at 40 GB/s."""


def load_nixl() -> ModuleType:
    """Imports NIXL.

    Raises:
        ConfigurationError: NIXL is not installed, or not for this machine.
    """
    try:
        import nixl
    except ImportError as error:
        raise ConfigurationError(
            f"transport 'nixl': NIXL cannot be imported ({error}); install it with: pip install 'keepstep[nixl]'"
        ) from None
    found: ModuleType = nixl
    return found


def check_nixl() -> None:
    """Checks that NIXL works on this machine. This takes half a second.

    Raises:
        ConfigurationError: NIXL does not work.
    """
    RegisteredMemory("no peer", is_read_by_others=False).close()


class NixlTransport:
    """See `keepstep.weights.remote.link.BucketTransport`."""

    def __init__(self, num_parallel: int) -> None:
        """``num_parallel``: how many buckets are read at a time."""
        self._num_parallel = num_parallel
        self._link: NodeLink | None = None
        self._memory: RegisteredMemory | None = None
        self._bring: Bring | None = None
        self._offers: queue.SimpleQueue[BucketOffered | None] = queue.SimpleQueue()
        self._offered: dict[int, BucketInSlot] = {}
        self._numbers = itertools.count(1)

    def start(self, link: NodeLink, bring: Bring | None) -> None:
        """See `BucketTransport`."""
        self._link, self._bring = link, bring
        self._memory = RegisteredMemory(link.who, is_read_by_others=bring is None)
        if bring is not None:
            for _ in range(self._num_parallel):
                link.run("keepstep-nixl", functools.partial(self._receive_buckets, link, self._memory, bring))

    def ship(self, bucket: BucketInSlot, num_messages: int) -> None:
        """See `BucketTransport`. Registers the bucket's buffer the first time."""
        link, memory, part = self._link, self._memory, bucket.part
        assert link is not None, "it has not been started"
        assert memory is not None, "it has not been started"
        if memory.register(part.buffer):
            link.send(MemoryShared(memory.description()))
        number = next(self._numbers)
        self._offered[number] = bucket
        link.send(BucketOffered(number, bucket.update, bucket.bucket, part.address, part.num_bytes))

    def hear(self, message: AnyLinkMessage) -> bool:
        """See `BucketTransport`."""
        match message:
            case MemoryShared(description) if self._bring is not None and self._memory is not None:
                self._memory.know(description)
            case BucketOffered() if self._bring is not None:
                self._offers.put(message)
            case BucketRead(number) if self._bring is None:
                if (bucket := self._offered.pop(number, None)) is None:
                    raise RemoteProtocolError(f"has read bucket {number}, which was not offered")
                bucket.release()
            case _:
                return False
        return True

    def end(self) -> None:
        """See `BucketTransport`."""
        for _ in range(self._num_parallel):
            self._offers.put(None)
        offered, self._offered = self._offered, {}
        for bucket in list(offered.values()):
            bucket.release()

    def close(self) -> None:
        """See `BucketTransport`."""
        if self._memory is not None:
            self._memory.close()

    def _receive_buckets(self, link: NodeLink, memory: RegisteredMemory, bring: Bring) -> None:
        def fill(offer: BucketOffered, part: SlotPart | None) -> None:
            if part is not None:
                began_s = time.monotonic()
                memory.read(part, offer.address, began_s + SILENCE_SHARE * link.deadline_s, link.lost)
                link.rate.came(part.num_bytes, began_s, time.monotonic())
            link.send(BucketRead(offer.number))

        while (offer := self._offers.get()) is not None:
            bring(offer.update, offer.bucket, offer.num_bytes, functools.partial(fill, offer))


class RegisteredMemory:
    """One end of a link in NIXL: registered local memory, and the memory of the other end. Any thread."""

    def __init__(self, who: str, *, is_read_by_others: bool) -> None:
        """Args:
        who: name of the peer, for messages.
        is_read_by_others: whether the peer reads this end's memory; otherwise this end reads the peer's.

        Raises:
            ConfigurationError: NIXL does not work on this machine.
        """
        self._who, self._nixl = who, load_nixl()
        self._errors = tuple(each for name, each in vars(self._nixl).items() if name.endswith("Error"))
        self._turn = threading.Condition()
        """Serializes the calls of NIXL."""
        self._buffers: dict[SlotBuffer, tuple[Any, Any]] = {}
        """Buffer -> (its registration, the callback that the buffer runs when it is closed)."""
        self._peer: str | None = None
        self._num_reads = 0
        """Number of running reads."""
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = is_read_by_others  # a reader makes progress whenever it looks
        config.pthrDelay = PROGRESS_US
        try:
            self._agent: Any = self._nixl.nixlAgent(secrets.token_hex(8), config)
            self._agent.createBackend(BACKEND, {"engine_config": UCX_CONFIG})
        except (RuntimeError, *self._errors) as error:
            raise ConfigurationError(
                f"transport 'nixl': {BACKEND} finds no network that it can use ({error}); it leaves TCP out unless the "
                "variable UCX_TLS names it, and with UCX_LOG_LEVEL=info it says more"
            ) from None

    def register(self, buffer: SlotBuffer) -> bool:
        """Registers a buffer with NIXL, for reads from and into it, until the buffer is closed.

        Returns:
            whether the buffer was not registered before.

        Raises:
            ConfigurationError: NIXL cannot register the memory.
        """
        with self._turn:
            if buffer in self._buffers or self._agent is None:
                return False
            memory = [(buffer.address(0), buffer.num_bytes, 0, "")]
            registered = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, memory)
            try:
                self._agent.registerMem(registered)
            except self._errors as error:
                size = f"{buffer.num_bytes >> 20} MiB"
                raise ConfigurationError(f"transport 'nixl': {size} cannot be registered ({error})") from None
            forget = functools.partial(self._forget, buffer)
            buffer.at_close.append(forget)
            self._buffers[buffer] = registered, forget
            return True

    def description(self) -> bytes:
        """Metadata of this end and its registered memory, for `know` on the other end. Raises as `register`."""
        with self._turn:
            try:
                described: bytes = self._agent.getLocalMD()
            except self._errors as error:
                raise ConfigurationError(f"transport 'nixl': memory cannot be described ({error})") from None
            return described

    def know(self, description: bytes) -> None:
        """Loads the `description` of the other end's registered memory. Waits for running reads first.

        Raises:
            RemoteProtocolError: ``description`` is not valid metadata of NIXL.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._num_reads)
            if self._agent is None:
                return
            try:
                if self._peer is not None:
                    self._agent.invalidateRemoteMD(self._peer)
                self._peer = self._agent.loadRemoteMD(description).decode()
            except (*self._errors, UnicodeDecodeError) as error:
                raise RemoteProtocolError(f"describes its memory in another way ({error})") from None

    def read(self, part: SlotPart, address: int, until_s: float, stop: threading.Event) -> None:
        """Reads from the other end's memory into a local slot.

        Args:
            part: the destination; its size is the number of bytes to read.
            address: address of the source in the other process.
            until_s: deadline on the monotonic clock.
            stop: set when the link is lost.

        Raises:
            ConnectionEnded, ConnectionStalled: the read failed. NIXL does not write into the slot any more.
        """
        self.register(part.buffer)
        request = self._begin(part, address)
        try:
            while not self._has_ended(request):
                if stop.wait(LOOK_S):
                    raise ConnectionEnded(self._who, "was left")
                if time.monotonic() >= until_s:
                    raise ConnectionStalled(self._who, "does not let a bucket be read")
        except ConnectionLost:
            self.close()  # NIXL has no other way to cancel a running read
            raise
        finally:
            with self._turn:
                self._num_reads -= 1
                self._turn.notify_all()

    def close(self) -> None:
        """Deregisters all memory. Running reads fail. May be called several times."""
        with self._turn:
            agent, self._agent = self._agent, None
            buffers, self._buffers = self._buffers, {}
            for buffer, (registered, forget) in buffers.items():
                buffer.at_close.remove(forget)
                if agent is not None and not self._num_reads:  # else it ends with the agent
                    self._take_back(agent, registered)
            del agent

    def _forget(self, buffer: SlotBuffer) -> None:
        """Deregisters a buffer that is about to be closed."""
        with self._turn:
            self._turn.wait_for(lambda: not self._num_reads)
            registered, forget = self._buffers.pop(buffer, (None, None))
            if registered is not None:
                buffer.at_close.remove(forget)
                self._take_back(self._agent, registered)

    def _take_back(self, agent: Any, registered: Any) -> None:
        with contextlib.suppress(*self._errors):  # its link may have broken; what is left ends with the agent
            agent.deregisterMem(registered)

    def _begin(self, part: SlotPart, address: int) -> int:
        with self._turn:
            try:
                to, source = (
                    self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(where, part.num_bytes, 0)])
                    for where in (part.address, address)
                )
                agent = self._open()
                request: int = agent.createXferReq(self._nixl.NIXL_READ, to, source, self._peer or "")
                agent.postXferReq(request)
            except self._errors as error:
                raise ConnectionEnded(self._who, f"lets no bucket be read over NIXL ({error})") from None
            self._num_reads += 1
            return request

    def _has_ended(self, request: int) -> bool:
        with self._turn:
            agent = self._open()
            try:
                if agent.getXferStatus(request) == self._nixl.NIXL_IN_PROG:
                    return False
                agent.releaseXferReq(request)
            except self._errors as error:
                raise ConnectionEnded(self._who, f"lets no bucket be read over NIXL ({error})") from None
            return True

    def _open(self) -> Any:
        if self._agent is None:
            raise ConnectionEnded(self._who, "was left")
        return self._agent
