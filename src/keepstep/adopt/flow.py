"""The order in which the lines of a script run. It follows calls of the script's own functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.adopt.script import Function, Loop, Script

MAX_VISITS = 100_000
"""Maximum number of visits, because a function is followed wherever it is called. The rest of the script is ignored."""
MAX_DEPTH = 12
"""Maximum depth of nested calls; scripts stay far below."""
STARTERS = {"spawn", "start_processes", "Process", "Fire", "run", "launch"}
"""Functions that call a function argument, such as `torch.multiprocessing.spawn`."""


@dataclass(frozen=True)
class Visit:
    """One execution of a call or a statement.

    Attributes:
        node: the call, or the statement after its expressions are computed.
        at: its position in the order.
        root: number of the entry point from which it was reached. Visits of different entry points have no order.
        stack: the calls that led here, the innermost last.
        branches: the conditions that it depends on, each with its required result.
    """

    node: ast.AST
    at: int
    root: int
    stack: tuple[ast.Call, ...]
    branches: tuple[tuple[ast.AST, bool], ...]

    def excludes(self, other: Visit) -> bool:
        """Whether no single pass through the code can reach both visits."""
        answers = dict(other.branches)
        return any(answers.get(condition, answer) != answer for condition, answer in self.branches)


@dataclass(frozen=True)
class LoopRun:
    """One run of a loop.

    Attributes:
        node: the loop.
        first: the first position of its body; for `while`, of its condition.
        last: the position after its body.
        root: as in `Visit`.
        stack: as in `Visit`.
        outer: the loops around it, the innermost first, including those around the calls that led here.
    """

    node: Loop
    first: int
    last: int
    root: int
    stack: tuple[ast.Call, ...]
    outer: tuple[LoopRun, ...]

    def holds(self, visit: Visit) -> bool:
        """Whether a visit is inside of this loop."""
        return self.root == visit.root and self.first <= visit.at < self.last


class Flow:
    """The order of a script's calls and statements.

    Attributes:
        visits: the calls and statements, in order.
        loops: the runs of loops, in the order of their ends.
    """

    def __init__(self, script: Script) -> None:
        self.visits: list[Visit] = []
        self.loops: list[LoopRun] = []
        self._script = script
        self._functions = {node.name: node for node in _functions(script) if not _is_method(script, node)}
        self._classes = {node.name: node for node in ast.walk(script.tree) if isinstance(node, ast.ClassDef)}
        self._instances = self._instances_by_name()
        self._root = 0
        self._stack: list[ast.Call] = []
        self._entered: list[Function] = []
        self._branches: list[tuple[ast.AST, bool]] = []
        self._block(script.tree.body)

    def enter_the_rest(self) -> None:
        """Follows each uncalled function as an entry point of its own: another file may import and call it."""
        reached = {self._script.function(visit.node) for visit in self.visits}
        for function in _functions(self._script):
            if function in reached:
                continue
            self._root += 1
            owner = self._script.class_of(function)
            if owner is not None and function.name != "__init__" and (init := _method(owner, "__init__")):
                self._body(init)
            self._body(function)

    def calls(self) -> Iterator[tuple[Visit, ast.Call]]:
        """Yields the calls among the visits."""
        for visit in self.visits:
            if isinstance(visit.node, ast.Call):
                yield visit, visit.node

    # ---- statements -----------------------------------------------------------------------------------------------

    def _block(self, body: list[ast.stmt]) -> None:
        depth = len(self._branches)
        for statement in body:
            self._statement(statement)
            if isinstance(statement, ast.If) and _leaves(statement.body) and not statement.orelse:
                self._branches.append((statement, False))
        del self._branches[depth:]

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return
            case ast.ClassDef():
                self._block([each for each in node.body if not isinstance(each, Function)])
            case ast.If():
                self._expression(node.test)
                self._add(node)
                self._under(node, True, node.body)
                self._under(node, False, node.orelse)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(node)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._expression(item.context_expr)
                self._add(node)
                self._block(node.body)
            case ast.Try() | ast.TryStar():
                self._block(node.body)
                for handler in node.handlers:
                    self._block(handler.body)
                self._block(node.orelse)
                self._block(node.finalbody)
            case ast.Match():
                self._expression(node.subject)
                self._add(node)
                for case in node.cases:
                    self._under(case, True, case.body)
            case _:
                self._expression(node)
                self._add(node)

    def _under(self, condition: ast.AST, answer: bool, body: list[ast.stmt]) -> None:
        self._branches.append((condition, answer))
        self._block(body)
        self._branches.pop()

    def _loop(self, node: Loop) -> None:
        if not isinstance(node, ast.While):
            self._expression(node.iter)
        self._add(node)
        first = len(self.visits)
        number = len(self.loops)
        if isinstance(node, ast.While):
            self._expression(node.test)
        self._block(node.body)
        # Inner loops have ended before this one, so it is added to them now.
        run = LoopRun(node, first, len(self.visits), self._root, tuple(self._stack), ())
        for at in range(number, len(self.loops)):
            inner = self.loops[at]
            self.loops[at] = LoopRun(inner.node, inner.first, inner.last, inner.root, inner.stack, (*inner.outer, run))
        self.loops.append(run)
        self._block(node.orelse)

    # ---- expressions ----------------------------------------------------------------------------------------------

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.Lambda):
            return
        for child in ast.iter_child_nodes(node):
            self._expression(child)
        if isinstance(node, ast.Call):
            self._add(node)
            for function in self._called(node):
                self._stack.append(node)
                self._body(function)
                self._stack.pop()

    def _body(self, function: Function) -> None:
        if function in self._entered or len(self._stack) > MAX_DEPTH or len(self.visits) >= MAX_VISITS:
            return
        self._entered.append(function)
        self._block(function.body)
        self._entered.pop()

    def _add(self, node: ast.AST) -> None:
        if len(self.visits) < MAX_VISITS:
            self.visits.append(Visit(node, len(self.visits), self._root, tuple(self._stack), tuple(self._branches)))

    def _called(self, call: ast.Call) -> Iterator[Function]:
        """Yields the functions of the script that a call runs."""
        name = self._script.text(call.func)
        _, _, method = name.rpartition(".")
        if name in self._functions:
            yield self._functions[name]
        elif name in self._classes:
            if init := _method(self._classes[name], "__init__"):
                yield init
        elif kind := self._class_of_value(call.func):
            if found := _method(kind, method or getattr(call.func, "attr", "")):
                yield found
        elif name.rpartition(".")[2] in STARTERS:
            given = [*call.args, *(each.value for each in call.keywords if each.arg in ("target", "fn"))]
            yield from (self._functions[name] for name in map(self._script.text, given) if name in self._functions)

    def _class_of_value(self, func: ast.expr) -> ast.ClassDef | None:
        """Returns the class of `a` in `a.b`, if the script defines it."""
        if not isinstance(func, ast.Attribute):
            return None
        if isinstance(func.value, ast.Call):
            return self._classes.get(self._script.text(func.value.func))
        owner = self._script.text(func.value)
        if owner in ("self", "cls"):
            return self._script.class_of(func)
        return self._instances.get(owner)

    def _instances_by_name(self) -> dict[str, ast.ClassDef]:
        found: dict[str, ast.ClassDef] = {}
        for node in ast.walk(self._script.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                kind = self._classes.get(self._script.text(node.value.func))
                for target in node.targets:
                    if kind is not None and (name := self._script.text(target)):
                        found[name] = kind
        return found


def _functions(script: Script) -> list[Function]:
    found = [node for node in ast.walk(script.tree) if isinstance(node, Function)]
    return sorted(found, key=lambda node: node.lineno)


def _is_method(script: Script, function: Function) -> bool:
    return isinstance(next(script.ancestors(function), None), ast.ClassDef)


def _method(owner: ast.ClassDef, name: str) -> Function | None:
    return next((each for each in owner.body if isinstance(each, Function) and each.name == name), None)


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)
