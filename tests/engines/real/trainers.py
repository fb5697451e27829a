"""Trainers that send versions to vLLM servers. As a script: one that kills itself in the middle of a change.

``trainers.py URL CHECKPOINT FOLDER METHOD before|during|after``
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines.real.asking import Versions
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

import keepstep
from keepstep.engines.vllm import VLLMServer
from keepstep.integrations.vllm import KeepstepTrainerInfo

DURING_S = 0.003
"""How long a call lasts before the trainer dies in it."""


@contextlib.contextmanager
def trainer_of(
    url: str, weights: Any, folder: Path, *, source: Any = None, copies: bool = True, **options: Any
) -> Iterator[Any]:
    """A trainer, through vLLM's own interface for them.

    Args:
        url: the server's.
        weights: a module, or tensors by name.
        folder: the publisher's.
        source: what tells the tensors to vLLM, if the weights are no module.
        copies: see `keepstep.Publisher`.
        options: more fields of `KeepstepTrainerInfo`.
    """
    with contextlib.closing(keepstep.Publisher(folder, weights, copies=copies)) as publisher:
        trainer = WeightTransferTrainerFactory.trainer_init(
            KeepstepTrainerInfo(publisher, str(folder), rank=0, **options),
            client=HTTPVLLMWeightSyncClient(url),
            source=ModuleSource(weights) if source is None else source,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(trainer.shutdown)
            yield trainer


def die(url: str, checkpoint: str, folder: str, method: str, when: str) -> None:
    """Sends version 1, and dies in a call of `VLLMServer` while it sends version 2."""
    versions = Versions(Path(checkpoint))
    usual = getattr(VLLMServer, method)

    def dying(*arguments: Any) -> None:
        if when == "during":
            threading.Timer(DURING_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if when != "before":
            usual(*arguments)
        if when == "during":  # the call was faster
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL)

    with trainer_of(url, versions.model, Path(folder)) as trainer:
        trainer.send_weights(versions.train())
        setattr(VLLMServer, method, dying)
        trainer.send_weights(versions.train())


if __name__ == "__main__":
    die(*sys.argv[1:])
