"""Findings about the script's own values that a replacement needs: best values, counters, a checkpoint's position."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.adopt.flow import Visit
from keepstep.adopt.loops import Survey, TrainingLoop
from keepstep.adopt.script import Edit, Finding, Function
from keepstep.adopt.steps import loader_of_epochs


@dataclass(frozen=True)
class _Change:
    """A name with a constant first value, and the first statement in the loop that changes it."""

    name: str
    start: ast.stmt
    value: ast.expr
    statement: ast.stmt
    is_own: bool
    counts_steps: bool


def values(survey: Survey) -> Iterator[Finding]:
    """Finds variables with a constant first value before the loop that the loop changes."""
    if not survey.loops:
        return
    changes = list(_changes(survey, survey.loops[0]))
    kept = [each for each in changes if not each.counts_steps]
    for is_own in (False, True):
        group = [each for each in kept if each.is_own is is_own]
        for number, change in enumerate(group):
            yield _kept(survey, change, group if number == 0 else [], is_own)
    for change in changes:
        if change.counts_steps:
            loader = loader_of_epochs(survey, survey.loops[0])
            formula = f"{change.name} = step.epoch * len({loader}) + step.position + 1" if loader else ""
            yield survey.script.finding(
                change.statement,
                Edit.REPLACE if formula else Edit.REMOVE,
                formula,
                f"`{change.name}` counts the passes of the loop, and line {change.start.lineno} starts over on a "
                f"replacement{'.' if formula else ': step.index counts the steps.'}",
            )


def checkpoints(survey: Survey) -> Iterator[Finding]:
    """Finds a checkpoint that the script loads at the start, with the step or epoch at which the loop continues."""
    script = survey.script
    loaded = {
        script.text(target)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign) and script.calls(node.value, "load")
        for target in node.targets
    }
    if not loaded or not survey.loops or any(_has_start(survey, loop) for loop in survey.loops):
        return
    restores = any(
        isinstance(visit.node, ast.Call) and getattr(visit.node.func, "attr", "") == "load_state_dict"
        for visit in survey.at_start()
    )
    for visit in survey.at_start():
        node = visit.node
        if not restores or not isinstance(node, ast.Assign) or not _is_from(survey, node.value, loaded):
            continue
        name = script.text(node.targets[0])
        if name and _begins_with(survey, name):
            yield _start(survey, node, name)
            return


# ---- values ----------------------------------------------------------------------------------------------------------


def _kept(survey: Survey, change: _Change, together: list[_Change], is_own: bool) -> Finding:
    script = survey.script
    state = "own" if is_own else "state"
    attribute = change.name.rpartition(".")[2]
    given = [f"{each.name.rpartition('.')[2]}={script.one_line(each.value)}" for each in together]
    call = ", ".join([*(["per_rank=True"] if is_own else []), *given])
    instead = f"{state} = {survey.session}.state({call})" if together else f"{state}.{attribute}, in the same state()"
    whose = (
        "Each rank has its own; it may change up to the first update of a step."
        if is_own
        else "It must be the same on all ranks: reduce what it is computed from."
    )
    is_early = not survey.has_session and survey.is_in_front_of_init(change.start)
    return script.finding(
        change.start,
        Edit.MOVE if is_early else Edit.REPLACE,
        f"after keepstep.init(): {instead}" if is_early else instead,
        f"Line {change.statement.lineno} changes `{change.name}`, which starts over on a replacement: make it "
        f"`{state}.{attribute}`. {whose}",
    )


def _changes(survey: Survey, loop: TrainingLoop) -> Iterator[_Change]:
    starts = _first_values(survey, loop)
    seen: set[str] = set()
    for visit in survey.in_loop(loop.outermost):
        found = _changed(survey, visit.node)
        if found is None:
            continue
        name, is_own = found
        if name in seen or name not in starts or not _is_same(survey, name, starts[name][0], visit.node):
            continue
        seen.add(name)
        start, value = starts[name]
        assert isinstance(visit.node, ast.stmt)
        yield _Change(name, start, value, visit.node, is_own, _counts_steps(loop, visit))


def _first_values(survey: Survey, loop: TrainingLoop) -> dict[str, tuple[ast.stmt, ast.expr]]:
    found: dict[str, tuple[ast.stmt, ast.expr]] = {}
    for visit in survey.at_start():
        node = visit.node
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_constant(survey, node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name | ast.Attribute) and (name := survey.script.text(target)):
                    found.setdefault(name, (node, node.value))
    return found


def _is_constant(survey: Survey, node: ast.expr) -> bool:
    """Whether an expression is a constant number, including infinity."""
    if isinstance(node, ast.UnaryOp):
        return _is_constant(survey, node.operand)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.Call) and survey.script.text(node.func) == "float" and len(node.args) == 1:
        return isinstance(node.args[0], ast.Constant)
    return survey.script.dotted(node) in ("math.inf", "numpy.inf", "torch.inf")


def _changed(survey: Survey, node: ast.AST) -> tuple[str, bool] | None:
    """Returns the name whose value a statement updates, and whether each rank has its own; None if there is none."""
    script = survey.script
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name | ast.Attribute):
        is_number = isinstance(node.value, ast.Constant) and isinstance(node.value.value, int)
        return script.text(node.target), not is_number
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    name = script.text(node.targets[0])
    if not name or isinstance(node.targets[0], ast.Subscript):
        return None
    if isinstance(node.value, ast.Call) and script.text(node.value.func) in ("min", "max"):
        return (name, False) if any(script.text(each) == name for each in node.value.args) else None
    for around in script.ancestors(node):
        if isinstance(around, Function):
            break
        if isinstance(around, ast.If) and _compares(survey, around.test, name):
            return name, False
    return None


def _compares(survey: Survey, test: ast.expr, name: str) -> bool:
    """Whether a condition compares the name with another value, as in `if loss < best`."""
    return any(
        isinstance(each, ast.Compare)
        and isinstance(each.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        and name in (survey.script.text(each.left), survey.script.text(each.comparators[0]))
        for each in ast.walk(test)
    )


def _is_same(survey: Survey, name: str, start: ast.stmt, change: ast.AST) -> bool:
    """Whether a name is the same variable in both places."""
    script = survey.script
    if name.startswith("self."):
        trainers = {script.class_of(loop.run.node) for loop in survey.loops}
        return script.class_of(start) is script.class_of(change) and script.class_of(start) in trainers
    here, there = script.function(start), script.function(change)
    if here is there:
        return True
    declared = [
        each
        for each in ast.walk(there if there is not None else script.tree)
        if isinstance(each, ast.Global | ast.Nonlocal) and name in each.names
    ]
    return bool(declared)


def _counts_steps(loop: TrainingLoop, visit: Visit) -> bool:
    """Whether a statement is an unconditional `n += 1` in the body of the training loop."""
    node = visit.node
    if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add) or ast.unparse(node.value) != "1":
        return False
    return node in loop.run.node.body


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _has_start(survey: Survey, loop: TrainingLoop) -> bool:
    each = survey.iterated(loop.run.node.iter) if isinstance(loop.run.node, ast.For) else None
    is_steps = each is not None and survey.is_of_session(each, "steps")
    return loop.is_adopted and (not is_steps or any(word.arg == "start" for word in getattr(each, "keywords", [])))


def _is_from(survey: Survey, value: ast.expr, loaded: set[str]) -> bool:
    """Whether a value is from a checkpoint, as `checkpoint["step"] + 1` or `checkpoint.get("step", 0)`."""
    return any(
        (isinstance(each, ast.Subscript) and survey.script.text(each.value) in loaded)
        or (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "get"
            and survey.script.text(each.func.value) in loaded
        )
        for each in ast.walk(value)
    )


def _begins_with(survey: Survey, name: str) -> bool:
    """Whether a training loop, or a loop around it, starts at the value of a name or increments it."""
    for loop in survey.loops:
        for run in (loop.run, *loop.run.outer):
            given = run.node.test if isinstance(run.node, ast.While) else run.node.iter
            if any(survey.script.text(each) == name for each in ast.walk(given)):
                return True
            changed = (each for each in run.node.body if isinstance(each, ast.AugAssign))
            if any(survey.script.text(each.target) == name for each in changed):
                return True
    return False


def _start(survey: Survey, node: ast.Assign, name: str) -> Finding:
    script, loop = survey.script, survey.loops[0]
    has_epochs = loop.epochs is not None or not isinstance(loop.run.node, ast.While)
    is_counted = isinstance(loop.run.node, ast.While) or not loop.run.outer
    if is_counted:
        instead = f"{survey.session}.steps(..., start={name}) in line {loop.run.node.lineno}"
        why = "The script has loaded a checkpoint of its own. A checkpoint of keepstep's that is further wins over it."
    else:
        instead = f"{survey.session}.protect(..., checkpoint_dir=...) in place of loading by the script"
        why = (
            "session.epochs() goes on from keepstep's own checkpoints: it has no first epoch of the script's."
            if has_epochs
            else ""
        )
    return script.finding(node, Edit.REPLACE, instead, why)
