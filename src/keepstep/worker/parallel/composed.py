"""Several adapters as one, for a model that is parallelised in several ways at once."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.worker.parallel.layout import ParallelLayout, Replicated


class Composed(Replicated):
    """Calls its adapters in their order: those of outer wrappers come first."""

    def __init__(self, adapters: Sequence[ParallelLayout]) -> None:
        self._adapters = adapters

    @property
    def is_sharded(self) -> bool:
        """Whether any of the adapters is sharded."""
        return any(adapter.is_sharded for adapter in self._adapters)

    def at_rest(self) -> None:
        """Calls each adapter."""
        for adapter in self._adapters:
            adapter.at_rest()

    def hand_out(self) -> None:
        """Calls each adapter."""
        for adapter in self._adapters:
            adapter.hand_out()

    def begin_step(self) -> None:
        """Calls each adapter."""
        for adapter in self._adapters:
            adapter.begin_step()

    def before_barrier(self) -> None:
        """Calls each adapter."""
        for adapter in self._adapters:
            adapter.before_barrier()

    def undo(self, *, in_backward: bool) -> None:
        """Calls each adapter."""
        for adapter in self._adapters:
            adapter.undo(in_backward=in_backward)

    def new_generation(self) -> None:
        """Calls each adapter."""
        for adapter in self._adapters:
            adapter.new_generation()

    def restored(self) -> None:
        """Calls each adapter."""
        for adapter in self._adapters:
            adapter.restored()
