"""Finds collectives after an update whose result affects a decision: a failure may interrupt them after the update."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from keepstep.adopt.flow import Visit
from keepstep.adopt.loops import Survey, TrainingLoop
from keepstep.adopt.script import Edit, Finding, Function

IN_PLACE = {"all_reduce": 0, "reduce": 0, "broadcast": 0, "all_gather": 0, "all_gather_into_tensor": 0, "gather": 1,
            "all_gather_object": 0, "broadcast_object_list": 0}  # fmt: skip
"""Collectives of torch.distributed, and the index of the argument to which they write."""
DECIDING = ("min", "max")

Key = tuple[Function | None, str]
"""A name and its function; None for attributes of `self`, and at module level."""


def collectives(survey: Survey) -> Iterator[Finding]:
    """Finds collectives after `optimizer.step()` whose result a comparison or a scheduler uses."""
    for loop in survey.loops:
        seen: set[ast.AST] = set()
        for visit in survey.in_loop(loop.run):
            update = _update_before(loop, visit)
            if update is None or not _is_collective(survey, visit.node) or _is_epoch_end(survey, loop, update, visit):
                continue
            decision = _Spread(survey, loop, visit).decision()
            call = _beside(survey, loop, update, visit)
            if decision is None or call in seen:
                continue
            seen.add(call)
            name = survey.script.dotted(getattr(visit.node, "func", None)).rpartition(".")[2]
            yield survey.script.finding(
                call,
                Edit.MOVE,
                f"before line {survey.script.line(update.node)}, or before `with step:`",
                f"a failure may interrupt {name}() after the update; line {survey.script.line(decision)} depends on "
                "its value: this rank's copy of the state would then be invalid.",
            )


def _update_before(loop: TrainingLoop, visit: Visit) -> Visit | None:
    before = [each for each in loop.updates if each.at < visit.at and not each.excludes(visit)]
    return before[0] if before else None


def _is_epoch_end(survey: Survey, loop: TrainingLoop, update: Visit, visit: Visit) -> bool:
    """Whether the collective is at the end of an epoch of `session.epochs()`, which is protected like a step."""
    node = loop.run.node
    if not loop.is_adopted or isinstance(node, ast.While) or not survey.is_of_session(node.iter, "epochs"):
        return False
    steps = [each for each in survey.flow.loops if each.outer[:1] == (loop.run,) and each.holds(update)]
    if steps:
        return not steps[0].holds(visit)
    depth = len(loop.run.stack)  # epoch.run(train_step)
    return update.stack[: depth + 1] != visit.stack[: depth + 1]


def _is_collective(survey: Survey, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not survey.script.calls(node, *IN_PLACE):
        return False
    return survey.script.dotted(node.func).startswith("torch.distributed")


def _beside(survey: Survey, loop: TrainingLoop, update: Visit, visit: Visit) -> ast.AST:
    """Returns the collective, or the call that leads to it in the function of the update, else in that of the loop."""
    for beside in (update.node, loop.run.node):
        function = survey.script.function(beside)
        for node in (*visit.stack[len(loop.run.stack) :], visit.node):
            if survey.script.function(node) is function:
                return node
    return visit.node


class _Spread:
    """Follows the result of a collective through the statements after it, to the first decision that uses it."""

    def __init__(self, survey: Survey, loop: TrainingLoop, source: Visit) -> None:
        self._survey, self._loop, self._source = survey, loop, source
        self._names: set[Key] = set()
        self._calls: set[ast.AST] = {source.node}

    def decision(self) -> ast.AST | None:
        """Returns the decision: a comparison, `min()` or `max()`, or a scheduler's `step(metric)`; None without one."""
        call = self._source.node
        assert isinstance(call, ast.Call)
        at = IN_PLACE[self._survey.script.dotted(call.func).rpartition(".")[2]]
        if at < len(call.args):
            self._add(call.args[at], call)
        for visit in self._survey.in_loop(self._loop.run):
            if visit.at <= self._source.at or visit.excludes(self._source):
                continue
            if (found := self._decides(visit)) is not None:
                return found
            self._pass_on(visit)
        return None

    def _decides(self, visit: Visit) -> ast.AST | None:
        node, script = visit.node, self._survey.script
        if isinstance(node, ast.Call):
            is_metric = getattr(node.func, "attr", "") == "step" and self._survey.objects.is_plateau(
                getattr(node.func, "value", node)
            )
            if (is_metric or script.dotted(node.func) in DECIDING) and any(map(self._mentions, node.args)):
                return node
        elif isinstance(node, ast.stmt):
            parts = [node.test] if isinstance(node, ast.If | ast.While) else []
            parts += [node.value] if isinstance(node, ast.Assign) else []
            for part in parts:
                for each in ast.walk(part):
                    if isinstance(each, ast.Compare) and self._mentions(each) and not _is_identity(each):
                        return each
        return None

    def _pass_on(self, visit: Visit) -> None:
        node = visit.node
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value and self._mentions(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    self._add(each, node)
                    self._add_to_owner(each, visit)
        elif isinstance(node, ast.Return) and node.value and visit.stack and self._mentions(node.value):
            self._calls.add(visit.stack[-1])

    def _mentions(self, node: ast.AST) -> bool:
        return any(
            each in self._calls or (isinstance(each, ast.Name | ast.Attribute) and self._key(each) in self._names)
            for each in ast.walk(node)
        )

    def _key(self, node: ast.AST) -> Key:
        name = self._survey.script.text(node)
        return None if name.startswith("self.") else self._survey.script.function(node), name

    def _add(self, node: ast.AST, _at: ast.AST) -> None:
        if (key := self._key(node))[1]:
            self._names.add(key)

    def _add_to_owner(self, node: ast.AST, visit: Visit) -> None:
        """Adds the caller's name of an attribute: `self.avg` in a method called as `meter.sync()` is `meter.avg`."""
        name = self._survey.script.text(node)
        if name.startswith("self.") and visit.stack and isinstance(visit.stack[-1].func, ast.Attribute):
            call = visit.stack[-1]
            owner = self._survey.script.text(visit.stack[-1].func.value)
            if owner and owner != "self":
                self._names.add((self._survey.script.function(call), owner + name.removeprefix("self")))


def _is_identity(node: ast.Compare) -> bool:
    return all(isinstance(each, ast.Is | ast.IsNot | ast.In | ast.NotIn) for each in node.ops)
