"""The one kernel that SGLang imports. Torch computes instead of it."""

from __future__ import annotations

from typing import NoReturn


def rotary_embedding(*_arguments: object, **_named: object) -> NoReturn:
    """Raises."""
    raise NotImplementedError("rotary_embedding is a stand-in: this test has no kernels of vLLM")
