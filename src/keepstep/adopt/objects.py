"""The kinds of objects that a script's names refer to: models, optimizers, schedulers, loss scalers, loaders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from keepstep.adopt.script import Function, Script


class Sort(StrEnum):
    """Kinds of objects in a training script."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SCALER = "scaler"
    AVERAGE = "ema"
    LOADER = "loader"


LOOKS_LIKE = {
    Sort.SCHEDULER: re.compile(r"sched", re.IGNORECASE),
    Sort.OPTIMIZER: re.compile(r"optim(?!al)|(^|_)opts?($|_?[a-zA-Z]?$|_)", re.IGNORECASE),
    Sort.SCALER: re.compile(r"scaler", re.IGNORECASE),
    Sort.LOADER: re.compile(r"loader|(^|_)dl$", re.IGNORECASE),
}
"""Patterns of names, for objects that are created elsewhere."""

OPTIMIZERS = {
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam", "ZeroRedundancyOptimizer",
}  # fmt: skip
"""Optimizer classes of torch 2.13."""
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


@dataclass(frozen=True)
class Made:
    """An object and the name that it is assigned to.

    Attributes:
        name: the name in the script, such as `optimizer` or `self.model`.
        sort: the kind of object.
        node: the assignment, or the call that shards a model in place.
        function: the function of the assignment; None at module level.
    """

    name: str
    sort: Sort
    node: ast.stmt
    function: Function | None


