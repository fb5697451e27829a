"""vLLM takes versions from keepstep: a backend of its weight transfer, for an unmodified vLLM.

``WeightTransferConfig(backend="keepstep")`` selects it; vLLM finds it by the entry point ``vllm.general_plugins``. Each
worker has a subscriber, which receives versions into host memory while the engine generates. vLLM's four phases only
agree on one of them and load it::

    trainer                                              each worker of the engine
    init    init_weight_transfer_engine(tensors)  ─────► attaches to the publisher
    start   start_weight_update()                 ─────►
            publisher.publish(version)            ═════► bytes, checksums: into its copy in host memory
    update  update_weights(version)               ─────► has it whole, or raises
            update_weights(version, use=True)     ─────► all workers have it: notes that
    finish  finish_weight_update()                ─────► loads it into the model, if that was noted

Until `finish` nothing writes to the model, so a session that fails in any phase before leaves the engine at its version
and ready for the next session.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from keepstep.errors import ConfigurationError, KeepstepError, UsageError
from keepstep.weights.publisher import Publisher
from keepstep.weights.subscriber import DEFAULT_DEADLINE_S, Subscriber

BACKEND = "keepstep"
_ENGINES = itertools.count(1)
"""One process may have several workers, and a subscriber takes the place of another one of its name."""


def register() -> None:
    """Makes the backend known to vLLM in this process. vLLM calls it; a trainer gets it by importing this module."""
    with contextlib.suppress(ValueError):  # it is known already: vLLM may load its plugins several times
        WeightTransferEngineFactory.register_engine(BACKEND, KeepstepWeightTransferEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, KeepstepTrainerEngine)


@contextlib.contextmanager
def drained(url: str, timeout_s: float = 300.0) -> Iterator[None]:
    """A vLLM server that computes no request inside the block: those under way are finished, new ones are refused.

    Args:
        url: of a server with vLLM's routes for reinforcement learning, such as ``http://127.0.0.1:8000``.
        timeout_s: for the requests under way.

    Raises:
        OSError: the server did not answer in time.
    """

    def post(path: str) -> None:
        request = urllib.request.Request(f"{url.rstrip('/')}/{path}", method="POST")
        urllib.request.urlopen(request, timeout=timeout_s).close()

    try:
        post("pause?mode=wait")
        yield
    finally:
        post("resume")


# ---- in the engine -------------------------------------------------------------------------------------------------


@dataclass
class KeepstepInitInfo(WeightTransferInitInfo):
    """How a worker finds the publisher.

    Attributes:
        folder, device: see `keepstep.Subscriber`.
        tensors: name, dtype (``bfloat16``) and shape of each whole tensor that is published.
        deadline_s: how long a version may show nothing.
    """

    folder: str
    tensors: list[tuple[str, str, list[int]]]
    device: int = 0
    deadline_s: float = DEFAULT_DEADLINE_S


@dataclass
class KeepstepUpdateInfo(WeightTransferUpdateInfo):
    """What a worker is asked for.

    Attributes:
        version: has to be there, whole.
        use: every worker has it: the end of this session loads it.
    """

    version: int
    use: bool = False


class KeepstepWeightTransferEngine(WeightTransferEngine[KeepstepInitInfo, KeepstepUpdateInfo]):
    """A worker's side. It holds one copy of the whole weights in host memory."""

    init_info_cls = KeepstepInitInfo
    update_info_cls = KeepstepUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        """See vLLM."""
        super().__init__(config, vllm_config, device, model)
        self._subscriber: Subscriber | None = None
        self._received: dict[str, torch.Tensor] = {}
        self._deadline_s = DEFAULT_DEADLINE_S
        self._agreed: int | None = None

    def init_transfer_engine(self, init_info: KeepstepInitInfo) -> None:
        """Attaches to the publisher, in the place of one to which it was attached before.

        Raises:
            ConfigurationError: a dtype that torch does not have.
        """
        self.shutdown()
        for name, dtype, _shape in init_info.tensors:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ConfigurationError(f"'{name}' is of dtype {dtype!r}, which this torch does not have")
        self._received = {n: torch.empty(shape, dtype=getattr(torch, d)) for n, d, shape in init_info.tensors}
        self._deadline_s = init_info.deadline_s
        self._subscriber = Subscriber(
            init_info.folder,
            into=self._received,
            atomic=False,  # the model is the other copy
            device=init_info.device,
            name=f"vLLM worker, process {os.getpid()}, its engine {next(_ENGINES)}",
            deadline_s=init_info.deadline_s,
        )
        self._subscriber.start()

    def start_weight_update(self) -> None:
        """A session begins. Nothing happens to the model."""
        self._agreed = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in vLLM, but without waiting for the device: nothing is copied to it yet."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: KeepstepUpdateInfo) -> None:
        """Waits until the version is there.

        Raises:
            UsageError: before `init_transfer_engine`.
            KeepstepError: it did not come, and why. The model is as it was.
        """
        if self._subscriber is None:
            raise UsageError("update_weights before init_weight_transfer_engine: no publisher is known")
        try:
            with self._subscriber.using(self._deadline_s, version=update_info.version) as version:
                self._agreed = version if update_info.use else None
        except KeepstepError as error:
            raise self._subscriber.last_error or error from None

    def finish_weight_update(self) -> None:
        """Loads the version that all workers have. Of a session that came to none, nothing.

        Raises:
            KeepstepError: the publisher has begun to write another version over it. The model is as it was.
            Exception: what the model's ``load_weights`` raises. The model may hold parts of the version, until a whole
                one has been loaded.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        agreed, self._agreed = self._agreed, None
        if agreed is None or self._subscriber is None:
            return
        with self._subscriber.using(self._deadline_s, version=agreed):
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(iter(self._received.items()))
            finally:  # gives the model its tensors back, also where loading has failed
                finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # before the copy may be overwritten

    def shutdown(self) -> None:
        """Leaves the publisher. The model stays as it is."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None


