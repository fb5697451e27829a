"""Missing values: the results of collectives that a failure interrupted.

Before the gradient barrier such a value does no harm: the step is undone. After it the step is completed, so the value
may permanently get into the state. Scripts reduce a loss for a log line there, which is harmless. Scripts also pass a
reduced metric to a scheduler there, which is not. `MissingValues` distinguishes the two by tracking the values:

* Tensors, by their storages: every operation that reads a missing one leaves missing ones (a ``TorchDispatchMode``),
  and so does one that has a collective inside it which is cut off, as those of DTensors have.
* Python numbers: ``.item()`` gives a `Missing`, which calculates, and prints as ``missing`` (a ``TorchFunctionMode``).

A copy is valid if no missing value was written into a protected tensor or host value, and no *decision* was based on
one: it was not compared, or turned into a bool or another plain number. The consequences of a decision cannot be known.
Uses that are not known to be harmless count as harmful.

It costs nothing until a collective is interrupted after the barrier: the modes are active from there to the next step.
"""

from __future__ import annotations

import linecache
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch_modes
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

TEXT = "missing"
_NOT_OF_THE_SCRIPT = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""The folders of torch and of keepstep: a line of the script lies in neither."""
_WIDTH = re.compile(r"^(?:.?[<>=^])?[ +-]?#?0?(\d+)?")
_SHOWS = frozenset({"__repr__", "__str__", "__format__"})
_READS = frozenset({"__float__", "__int__", "__bool__", "__index__", "__complex__", "__contains__", "__array__"})
_READS |= {"__dlpack__", "__reduce_ex__", "numpy", "data_ptr", "untyped_storage", "storage", "_typed_storage"}
"""Methods of a tensor by which its content leaves torch's sight."""


