"""Hugging Face Transformers' ``generate`` as an engine: each answer is made with one whole version, and names it."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers import Cache, PreTrainedModel

from keepstep.errors import UsageError
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
    """A Transformers model whose weights come from a training job. Several threads may call `generate` concurrently.

    The engine switches to a new version between answers. The new version waits for running answers to complete, and
    calls of `generate` wait for the switch. Before the first version `generate` returns no answer.
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
        model: a model with the published names and shapes. The caller owns it; the engine puts it into eval mode. The
            engine allocates the size of its weights once more, for the next version.
        folder, device, name, deadline_s: see `keepstep.Subscriber`. If an answer takes longer than the deadline, the
            version that waits for it fails, and the engine continues with a later one.
        """
        self.model = model.eval()
        self._caches: weakref.WeakKeyDictionary[Cache, int] = weakref.WeakKeyDictionary()
        """Cache of keys and values -> the version that has filled it."""
        self.subscriber = Subscriber(folder, into=model, device=device, name=name, deadline_s=deadline_s)
        """The subscriber: its current version, its condition, and the error of the latest failed version."""

    def start(self) -> Self:
        """Starts a thread that receives versions until `close`."""
        self.subscriber.start()
        return self

    def generate(self, *arguments: Any, version: int | None = None, **options: Any) -> Generated:
        """Calls the model's ``generate``. All tokens come from the same version of the weights.

        A `transformers.Cache` of keys and values is used by answers of one version only.

        Args:
            arguments, options: for ``generate``. A streamer gets tokens of this version only.
            version: wait for exactly this version; by default, use the newest.

        Raises:
            WeightsNotReady: there was no version, or not the requested one, within the deadline.
            UsageError: a cache that was passed holds keys and values of another version.
            Exception: any exception that ``generate`` raises.
        """
        with self.subscriber.using(version=version) as present, torch.inference_mode():
            given = _caches_in((*arguments, *options.values()))
            for cache in given:
                self._check_cache(cache, present)
            output = self.model.generate(*arguments, **options)
            returned = _caches_in(output.values()) if isinstance(output, dict) else []
            self._caches.update(dict.fromkeys((*given, *returned), present))
            return Generated(present, output)

    def _check_cache(self, cache: Cache, version: int) -> None:
        of = self._caches.get(cache)
        if cache.get_seq_length() and of != version:
            known = "an unknown version" if of is None else f"version {of}"
            raise UsageError(f"the cache holds keys and values of {known}, and the weights are version {version}")

    def close(self) -> None:
        """Disconnects from the publisher. The model keeps its weights."""
        self.subscriber.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _caches_in(values: Iterable[Any]) -> list[Cache]:
    return [each for each in values if isinstance(each, Cache)]