# ---- in the trainer ------------------------------------------------------------------------------------------------


@dataclass
class KeepstepTrainerInfo(TrainerInitInfo):
    """A trainer rank's part.

    Attributes:
        publisher: of this rank, which all ranks have; it stays the caller's.
        folder: that of the publisher, as the engine's machine sees it.
        draining: around the moment in which the engine changes its weights: `drained`, with the server's address.
            Without it, vLLM goes on with requests under way, which then see two versions.
    """

    backend: ClassVar[str] = BACKEND
    publisher: Publisher
    folder: str
    draining: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


class KeepstepTrainerEngine(TrainerWeightTransferEngine[KeepstepTrainerInfo]):
    """A trainer rank's side: rank 0 goes through the phases, and all ranks publish."""

    init_info_cls = KeepstepTrainerInfo

    def __init__(self, info: KeepstepTrainerInfo, client: VLLMWeightSyncClient) -> None:
        """See `trainer_init`."""
        super().__init__(client=client, is_sender=info.is_sender, rank=info.rank)
        self._info = info
        self.version = 0
        """The last that was sent, or tried."""

    @classmethod
    def trainer_init(
        cls, init_info: KeepstepTrainerInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Has the engine attach to the publishers.

        Args:
            init_info: this rank's part.
            client: the engine's.
            source: whose metadata say which tensors the engine loads, under the names that its model knows.

        Raises:
            ConfigurationError: no source was given.
        """
        if source is None:
            raise ConfigurationError("keepstep needs a source: its metadata are the tensors that vLLM loads")
        engine = cls(init_info, client)
        if engine.is_sender:
            tensors = [[each.name, str(each.dtype).removeprefix("torch."), [*each.shape]] for each in source.metadata]
            client.init_weight_transfer_engine({"folder": init_info.folder, "tensors": tensors})
        return engine

    def send_weights(self, version: int | None = None) -> None:
        """Publishes a version, on all ranks, and on rank 0 has the engine change to it.

        Args:
            version: its number; by default one more than the last.

        Raises:
            KeepstepError: it was not published. The engine has kept its version, and the next call works.
            Exception: what the client raises where a worker does not have the version; the same holds.
        """
        self.version = self.version + 1 if version is None else version
        if not self.is_sender:
            self._info.publisher.publish(self.version)
            return
        self.client.start_weight_update()
        try:
            published = self._info.publisher.publish(self.version)
            if published.failures:
                raise published.failures[0]
            self.client.update_weights({"version": self.version})
            with self._info.draining():
                self.client.update_weights({"version": self.version, "use": True})
                self.client.finish_weight_update(str(self.version))
        except BaseException:  # also where the caller is interrupted: no session stays open
            with contextlib.suppress(Exception):  # the client's; workers whose session has ended refuse
                self.client.finish_weight_update()
            raise


register()