class MissingValues:
    """Follows missing values through one process. Used by the training thread, except for `announce`."""

    def __init__(self) -> None:
        self.protected: Callable[[], Iterable[torch.Tensor]] = tuple
        """Gives the tensors that no missing value may get into."""
        self._begin()

    def _begin(self) -> None:
        self._num_announced = self._num_adopted = 0
        self._storages: dict[int, torch.UntypedStorage] = {}
        """The storages that hold missing values, by identity; held, so that no identity is used again."""
        self._protected_storages: set[int] = set()
        self._harm: str | None = None
        self._modes: tuple[_Reads, _Flow] | None = None
        self._is_looking_away = False
        """While this class itself computes with tensors."""

    def announce(self) -> None:
        """A collective was cut off, and its value is missing. From any thread; `adopt` must follow."""
        self._num_announced += 1

    def adopt(self, received: Iterable[torch.Tensor], *, in_update: bool = False) -> None:
        """The script is about to get the tensors that a collective which was announced would have written.

        Numbers in them that have a NaN become one, so that what is printed or saved unseen is no plausible value.

        Args:
            received: the tensors.
            in_update: the collective is a part of a protected optimizer's ``step()``, so the update is not whole.
        """
        if self._num_adopted == self._num_announced:
            return  # it was announced before the last conclusion, which has counted it
        self._num_adopted += 1
        if in_update:
            self._harmed("an update")
        if torch._C._current_graph_task_id() != -1:
            self._harmed("a backward")
        if self._modes is None:
            self._protected_storages = {_identity(tensor) for tensor in self.protected()}
            self._modes = _Reads(self), _Flow(self)
            _push_below(*self._modes)
        for tensor in received:
            if self._mark(tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                with self._looking_away(), torch.no_grad():
                    tensor.detach().fill_(float("nan"))

    def conclude(self, host: Callable[[], Any]) -> str | None:
        """The script asks for the next step: nothing is followed any more.

        Args:
            host: gives the protected host values.

        Returns:
            None: the copy is whole; else what may have got a missing value, with the line of the script.
        """
        if self._num_adopted < self._num_announced:
            self._harmed("a collective that the script has not waited for")
        if self._modes is not None:
            held = tree_leaves(host())  # while tensors are still followed: it may give copies of them
            _remove(*self._modes)
            if any(isinstance(leaf, Missing) or self.is_missing(leaf) for leaf in held):
                self._harmed("protected host state")
        harm = self._harm
        self._begin()
        return harm

    # ---- what the modes tell ----------------------------------------------------------------------------------------

    def is_missing(self, value: object) -> bool:
        """Whether a tensor holds a missing value."""
        return isinstance(value, torch.Tensor) and not self._is_looking_away and _identity(value) in self._storages

    @property
    def num_adopted(self) -> int:
        """How many collectives `adopt` was told of since the last conclusion."""
        return self._num_adopted

    def flowed(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any, *, adopted: bool
    ) -> None:
        """An operation has run: what it has made or written out of missing values is missing.

        Args:
            operation, arguments, keywords, result: of the call.
            adopted: whether a collective was cut off inside it.
        """
        if not adopted and not any(self.is_missing(leaf) for leaf in tree_leaves((arguments, keywords))):
            return
        for leaf in (*tree_leaves(result), *_written(operation, arguments, keywords)):
            if isinstance(leaf, torch.Tensor):
                self._mark(leaf)
            elif leaf is not None:
                self.decided()
        if torch.Tag.dynamic_output_shape in operation.tags:
            self.decided()  # a shape tells something about the content

    def decided(self) -> None:
        """A missing value was turned into something that the script can act upon."""
        self._harmed("what the script has decided by it")

    def scalar(self, tensor: torch.Tensor) -> Missing:
        """What stands for the one element of a missing tensor."""
        with self._looking_away():
            return Missing(tensor.detach().item(), self.decided)

    def scalars(self, tensor: torch.Tensor) -> Any:
        """What stands for a missing tensor's ``tolist()``."""
        if tensor.dim() == 0:
            return self.scalar(tensor)
        with self._looking_away():
            parts = tensor.detach().unbind()
        return [self.scalars(part) for part in parts]

    def _mark(self, tensor: torch.Tensor) -> bool:
        """A tensor is missing from now on. False where it is a protected one, which is left alone."""
        identity = _identity(tensor)
        if identity in self._protected_storages:
            self._harmed("a protected tensor")
            return False
        self._storages[identity] = _storage(tensor)
        return True

    def _harmed(self, what: str) -> None:
        self._harm = self._harm or f"{what}, at {line_of_script()}"

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        self._is_looking_away = True
        try:
            yield
        finally:
            self._is_looking_away = False


class Missing(float):
    """A number that died with a rank. It is a NaN; calculating with it gives another, and it prints as ``missing``."""

    own: Any
    """What stood in its place on this rank. A script that has decided by it goes on with this."""

    def __new__(cls, own: Any, on_decision: Callable[[], None]) -> Missing:
        """Args:
        own: this rank's own value.
        on_decision: called when it is turned into a plain value, or compared.
        """
        number = super().__new__(cls, "nan")
        number.own, number._on_decision = own, on_decision
        return number

    _on_decision: Callable[[], None]

    def __repr__(self) -> str:
        return TEXT

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        width = _WIDTH.match(spec)
        return TEXT.rjust(int(width[1]) if width and width[1] else 0)

    def __deepcopy__(self, memo: object) -> Missing:
        return self

    def __reduce__(self) -> tuple[type[float], tuple[str]]:
        return float, ("nan",)


def _calculates(operation: Callable[..., Any]) -> Callable[..., Any]:
    def calculate(self: Missing, *others: Any) -> Any:
        try:
            own = operation(self.own, *map(_own, others))
        except (ArithmeticError, ValueError):
            own = float("nan")  # such as round() of one, or a division by zero
        if isinstance(own, int | float | complex):
            return Missing(own, self._on_decision)
        self._on_decision()  # an array, a tensor: its content is out of sight
        return own

    return calculate


def _decides(operation: Callable[..., Any]) -> Callable[..., Any]:
    def decide(self: Missing, *others: Any) -> Any:
        self._on_decision()
        return operation(self.own, *map(_own, others))

    return decide


def _own(value: Any) -> Any:
    return value.own if isinstance(value, Missing) else value


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda own, other: operation(other, own)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Missing, f"__{_name}__", _calculates(getattr(operator, _name)))
    setattr(Missing, f"__r{_name}__", _calculates(_reflected(getattr(operator, _name))))
