"""The side of a vLLM worker: it receives versions, and loads one when the session says so."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from keepstep.engines.names import plain_names
from keepstep.errors import ConfigurationError, KeepstepError, LoadError, UsageError
from keepstep.integrations.vllm.reload import ModelReload
from keepstep.weights.subscriber import DEFAULT_DEADLINE_S, Subscriber

_ENGINES = itertools.count(1)
"""Numbers the engines in a process, to give each subscriber its own name: a new one of the same name replaces it."""


@dataclass
class KeepstepInitInfo(WeightTransferInitInfo):
    """The arguments of ``init_transfer_engine``: how a worker connects to the publisher.

    Attributes:
        folder, device: see `keepstep.Subscriber`.
        tensors: name, dtype (such as ``bfloat16``) and whole shape of each published tensor.
        part: whether they are only a part of the model: layers that get no weights then keep theirs.
        deadline_s: time without progress after which a version fails, in seconds.
    """

    folder: str
    tensors: list[tuple[str, str, list[int]]]
    device: int | None = None
    part: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S


@dataclass
class KeepstepUpdateInfo(WeightTransferUpdateInfo):
    """The arguments of ``update_weights``.

    Attributes:
        version: the version that the worker must have received completely. None: only checks that the model holds one
            whole version.
        use: True if every worker has the version: ``finish_weight_update`` then loads it.
    """

    version: int | None = None
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
        self._reload: ModelReload | None = None
        self._selected: contextlib.ExitStack | None = None
        """Keeps the selected version from being overwritten by a newer one."""
        self._is_torn = False
        """Whether the model holds parts of a version."""

    def init_transfer_engine(self, init_info: KeepstepInitInfo) -> None:
        """Attaches to a publisher. It first disconnects from the former one, if there is one.

        Raises:
            ConfigurationError: torch does not have one of the dtypes; or the model cannot load the tensors, or would
                not be complete with them. The message names them.
        """
        self.shutdown()
        for name, dtype, _shape in init_info.tensors:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ConfigurationError(f"'{name}' is of dtype {dtype!r}, which this torch does not have")
        received = {n: torch.empty(shape, dtype=getattr(torch, d)) for n, d, shape in init_info.tensors}
        plain = plain_names(received)
        self._reload = ModelReload(
            self.model, self.model_config, {plain[name]: tensor for name, tensor in received.items()},
            is_part=init_info.part, is_split=self.parallel_config.world_size > 1,
        )  # fmt: skip
        self._subscriber = Subscriber(
            init_info.folder,
            into=received,
            atomic=False,  # the model is the other copy
            device=init_info.device,
            name=f"vLLM worker, process {os.getpid()}, its engine {next(_ENGINES)}",
            deadline_s=init_info.deadline_s,
        )
        self._subscriber.start()

    def start_weight_update(self) -> None:
        """Begins a session. The model does not change."""
        self._unselect()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in vLLM, but without synchronizing the device: nothing is copied to it yet."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: KeepstepUpdateInfo) -> None:
        """Checks that the subscriber has received the version. It does not wait: the engine serves requests meanwhile.

        Raises:
            UsageError: `init_transfer_engine` was not called.
            LoadError: no version was requested, and the model holds parts of one.
            KeepstepError: the version is not here; with the reason. The model has not changed.
        """
        self._unselect()
        if update_info.version is None:
            if self._is_torn:
                raise LoadError("the model holds parts of a version: it is out of service until a whole one is loaded")
            return
        if self._subscriber is None:
            raise UsageError("update_weights before init_weight_transfer_engine: no publisher is known")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._subscriber.using(0.0, version=update_info.version))
            except KeepstepError as error:
                raise self._subscriber.last_error or error from None
            if update_info.use:
                self._selected = stack.pop_all()

    def finish_weight_update(self) -> None:
        """Loads the version that all workers have. Does nothing if the session selected no version.

        Raises:
            Exception: any exception that the model's ``load_weights`` raises. The model may then hold parts of the
                version until a later load succeeds.
        """
        if self._selected is None or self._reload is None:
            return
        try:
            self._is_torn = True
            self._reload.load()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # before the copy may be overwritten
            self._is_torn = False
        finally:
            self._unselect()

    def shutdown(self) -> None:
        """Disconnects from the publisher. The model does not change."""
        self._unselect()
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _unselect(self) -> None:
        if self._selected is not None:
            self._selected.close()
            self._selected = None
