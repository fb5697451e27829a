"""Several adapters as one: each is told everything, in its order."""

from keepstep.worker.parallel.composed import Composed
from keepstep.worker.parallel.layout import Replicated

CALLS = ("at_rest", "hand_out", "begin_step", "before_barrier", "undo", "new_generation", "restored")


class Noting(Replicated):
    """Notes what it is told."""

    def __init__(self, name: str, told: list[str], is_sharded: bool) -> None:
        self._name, self._told, self._is_sharded = name, told, is_sharded

    @property
    def is_sharded(self) -> bool:
        return self._is_sharded

    def at_rest(self) -> None:
        self._told.append(f"{self._name} at_rest")

    def hand_out(self) -> None:
        self._told.append(f"{self._name} hand_out")

    def begin_step(self) -> None:
        self._told.append(f"{self._name} begin_step")

    def before_barrier(self) -> None:
        self._told.append(f"{self._name} before_barrier")

    def undo(self, *, in_backward: bool) -> None:
        self._told.append(f"{self._name} undo {in_backward}")

    def new_generation(self) -> None:
        self._told.append(f"{self._name} new_generation")

    def restored(self) -> None:
        self._told.append(f"{self._name} restored")


def test_each_adapter_is_told_everything_in_its_order() -> None:
    told: list[str] = []
    both = Composed([Noting("a", told, False), Noting("b", told, True)])
    for call in CALLS:
        getattr(both, call)(**({"in_backward": True} if call == "undo" else {}))
    spoken = [f"{call} True" if call == "undo" else call for call in CALLS]
    assert told == [f"{name} {call}" for call in spoken for name in "ab"]


def test_it_is_sharded_where_one_of_them_is() -> None:
    assert Composed([Noting("a", [], False), Noting("b", [], True)]).is_sharded
    assert not Composed([Noting("a", [], False)]).is_sharded