for _name, _one in (("neg", operator.neg), ("pos", operator.pos), ("abs", abs), ("round", round)):
    setattr(Missing, f"__{_name}__", _calculates(_one))
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Missing, f"__{_name}__", _decides(getattr(operator, _name)))
for _name, _operation in {
    "bool": bool,
    "int": lambda own: 0 if own != own else int(own),
    "index": operator.index,
    "hash": hash,
    "float": lambda own: float("nan"),  # no plausible value
}.items():
    setattr(Missing, f"__{_name}__", _decides(_operation))


class _Reads(TorchFunctionMode):
    """Sees what the script calls on tensors: where a missing one becomes a Python value."""

    def __init__(self, values: MissingValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and self._values.is_missing(args[0]):
            name = getattr(func, "__name__", "")
            if name == "__format__" and args[0].dim() == 0:
                return format(self._values.scalar(args[0]), args[1])
            if name in _SHOWS:
                return f"tensor({TEXT})"
            if name == "item" and args[0].numel() == 1:
                return self._values.scalar(args[0])
            if name == "tolist":
                return self._values.scalars(args[0])
            if name in _READS:
                self._values.decided()
        return func(*args, **(kwargs or {}))


class _Flow(TorchDispatchMode):
    """Sees every operation that runs, also in a backward: where a missing tensor leaves its traces."""

    def __init__(self, values: MissingValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._values = values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        num_adopted = self._values.num_adopted
        result = func(*args, **(kwargs or {}))
        self._values.flowed(func, args, kwargs or {}, result, adopted=self._values.num_adopted > num_adopted)
        return result


def line_of_script() -> str:
    """The innermost line on the stack that is neither torch's nor keepstep's own, as ``file:number: text``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_NOT_OF_THE_SCRIPT, "<")):
        frame = frame.f_back
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{number}: {linecache.getline(name, number).strip()}"


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Its memory: of a tensor around another one, such as a DTensor, the inner one's."""
    inner: Any = tensor
    while is_traceable_wrapper_subclass(inner):
        inner = getattr(inner, inner.__tensor_flatten__()[0][0])
    with torch._C.DisableTorchFunction():
        storage: torch.UntypedStorage = inner.untyped_storage()
    return storage


def _identity(tensor: torch.Tensor) -> int:
    return int(_storage(tensor)._cdata)


def _written(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Any]:
    """The tensors that an operation writes into, as its schema says."""
    for index, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = arguments[index] if index < len(arguments) else keywords.get(argument.name)
            yield from tree_leaves(given)


def _push_below(reads: _Reads, flow: _Flow) -> None:
    """Puts the modes below all others: a mode of the script may end before these do, and ends the one on top."""
    for mode in (reads, *_popped_functions()):
        torch._C._push_on_torch_function_stack(mode)
    for other in (flow, *_popped_dispatches()):
        dispatch_modes._push_mode(other)


def _remove(reads: _Reads, flow: _Flow) -> None:
    for mode in _popped_functions():
        if mode is not reads:
            torch._C._push_on_torch_function_stack(mode)
    for other in _popped_dispatches():
        if other is not flow:
            dispatch_modes._push_mode(other)


def _popped_functions() -> list[Any]:
    """All modes taken off the stack, the lowest first."""
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]


def _popped_dispatches() -> list[Any]:
    """The same of the modes for operations."""
    return [dispatch_modes._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]
