"""A weight transfer backend for an unmodified vLLM.

``WeightTransferConfig(backend="keepstep")`` selects it; vLLM finds it through the entry point
``vllm.general_plugins``. Each worker has a subscriber, which receives versions into host memory while the engine
generates. vLLM's four phases only select one of these versions and load it::

    trainer                                              each worker of the engine
    init    init_weight_transfer_engine(tensors)  ─────► attaches to the publisher
    start   start_weight_update()                 ─────►
            publisher.publish(version)            ═════► bytes, checksums: into its copy in host memory
    update  update_weights(version)               ─────► has it whole, or raises
            update_weights(version, use=True)     ─────► all workers have it: notes that
    finish  finish_weight_update()                ─────► loads it into the model, if that was noted

No phase before `finish` writes to the model. If a session fails in such a phase, the engine keeps its version and is
ready for the next session.
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
"""Numbers the engines in a process, to give each subscriber its own name: a new one of the same name replaces it."""


def register() -> None:
    """Registers the backend in this process. vLLM calls it; in a trainer, importing this module registers it."""
    with contextlib.suppress(ValueError):  # already registered: vLLM may load its plugins several times
        WeightTransferEngineFactory.register_engine(BACKEND, KeepstepWeightTransferEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, KeepstepTrainerEngine)


@contextlib.contextmanager
def drained(url: str, timeout_s: float = 300.0) -> Iterator[None]:
    """Drains a vLLM server for the duration of the block: it completes running requests and refuses new ones.

    Args:
        url: base URL of a server with vLLM's routes for reinforcement learning, such as ``http://127.0.0.1:8000``.
        timeout_s: timeout for the server to complete the running requests, in seconds.

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
    """The arguments of ``init_transfer_engine``: how a worker connects to the publisher.

    Attributes:
        folder, device: see `keepstep.Subscriber`.
        tensors: name, dtype (such as ``bfloat16``) and whole shape of each published tensor.
        deadline_s: time without progress after which a version fails, in seconds.
    """

    folder: str
    tensors: list[tuple[str, str, list[int]]]
    device: int = 0
    deadline_s: float = DEFAULT_DEADLINE_S


@dataclass
class KeepstepUpdateInfo(WeightTransferUpdateInfo):
    """The arguments of ``update_weights``.

    Attributes:
        version: the version that the worker must have received completely.
        use: True if every worker has the version: ``finish_weight_update`` then loads it.
    """

    version: int
    use: bool = False


class KeepstepWeightTransferEngine(WeightTransferEngine[KeepstepInitInfo, KeepstepUpdateInfo]):
    """The side of a vLLM worker. It holds one copy of all published weights in host memory."""

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
        """Attaches to a publisher. It first disconnects from the former one, if there is one.

        Raises:
            ConfigurationError: torch does not have one of the dtypes.
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
        """Begins a session. The model does not change."""
        self._agreed = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in vLLM, but without synchronizing the device: nothing is copied to it yet."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: KeepstepUpdateInfo) -> None:
        """Waits until the subscriber has received the version.

        Raises:
            UsageError: `init_transfer_engine` was not called.
            KeepstepError: the version did not arrive; with the reason. The model has not changed.
        """
        if self._subscriber is None:
            raise UsageError("update_weights before init_weight_transfer_engine: no publisher is known")
        try:
            with self._subscriber.using(self._deadline_s, version=update_info.version) as version:
                self._agreed = version if update_info.use else None
        except KeepstepError as error:
            raise self._subscriber.last_error or error from None

    def finish_weight_update(self) -> None:
        """Loads the version that all workers have. Does nothing if the session selected no version.

        Raises:
            KeepstepError: the publisher has begun to overwrite this version with another. The model has not changed.
            Exception: any exception that the model's ``load_weights`` raises. The model may then hold parts of the
                version until a later load succeeds.
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
        """Disconnects from the publisher. The model does not change."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None


# ---- in the trainer ------------------------------------------------------------------------------------------------


@dataclass
class KeepstepTrainerInfo(TrainerInitInfo):
    """The arguments of a trainer rank.

    Attributes:
        publisher: the publisher of this rank; every rank has one. The caller owns it.
        folder: path of the publishers' folder on the engine's machine.
        draining: context manager around the change of weights, such as `drained` with the server's URL. Without it,
            vLLM continues running requests during the change, and their answers mix two versions.
    """

    backend: ClassVar[str] = BACKEND
    publisher: Publisher
    folder: str
    draining: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


class KeepstepTrainerEngine(TrainerWeightTransferEngine[KeepstepTrainerInfo]):
    """The side of a trainer rank. All ranks publish; rank 0 also runs the engine's phases."""

    init_info_cls = KeepstepTrainerInfo

    def __init__(self, info: KeepstepTrainerInfo, client: VLLMWeightSyncClient) -> None:
        """See `trainer_init`."""
        super().__init__(client=client, is_sender=info.is_sender, rank=info.rank)
        self._info = info
        self.version = 0
        """The last version that `send_weights` sent or tried to send."""

    @classmethod
    def trainer_init(
        cls, init_info: KeepstepTrainerInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Makes the engine attach to the publishers, and returns this rank's side.

        Args:
            init_info: the arguments of this rank.
            client: the client of the engine.
            source: a weight source whose metadata list the tensors that the engine loads, under its model's names.

        Raises:
            ConfigurationError: ``source`` is None.
        """
        if source is None:
            raise ConfigurationError("keepstep needs a source: its metadata are the tensors that vLLM loads")
        engine = cls(init_info, client)
        if engine.is_sender:
            tensors = [[each.name, str(each.dtype).removeprefix("torch."), [*each.shape]] for each in source.metadata]
            client.init_weight_transfer_engine({"folder": init_info.folder, "tensors": tensors})
        return engine

    def send_weights(self, version: int | None = None) -> None:
        """Publishes a version. Every rank must call it; rank 0 also makes the engine switch to the version.

        Args:
            version: number of the version; by default the last one plus 1.

        Raises:
            KeepstepError: the version was not published, or a consumer did not get it. The engine has kept its
                version; the next call can succeed.
            Exception: any exception of the client, such as when a worker does not have the version. The same holds,
                unless a worker's ``load_weights`` raised: its model may hold parts of the version.
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
        except BaseException:  # also on KeyboardInterrupt: no session must stay open
            with contextlib.suppress(Exception):  # from the client: workers whose session has ended refuse the call
                self.client.finish_weight_update()
            raise


register()
