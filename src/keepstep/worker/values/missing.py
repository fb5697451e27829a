"""Missing values: the results of collectives that a failure interrupted.

Before the gradient barrier such a value does no harm: the step is undone. After it the step is completed, so the value
may permanently get into the state. Scripts reduce a loss for a log line there, which is harmless. Scripts also pass a
reduced metric to a scheduler there, which is not. `MissingValues` distinguishes the two by tracking the values:

* Tensors, by their storages: the results of an operation that reads a missing tensor are missing, too. So are the
  results of an operation with an interrupted collective inside it, such as an operation on DTensors. A
  ``TorchDispatchMode`` tracks them.
* Python numbers: ``.item()`` of a missing tensor returns a `Missing`. It supports arithmetic and prints as ``missing``.
  A ``TorchFunctionMode`` creates it.

A copy is valid if no missing value was written into a protected tensor or host value, and no *decision* was based on
a missing value. Comparing it, or converting it to a bool or another plain number, is a decision: its consequences
cannot be tracked. Uses that are not known to be harmless count as harmful. A copy with which nothing else is wrong than
that there was a decision is *in doubt*: it is compared with those of its replicas.

The tracking costs nothing until a collective is interrupted after the barrier: the modes are active from there to the
next step.
"""

from __future__ import annotations

import linecache
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch_modes
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

