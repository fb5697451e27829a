"""A weight transfer backend for an unmodified vLLM.

``WeightTransferConfig(backend="keepstep")`` selects it; vLLM finds it through the entry point
``vllm.general_plugins``. Each worker has a subscriber, which receives versions into host memory while the engine
generates. vLLM's four phases only select one of these versions and load it::

    trainer, or `keepstep weights load`                  each worker of the engine
    init    init_weight_transfer_engine(tensors)  ─────► attaches to the publisher; checks what the model can load
    start   start_weight_update()                 ─────►
            publisher.publish(version)            ═════► bytes, checksums: into its copy in host memory
    update  update_weights(version)               ─────► has it whole, or raises
            pause: running requests are completed
            update_weights(version, use=True)     ─────► all workers have it: keeps it from being overwritten
    finish  finish_weight_update()                ─────► loads it into the model
            the caches are discarded; resume

No phase before `finish` writes to the model. If a session fails in such a phase, the engine keeps its version and is
ready for the next session.
"""

from __future__ import annotations

import contextlib

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from keepstep.integrations.vllm.trainer import BACKEND, KeepstepTrainerEngine, KeepstepTrainerInfo
from keepstep.integrations.vllm.worker import KeepstepInitInfo, KeepstepUpdateInfo, KeepstepWeightTransferEngine

__all__ = [
    "BACKEND",
    "KeepstepInitInfo",
    "KeepstepTrainerEngine",
    "KeepstepTrainerInfo",
    "KeepstepUpdateInfo",
    "KeepstepWeightTransferEngine",
    "register",
]


def register() -> None:
    """Registers the backend in this process. vLLM calls it; in a trainer, importing this module registers it."""
    with contextlib.suppress(ValueError):  # already registered: vLLM may load its plugins several times
        WeightTransferEngineFactory.register_engine(BACKEND, KeepstepWeightTransferEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, KeepstepTrainerEngine)


register()