class Objects:
    """The objects of a script.

    Attributes:
        made: the objects, in the order of their lines.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._stepped = set(self._names_stepped())
        self.made = sorted(self._find(), key=lambda made: made.node.lineno)
        self._sorts = {made.name: made.sort for made in self.made}

    def sort_of(self, node: ast.AST | None) -> Sort | None:
        """Returns the kind of object of a name: from its assignment, else from the name itself; None if unknown."""
        name = self._script.text(node)
        if name in self._sorts:
            return self._sorts[name]
        return self._looks_like(name)

    def _looks_like(self, name: str) -> Sort | None:
        """Returns the kind of object that a name suggests.

        Except for loaders, only names on which the script calls `step()` count: many scripts call their options `opt`.
        """
        last = name.rpartition(".")[2]
        for sort, pattern in LOOKS_LIKE.items():
            if pattern.search(last) and (sort is Sort.LOADER or last in self._stepped):
                return sort
        return None

    def _names_stepped(self) -> Iterator[str]:
        for node in ast.walk(self._script.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                for each in (node.func.value, *node.args):
                    yield self._script.text(each).rpartition(".")[2]

    def is_update(self, call: ast.Call) -> bool:
        """Whether a call is `optimizer.step()` or `scaler.step(optimizer)`."""
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
            return False
        sort = self.sort_of(call.func.value)
        return sort is Sort.OPTIMIZER or (sort is Sort.SCALER and len(call.args) == 1)

    def is_backward(self, call: ast.Call) -> bool:
        """Whether a call computes gradients."""
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        return is_method or self._script.dotted(call.func) == "torch.autograd.backward"

    def is_plateau(self, node: ast.AST) -> bool:
        """Whether a name is a `ReduceLROnPlateau` scheduler, which depends on a metric."""
        name = self._script.text(node)
        return any(made.name == name and _calls(self._script, made.node, "ReduceLROnPlateau") for made in self.made)

    def known_in(self, function: Function | None) -> Iterator[tuple[str, Sort]]:
        """Yields the names of objects that a function, or the module level, can use."""
        for made in self.made:
            is_attribute = made.name.startswith("self.")
            owner, here = (None if each is None else self._script.class_of(each) for each in (made.function, function))
            if (is_attribute and owner is here) or (not is_attribute and made.function in (function, None)):
                yield made.name, made.sort
        if function is not None:
            for argument in function.args.args:
                if (sort := self.sort_of(ast.Name(argument.arg))) is not None:
                    yield argument.arg, sort
                elif argument.arg in ("model", "net", "ddp_model"):
                    yield argument.arg, Sort.MODEL

    # ---- what is made ---------------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Made]:
        for node in ast.walk(self._script.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from self._assigned(target, node.value, node)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                yield from self._assigned(node.target, node.value, node)
            elif isinstance(node, ast.Call):
                yield from self._in_place(node)
            elif isinstance(node, ast.arg) and node.annotation is not None:
                yield from self._annotated(node)

    def _assigned(self, target: ast.expr, value: ast.expr, node: ast.stmt) -> Iterator[Made]:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else []
            for each, its_value in zip(target.elts, values or [value] * len(target.elts), strict=True):
                yield from self._assigned(each, its_value, node)
            return
        name = self._script.text(target)
        sort = self._sort_of_value(value) or self._sort_by_name(name, value)
        if name and sort is not None and not isinstance(target, ast.Subscript):
            yield Made(name, sort, node, self._script.function(node))

    def _sort_by_name(self, name: str, value: ast.expr) -> Sort | None:
        """Returns the kind of an object from an unknown call, by the name to which it is assigned."""
        if not isinstance(value, ast.Call) or name.endswith("name"):
            return None
        if self._script.dotted(value.func).rpartition(".")[2] in ("iter", "len", "getattr", "str", "tqdm"):
            return None
        return self._looks_like(name)

    def _sort_of_value(self, value: ast.expr) -> Sort | None:
        if not isinstance(value, ast.Call):
            return None
        name = self._script.dotted(value.func)
        last = name.rpartition(".")[2]
        if last in (*WRAPPERS, "fully_shard"):
            return Sort.MODEL
        if name.startswith("torch.optim.lr_scheduler.") or re.fullmatch(r"get_\w*schedule\w*", last):
            return Sort.SCHEDULER
        if last in OPTIMIZERS or last == "configure_optimizers":
            return Sort.OPTIMIZER
        if last in ("GradScaler", "ShardedGradScaler"):
            return Sort.SCALER
        if last == "AveragedModel":
            return Sort.AVERAGE
        return Sort.LOADER if last in ("DataLoader", "StatefulDataLoader") else None

    def _in_place(self, call: ast.Call) -> Iterator[Made]:
        """Yields a model that `fully_shard` shards in place, or whose parameters an optimizer gets."""
        node, function, around = self._script.statement(call), self._script.function(call), self._script.ancestors(call)
        if self._script.calls(call, "fully_shard") and call.args:
            name = self._script.text(call.args[0])
            if any(isinstance(each, ast.For) and self._script.text(each.target) == name for each in around):
                return  # a part of the model; a later call shards the whole model
        elif isinstance(call.func, ast.Attribute) and self._is_of_optimized(call):
            name = self._script.text(call.func.value)
        else:
            return
        if name:
            yield Made(name.removesuffix(".module"), Sort.MODEL, node, function)

    def _is_of_optimized(self, call: ast.Call) -> bool:
        """Whether a call is `model.configure_optimizers(...)`, or `model.parameters()` as an optimizer's argument."""
        method = getattr(call.func, "attr", "")
        if method == "configure_optimizers" or method not in ("parameters", "named_parameters"):
            return method == "configure_optimizers"
        around = (each for each in self._script.ancestors(call) if isinstance(each, ast.Call))
        return any(self._sort_of_value(each) is Sort.OPTIMIZER for each in around)

    def _annotated(self, argument: ast.arg) -> Iterator[Made]:
        """Yields loaders for an argument such as `train_data: DataLoader`, and for `self.train_data`."""
        if self._script.dotted(argument.annotation).rpartition(".")[2] != "DataLoader":
            return
        function = next(each for each in self._script.ancestors(argument) if isinstance(each, Function))
        for name in (argument.arg, f"self.{argument.arg}"):
            yield Made(name, Sort.LOADER, function, function)


def _calls(script: Script, node: ast.AST, name: str) -> bool:
    return any(
        isinstance(each, ast.Call) and script.dotted(each.func).rpartition(".")[2] == name for each in ast.walk(node)
    )