TEXT = "missing"
_NOT_OF_THE_SCRIPT = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""The folders of torch and of keepstep. A line outside of both belongs to the script."""
_WIDTH = re.compile(r"^(?:.?[<>=^])?[ +-]?#?0?(\d+)?")
_SHOWS = frozenset({"__repr__", "__str__", "__format__"})
_READS = frozenset({"__float__", "__int__", "__bool__", "__index__", "__complex__", "__contains__", "__array__"})
_READS |= {"__dlpack__", "__reduce_ex__", "numpy", "data_ptr", "untyped_storage", "storage", "_typed_storage"}
"""Tensor methods that pass the content to code outside torch, where it cannot be tracked."""


class Harm(NamedTuple):
    """What may contain a missing value."""

    where: str
    """What it is, with the line of the script."""
    is_doubt: bool
    """Whether it is nothing but what the script has decided by missing values."""


class MissingValues:
    """Tracks missing values in one process. Used by the training thread, except for `announce`."""

    def __init__(self) -> None:
        self.protected: Callable[[], Iterable[torch.Tensor]] = tuple
        """Returns the protected tensors: a missing value must not be written to them."""
        self._begin()

    def _begin(self) -> None:
        self._num_announced = self._num_adopted = 0
        self._storages: dict[int, torch.UntypedStorage] = {}
        """The storages with missing values, by identity. The references keep an identity from being reused."""
        self._protected_storages: set[int] = set()
        self._harm: str | None = None
        self._decision: str | None = None
        self._modes: tuple[_Reads, _Flow] | None = None
        self._is_looking_away = False
        """While this class itself computes with tensors."""

    def announce(self) -> None:
        """Reports that a collective was interrupted and its result is missing. Any thread; `adopt` must follow."""
        self._num_announced += 1

    def adopt(self, received: Iterable[torch.Tensor], *, in_update: bool = False, is_decided: bool = False) -> None:
        """Marks the output tensors of an announced collective as missing, before the script gets them.

        It fills floating-point and complex tensors with NaN, so that a value that escapes the tracking is recognizable.

        Args:
            received: the output tensors of the collective.
            in_update: whether a protected optimizer's ``step()`` called the collective: the update is then incomplete.
            is_decided: whether the script gets Python objects by it, which cannot be tracked.
        """
        if self._num_adopted == self._num_announced:
            return  # announced before the last `conclude`, which has counted it
        self._num_adopted += 1
        if in_update:
            self._harmed("an update")
        if torch._C._current_graph_task_id() != -1:
            self._harmed("a backward")
        if is_decided:
            self.decided()
        if self._modes is None:
            self._protected_storages = {_identity(tensor) for tensor in self.protected()}
            self._modes = _Reads(self), _Flow(self)
            _push_below(*self._modes)
        for tensor in received:
            if self._mark(tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                with self._looking_away(), torch.no_grad():
                    tensor.detach().fill_(float("nan"))

    def conclude(self, host: Callable[[], Any]) -> Harm | None:
        """Ends the tracking. Call it when the script requests the next step.

        Args:
            host: returns the protected host values.

        Returns:
            None if the copy is valid.
        """
        if self._num_adopted < self._num_announced:
            self._harmed("a collective that the script has not waited for")
        if self._modes is not None:
            held = tree_leaves(host())  # before the modes end: host() may return copies of tensors
            _remove(*self._modes)
            if any(isinstance(leaf, Missing) or self.is_missing(leaf) for leaf in held):
                self._harmed("protected host state")
        harm, decision = self._harm, self._decision
        self._begin()
        if harm is not None:
            return Harm(harm, is_doubt=False)
        return None if decision is None else Harm(decision, is_doubt=True)

    # ---- what the modes tell ----------------------------------------------------------------------------------------

    def is_missing(self, value: object) -> bool:
        """Whether a tensor holds a missing value."""
        return isinstance(value, torch.Tensor) and not self._is_looking_away and _identity(value) in self._storages

    @property
    def num_adopted(self) -> int:
        """Number of calls of `adopt` since the last `conclude` that marked a collective."""
        return self._num_adopted

    def flowed(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any, *, adopted: bool
    ) -> None:
        """Marks the results and outputs of an operation as missing if one of its inputs is missing.

        Args:
            operation, arguments, keywords, result: the operation, its inputs and its result.
            adopted: whether a collective inside the operation was interrupted: the results are then missing as well.
        """
        if not adopted and not any(self.is_missing(leaf) for leaf in tree_leaves((arguments, keywords))):
            return
        for leaf in (*tree_leaves(result), *_written(operation, arguments, keywords)):
            if isinstance(leaf, torch.Tensor):
                self._mark(leaf)
            elif leaf is not None:
                self.decided()
        if torch.Tag.dynamic_output_shape in operation.tags:
            self.decided()  # the shape of the result depends on the content

    def decided(self) -> None:
        """Records that the script can base a decision on a missing value."""
        self._decision = self._decision or f"what the script has decided by it, at {line_of_script()}"

    def scalar(self, tensor: torch.Tensor) -> Missing:
        """The placeholder for the only element of a missing tensor."""
        with self._looking_away():
            return Missing(tensor.detach().item(), self.decided)

    def scalars(self, tensor: torch.Tensor) -> Any:
        """The placeholder for a missing tensor's ``tolist()``."""
        if tensor.dim() == 0:
            return self.scalar(tensor)
        with self._looking_away():
            parts = tensor.detach().unbind()
        return [self.scalars(part) for part in parts]

    def _mark(self, tensor: torch.Tensor) -> bool:
        """Marks a tensor as missing. Returns False for a protected tensor: it records the harm and marks nothing."""
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
    """The number from an interrupted collective. It is NaN and prints as ``missing``; arithmetic with it is missing."""

    own: Any
    """This rank's own value, for a decision of the script."""

    def __new__(cls, own: Any, on_decision: Callable[[], None]) -> Missing:
        """Args:
        own: this rank's own value.
        on_decision: called when the script compares the number or converts it to a plain value.
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
        self._on_decision()  # an array or a tensor, whose content is not tracked
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
    """Intercepts tensor methods that convert a missing tensor to a Python value."""

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
    """Intercepts every operation, also in a backward, to mark the results of missing inputs."""

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
    """The tensor's storage; for a wrapper such as a DTensor, the storage of the inner tensor."""
    inner: Any = tensor
    while is_traceable_wrapper_subclass(inner):
        inner = getattr(inner, inner.__tensor_flatten__()[0][0])
    with torch._C.DisableTorchFunction():
        storage: torch.UntypedStorage = inner.untyped_storage()
    return storage


def _identity(tensor: torch.Tensor) -> int:
    return int(_storage(tensor)._cdata)


def _written(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Any]:
    """The tensors that an operation writes to, according to its schema."""
    for index, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = arguments[index] if index < len(arguments) else keywords.get(argument.name)
            yield from tree_leaves(given)


def _push_below(reads: _Reads, flow: _Flow) -> None:
    """Pushes the modes below all others: when a mode of the script exits, torch pops the top of the stack."""
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
    """Pops all function modes off the stack. Returns them, the lowest first."""
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]


def _popped_dispatches() -> list[Any]:
    """Pops all dispatch modes off the stack. Returns them, the lowest first."""
    return [dispatch_modes._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]
