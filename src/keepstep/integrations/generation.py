"""Hugging Face Transformers' ``generate`` as an engine: each answer is made with one whole version, and names it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from keepstep.weights.subscriber import DEFAULT_DEADLINE_S, Subscriber


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """An answer.

    Attributes:
        version: of the weights that made all of it.
        output: what the model's ``generate`` returned.
    """

    version: int
    output: Any


class GenerationEngine:
    """A model of Transformers whose weights come from a training job. Any thread may ask it, several at the same time.

    Versions take each other's place between answers: a new one waits until those under way are complete, and answers
    that are asked for meanwhile wait for it. Before the first version there is no answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | Path,
        *,
        device: int = 0,
        name: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Args:
        model: of the shape that is published, under the same names; it stays the caller's, and is put into eval
            mode. As much memory as it has is taken again, for the next version.
        folder, device, name, deadline_s: see `keepstep.Subscriber`. An answer that takes longer than the deadline
            makes the version that waits for it fail; the next one comes.
        """
        self.model = model.eval()
        self.subscriber = Subscriber(folder, into=model, device=device, name=name, deadline_s=deadline_s)
        """For its version, its condition, and why the latest version did not come."""

    def start(self) -> Self:
        """Attends to the publisher in a thread, until `close`."""
        self.subscriber.start()
        return self

    def generate(self, *arguments: Any, version: int | None = None, **options: Any) -> Generated:
        """As the model's ``generate``, with one version from the first token to the last.

        Args:
            arguments, options: for ``generate``. A streamer gets tokens of this version only.
            version: waits for exactly this one; by default the newest.

        Raises:
            WeightsNotReady: no version is there, or not the one that was asked for, within the deadline.
            Exception: what ``generate`` raises.
        """
        with self.subscriber.using(version=version) as present, torch.inference_mode():
            return Generated(present, self.model.generate(*arguments, **options))

    def close(self) -> None:
        """Leaves the publisher. The model keeps its weights."""
        self.subscriber.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
