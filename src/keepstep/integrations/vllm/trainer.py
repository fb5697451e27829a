"""The side of a trainer: vLLM's own interface for trainers that send weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from keepstep.engines.names import plain_names
from keepstep.engines.server import NewVersion, Running
from keepstep.engines.updates import ServerUpdates
from keepstep.engines.vllm import VLLMServer
from keepstep.errors import ConfigurationError, LoadError
from keepstep.weights.publisher import Publisher

BACKEND = "keepstep"


@dataclass
class KeepstepTrainerInfo(TrainerInitInfo):
    """The arguments of a trainer rank.

    Attributes:
        publisher: the publisher of this rank; every rank has one. The caller owns it.
        folder: path of the publishers' folder on the engine's machine.
        servers: URLs of more servers, beside that of the client.
        running: what becomes of running requests when a version comes.
        part: whether the source is only a part of the model: layers that get no weights then keep theirs.
        draining: for a client that is not vLLM's HTTP client, and required there: a context manager around the change
            of weights. It must complete running requests and let no new ones begin, and at its end discard the caches.
    """

    backend: ClassVar[str] = BACKEND
    publisher: Publisher
    folder: str
    draining: Callable[[], AbstractContextManager[None]] | None = None
    servers: Sequence[str] = ()
    running: Running = Running.DRAIN
    part: bool = False


class KeepstepTrainerEngine(TrainerWeightTransferEngine[KeepstepTrainerInfo]):
    """The side of a trainer rank. All ranks publish; rank 0 also has the servers change to the version."""

    init_info_cls = KeepstepTrainerInfo

    def __init__(self, info: KeepstepTrainerInfo, client: VLLMWeightSyncClient, version: NewVersion) -> None:
        """See `trainer_init`.

        Args:
            version: a version without a number, with the tensors that will be published.
        """
        known = inspect.signature(TrainerWeightTransferEngine.__init__).parameters
        since_0_33: dict[str, Any] = {"rank": info.rank} if "rank" in known else {}
        super().__init__(client=client, is_sender=info.is_sender, **since_0_33)
        self._info, self._form = info, version
        self.version = 0
        """The last version that `send_weights` sent or tried to send."""
        self.updates: ServerUpdates | None = None
        """The servers, and which version each of them has. None on other ranks than 0, and with a client that is not
        vLLM's HTTP client."""
        self._other: _ClientServer | None = None

    @classmethod
    def trainer_init(
        cls, init_info: KeepstepTrainerInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Makes the engine attach to the publishers, and returns this rank's side.

        It first ends what an earlier trainer has left open in the servers.

        Args:
            init_info: the arguments of this rank.
            client: the client of the engine. The URL of an `HTTPVLLMWeightSyncClient` is one of the servers.
            source: a weight source whose metadata list the tensors that the engine loads, under its model's names, or
                under these in a wrapper such as DDP, FSDP or a compiled model.

        Raises:
            ConfigurationError: ``source`` is None, a name is that of an adapter, or ``draining`` is missing.
            LoadError: the engine cannot load the tensors; with its reason.
            KeepstepError: no server answers.
        """
        if source is None:
            raise ConfigurationError("keepstep needs a source: its metadata are the tensors that vLLM loads")
        metadata: Any = source.metadata  # a property in some releases, and a method in others
        tensors = tuple(
            (each.name, str(each.dtype).removeprefix("torch."), tuple(each.shape))
            for each in (metadata() if callable(metadata) else metadata)
        )
        plain_names(name for name, _dtype, _shape in tensors)
        engine = cls(init_info, client, NewVersion(0, init_info.folder, tensors))
        if engine.is_sender:
            engine._attach()
        return engine

    def _attach(self) -> None:
        info, client = self._info, self.client
        if isinstance(client, HTTPVLLMWeightSyncClient):
            urls = dict.fromkeys([client.base_url, *info.servers])
            servers = [
                VLLMServer(url, running=info.running, is_part=info.part, answer_s=client.timeout) for url in urls
            ]
            self.updates = ServerUpdates(servers)
            try:
                self.updates.prepare(self._form)
            except BaseException:  # also on KeyboardInterrupt: the watcher must end
                self.updates.close()
                raise
        elif info.draining is None or info.servers:
            raise ConfigurationError(
                f"a client of type {type(client).__name__} cannot complete running requests and discard caches: pass "
                "draining=..., which does, and no servers=...; or use vLLM's HTTPVLLMWeightSyncClient"
            )
        else:
            self._other = _ClientServer(client, info.draining, is_part=info.part)
            self._other.prepare(self._form)

    def send_weights(self, version: int | None = None) -> None:
        """Publishes a version. Every rank must call it; rank 0 also makes the servers change to the version.

        A server that does not get it keeps its version, is named in ``updates.failures``, and gets the newest version
        as soon as it can.

        Args:
            version: number of the version; by default the last one plus 1.

        Raises:
            KeepstepError: the version was not published, or no server has got it; with the engine's reason. The next
                call can succeed.
        """
        self.version = self.version + 1 if version is None else version
        published = self._info.publisher.publish(self.version)
        new = NewVersion(self.version, self._form.folder, self._form.tensors)
        if self.updates is not None:
            self.updates.bring(new)
        elif self._other is not None:
            if published.failures:
                raise published.failures[0]
            self._other.change(lambda: new)

    def shutdown(self) -> None:
        """Ends the threads that drive servers. They keep their version."""
        if self.updates is not None:
            self.updates.close()


class _ClientServer(VLLMServer):
    """An engine behind a client of the caller's, which has only the four methods of vLLM's protocol."""

    def __init__(
        self, client: VLLMWeightSyncClient, draining: Callable[[], AbstractContextManager[None]], *, is_part: bool
    ) -> None:
        super().__init__("http://client", is_part=is_part)
        self._client, self._draining = client, draining
        self._drained = contextlib.ExitStack()

    def label(self) -> str:
        return self._label or ""

    def initialize(self, init_info: dict[str, Any]) -> None:
        self._tell(self._client.init_weight_transfer_engine, init_info)

    def start_weight_update(self) -> None:
        self._tell(self._client.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._tell(self._client.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._tell(self._client.finish_weight_update, weight_version)

    def pause(self) -> None:
        self._drained.close()  # of a change that has failed
        self._drained.enter_context(self._draining())

    def resume(self) -> None:
        self._drained.close()  # which discards the caches

    def _tell(self, method: Callable[..., None], *arguments: object) -> None:
        try:
            method(*arguments)
        except Exception as error:  # a client may raise anything; its text is the engine's reason
            raise LoadError(f"{getattr(method, '__name__', method)}: {error}") from error
