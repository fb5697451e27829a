"""Findings about the training loop: the call that yields its steps, and the body of one step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from keepstep.adopt.flow import LoopRun, Visit
from keepstep.adopt.loops import Survey, TrainingLoop
from keepstep.adopt.objects import Sort
from keepstep.adopt.script import Edit, Finding

RESUMED = "keepstep undoes an interrupted step and repeats it."


def loops(survey: Survey) -> Iterator[Finding]:
    """Finds the training loops and the loops around them."""
    for loop in survey.loops:
        if loop.is_adopted:
            yield from _without_with(survey, loop)
        elif _goes_over_loader(survey, loop) and _pair(loop) is None:
            yield from _loader_loop(survey, loop)
        else:
            yield from _counted_loop(survey, loop)


def carried(survey: Survey) -> Iterator[Finding]:
    """Finds a batch that an iteration reads for the next one: the same assignment before the loop and inside of it."""
    script = survey.script
    for loop in survey.loops:
        if loop.is_adopted:
            continue
        function = script.function(loop.run.node)
        before = {
            ast.dump(visit.node): visit.node
            for visit in survey.at_start()
            if isinstance(visit.node, ast.Assign) and script.function(visit.node) is function
        }
        for visit in survey.in_loop(loop.run):
            node = visit.node
            first = before.get(ast.dump(node)) if isinstance(node, ast.Assign) else None
            if first is None or not isinstance(node, ast.Assign) or not _reads_batch(survey, node):
                continue
            yield script.finding(
                node,
                Edit.MOVE,
                "to the beginning of the step, and into each of its micro-batches",
                f"Line {first.lineno} reads the first batch, and each pass the one for the next: a replacement, and a "
                "step that comes again, would have another.",
            )
            break


def _reads_batch(survey: Survey, node: ast.Assign) -> bool:
    """Whether an assignment calls `next()`, or a function with "batch" in its name."""
    call = node.value
    if not isinstance(call, ast.Call) or survey.script.text(call.func) == "iter":
        return False
    return "batch" in ast.unparse(call.func) or survey.script.text(call.func) == "next"


def updates(survey: Survey) -> Iterator[Finding]:
    """Finds updates outside of a training loop, with a closure, or more than once per iteration."""
    yield from _outside(survey)
    script = survey.script
    seen: set[ast.AST] = set()
    for _visit, call in survey.flow.calls():
        if call in seen or not survey.objects.is_update(call) or not call.args:
            continue
        seen.add(call)
        if isinstance(call.func, ast.Attribute) and survey.objects.sort_of(call.func.value) is Sort.OPTIMIZER:
            yield script.finding(
                call,
                Edit.REPLACE,
                f"{script.one_line(call.args[0])}()\n{script.one_line(call.func)}()",
                "optimizer.step() with a closure is refused: it computes gradients in the middle of an update.",
            )
    for loop in survey.loops:
        yield from _several(survey, loop)
        if not loop.is_adopted:
            yield from _accumulated(survey, loop)


# ---- loops -----------------------------------------------------------------------------------------------------------


def _goes_over_loader(survey: Survey, loop: TrainingLoop) -> bool:
    node = loop.run.node
    return not isinstance(node, ast.While) and survey.objects.sort_of(survey.iterated(node.iter)) is Sort.LOADER


def loader_of_epochs(survey: Survey, loop: TrainingLoop) -> str:
    """Returns the loader of a loop that is, or should be, inside of `session.epochs()`; else ""."""
    node = loop.run.node
    if isinstance(node, ast.While):
        return ""
    each = survey.iterated(node.iter)
    if isinstance(each, ast.Call) and survey.is_of_session(each, "epochs") and each.args:
        return survey.script.one_line(each.args[0])
    is_within = loop.epochs is not None and _epochs_of(survey, loop.epochs) is not None
    return survey.script.one_line(each) if is_within and _goes_over_loader(survey, loop) else ""


def _loader_loop(survey: Survey, loop: TrainingLoop) -> Iterator[Finding]:
    """Suggests the change of `for batch in loader`, with or without a loop over epochs around it."""
    script, node = survey.script, loop.run.node
    assert not isinstance(node, ast.While)
    loader = script.one_line(survey.iterated(node.iter))
    number, batch = _number_and_batch(survey, node)
    every = _accumulation(survey, loop)
    accumulate = f", accumulate={every[1]}" if every else ""
    outer = loop.epochs
    limit = _epochs_of(survey, outer) if outer is not None else None
    target = "batches" if every else batch
    inside = f"        for {batch} in batches:" if every else ""
    counted = f"`{number}` becomes step.position." if number else ""
    if outer is not None and limit is not None:
        yield _epoch_loop(survey, outer, f"{_loader_outside(survey, loop, loader)}, {limit}{accumulate}")
        epoch = script.one_line(outer.node.target) if isinstance(outer.node, ast.For) else "epoch"
        over = epoch if epoch.isidentifier() and epoch != "_" else "epoch"
        elsewhere = f"`{over}` is what session.epochs() hands out." if outer.stack != loop.run.stack else ""
    else:
        if outer is not None:
            yield script.finding(
                outer.node, Edit.REMOVE, "", f"session.batches() in line {node.lineno} goes over all epochs."
            )
        epochs = ", epochs=num_epochs" if outer is not None else ""
        over, elsewhere = f"{survey.session}.batches({loader}{epochs}{accumulate})", ""
    lines = [f"for step, {target} in {over}:", "    with step:", inside]
    yield script.finding(
        node,
        Edit.REPLACE,
        "\n".join(line for line in lines if line),
        f"{RESUMED} The body goes into `with step:`, with log lines after the update. {elsewhere} {counted}",
    )
    if limit is not None:
        yield from _set_epoch(survey, loop)


def _loader_outside(survey: Survey, loop: TrainingLoop, loader: str) -> str:
    """Returns the loader's name in the function of the loop over epochs."""
    added = [call for call in loop.run.stack if loop.epochs is not None and call not in loop.epochs.stack]
    function = survey.script.function(loop.run.node)
    if not added or function is None or loader.startswith("self."):
        return loader
    names = [each.arg for each in function.args.args]
    names = names[1:] if names[:1] == ["self"] else names
    if loader not in names:
        return loader
    call = added[-1]
    given = next((each.value for each in call.keywords if each.arg == loader), None)
    at = names.index(loader)
    given = call.args[at] if given is None and at < len(call.args) else given
    return loader if given is None else survey.script.one_line(given)


def _number_and_batch(survey: Survey, node: ast.For | ast.AsyncFor) -> tuple[str, str]:
    """Returns the loop's counter, or "", and the name of its batch."""
    script = survey.script
    target = node.target
    each: ast.expr = node.iter
    while isinstance(each, ast.Call) and script.text(each.func).rpartition(".")[2] in ("tqdm", "track") and each.args:
        each = each.args[0]
    is_counted = isinstance(each, ast.Call) and script.text(each.func) == "enumerate"
    if is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        number, batch = target.elts
        return script.one_line(number), _tuple(survey, batch)
    return "", _tuple(survey, target)


def _tuple(survey: Survey, target: ast.expr) -> str:
    text = survey.script.one_line(target)
    return f"({text.strip('()')})" if isinstance(target, ast.Tuple) else text


def _epochs_of(survey: Survey, outer: LoopRun) -> str | None:
    """Returns the number of epochs of a loop as source text; None if the loop does not show it."""
    node = outer.node
    if isinstance(node, ast.While):
        return None
    each = survey.iterated(node.iter)
    name = survey.script.text(node.iter.func) if isinstance(node.iter, ast.Call) else ""
    if isinstance(each, ast.Call) and survey.script.text(each.func) == "range":
        limits = each.args
    elif name.rpartition(".")[2] == "trange" and isinstance(node.iter, ast.Call):
        limits = node.iter.args
    else:
        return None
    if not 1 <= len(limits) <= 2:
        return None
    if len(limits) == 2 and ast.unparse(limits[0]) == "1":
        return _less_one(survey, limits[1])
    return survey.script.one_line(limits[-1])


def _less_one(survey: Survey, node: ast.expr) -> str:
    """Returns `n` for the limit `n + 1` of `range(1, n + 1)`, else the limit minus 1."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and ast.unparse(node.right) == "1":
        return survey.script.one_line(node.left)
    return f"{survey.script.one_line(node)} - 1"


def _epoch_loop(survey: Survey, outer: LoopRun, given: str) -> Finding:
    script, node = survey.script, outer.node
    assert not isinstance(node, ast.While)
    target = script.one_line(node.target)
    first = survey.iterated(node.iter)
    starts = first.args[0] if isinstance(first, ast.Call) and len(first.args) == 2 else None
    source = ""
    if starts is not None and not isinstance(starts, ast.Constant):
        source = (
            f"It begins where the job stands, and not at `{script.one_line(starts)}`: let "
            "protect(checkpoint_dir=...) write and read the checkpoints."
        )
    sharded = any(script.calls(each, "fully_shard") for each in ast.walk(script.tree))
    batches = "Where a part of the state has no replica, session.batches() has to take its place." if sharded else ""
    name = "epoch" if target == "_" else target
    return script.finding(
        node,
        Edit.REPLACE,
        f"for {name} in {survey.session}.epochs({given}):",
        f"It hands out the epochs from where the job stands, and finds each batch again. {source} {batches}",
    )


def _set_epoch(survey: Survey, loop: TrainingLoop) -> Iterator[Finding]:
    seen: set[ast.AST] = set()
    for visit in survey.in_loop(loop.outermost):
        call = visit.node
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "set_epoch" and call not in seen:
            seen.add(call)
            yield survey.script.finding(call, Edit.REMOVE, "", "session.epochs() calls set_epoch() of the sampler.")


def _counted_loop(survey: Survey, loop: TrainingLoop) -> Iterator[Finding]:
    """Suggests the change of `for step in range(n)`, `while True`, or a loop over anything else."""
    script, node, session = survey.script, loop.run.node, survey.session
    number, start, stop = "", "", ""
    if isinstance(node, ast.While):
        number, stop = _while_limit(survey, node)
    else:
        each = survey.iterated(node.iter)
        is_range = isinstance(each, ast.Call) and script.text(each.func) == "range"
        if isinstance(each, ast.Call) and is_range and 1 <= len(each.args) <= 2:
            number, stop = script.one_line(node.target), script.one_line(each.args[-1])
            start = script.one_line(each.args[0]) if len(each.args) == 2 else ""
    loader = _made_iterator(survey, loop)
    if loader is not None and not stop:
        yield _batches_of_iterator(survey, loop, loader)
        return
    outer = loop.epochs
    limit = _epochs_of(survey, outer) if outer is not None else None
    pair = ""
    if _goes_over_loader(survey, loop):
        assert not isinstance(node, ast.While)
        stop = f"2 * len({script.one_line(survey.iterated(node.iter))})"
        pair = "Each batch has two steps, and has to follow from step.index // 2: keepstep.data.StepLoader gives such."
    if outer is not None and stop and limit is not None:
        stop = f"{limit} * {_factor(stop)}"
        yield script.finding(
            outer.node,
            Edit.REMOVE,
            "",
            f"session.steps() in line {node.lineno} hands out the steps of all epochs: the number of the epoch follows "
            "from step.index.",
        )
    given = f"{stop or 'num_steps'}{f', start={start}' if start not in ('', '0') else ''}"
    counted = f"`{number}` becomes step.index." if number.replace(".", "").isidentifier() and number != "_" else ""
    yield script.finding(
        node,
        Edit.REPLACE,
        f"for step in {session}.steps({given}):\n    with step:",
        f"{RESUMED} The body goes into `with step:`, with log lines after the update. {counted} "
        f"{pair or _iterator_why(loader)}",
    )


def _factor(text: str) -> str:
    is_plain = text.replace("_", "").replace(".", "").isalnum() or text.endswith(")")
    return text if is_plain else f"({text})"


def _while_limit(survey: Survey, node: ast.While) -> tuple[str, str]:
    """Returns the counter and the limit of a `while`; "" if its conditions do not show them."""
    tests = [(node.test, False)]
    tests += [
        (each.test, True)
        for each in node.body
        if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Break) and not each.orelse
    ]
    for test, is_end in tests:
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            continue
        limit = survey.script.one_line(test.comparators[0])
        is_open = isinstance(test.ops[0], ast.GtE if is_end else ast.Lt)
        is_closed = isinstance(test.ops[0], ast.Gt if is_end else ast.LtE)
        if is_open or is_closed:
            return survey.script.one_line(test.left), limit if is_open else f"{limit} + 1"
    return "", ""


def _made_iterator(survey: Survey, loop: TrainingLoop) -> ast.Call | None:
    """Returns the `iter(loader)` from which the loop takes batches by `next()`; None if there is none."""
    script = survey.script
    iterators = {
        script.text(target): node.value
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if script.text(node.value.func) == "iter" and node.value.args
    }
    for visit in survey.in_loop(loop.run):
        call = visit.node
        if isinstance(call, ast.Call) and script.text(call.func) == "next" and call.args:
            made = iterators.get(script.text(call.args[0]))
            if made is not None and survey.objects.sort_of(made.args[0]) is Sort.LOADER:
                return made
    return None


def _iterator_why(made: ast.Call | None) -> str:
    if made is None:
        return ""
    return (
        f"The iterator of line {made.lineno} has a position that a replacement lacks: "
        f"session.batches({ast.unparse(made.args[0])}, epochs=...) hands out steps with their batches."
    )


def _batches_of_iterator(survey: Survey, loop: TrainingLoop, made: ast.Call) -> Finding:
    loader = survey.script.one_line(made.args[0])
    return survey.script.finding(
        loop.run.node,
        Edit.REPLACE,
        f"for step, batch in {survey.session}.batches({loader}, epochs=num_epochs):\n    with step:",
        f"{RESUMED} The iterator of line {made.lineno} has a position that a replacement lacks: session.batches() "
        "finds each batch again. To end early, leave the loop at the same step on all ranks.",
    )


def _without_with(survey: Survey, loop: TrainingLoop) -> Iterator[Finding]:
    """Finds a loop over steps that does not enter its steps, unless a function might do that."""
    node = loop.run.node
    if not isinstance(node, ast.For) or not loop.updates:
        return
    each = survey.iterated(node.iter)
    if isinstance(each, ast.Call) and ast.unparse(each.func).endswith(".epochs"):
        return
    for visit in survey.in_loop(loop.run):
        if isinstance(visit.node, ast.With | ast.AsyncWith) and any(
            isinstance(item.context_expr, ast.Name) for item in visit.node.items
        ):
            return
        if isinstance(visit.node, ast.Call) and survey.is_of_session(visit.node, "run_step"):
            return
    marked = (
        each for each in ast.walk(survey.script.tree) if isinstance(each, ast.FunctionDef) and each.decorator_list
    )
    if any(survey.script.text(mark).endswith(".step") for each in marked for mark in each.decorator_list):
        return
    step = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
    yield survey.script.finding(
        node,
        Edit.INSERT_AFTER,
        f"    with {survey.script.one_line(step)}:",
        "A step that is handed out has to be entered: its body goes into the `with`.",
    )


# ---- updates ---------------------------------------------------------------------------------------------------------


def _outside(survey: Survey) -> Iterator[Finding]:
    if not survey.loops:
        return
    root = survey.loops[0].run.root
    inside = {visit.node for loop in survey.loops for visit in loop.updates}
    seen: set[ast.AST] = set()
    for visit, call in survey.flow.calls():
        if visit.root != root or call in inside or call in seen or not survey.objects.is_update(call):
            continue
        seen.add(call)
        line = survey.loops[0].run.node.lineno
        yield survey.script.finding(
            call,
            Edit.MOVE,
            f"into a step of the loop in line {line}",
            "optimizer.step() of a protected optimizer is refused outside of a step.",
        )


def _several(survey: Survey, loop: TrainingLoop) -> Iterator[Finding]:
    """Finds a backward between two updates of one iteration."""
    found = _pair(loop)
    if found is not None:
        backward, one, two = (survey.script.line(each.node) for each in found)
        yield survey.script.finding(
            found[0].node,
            Edit.MOVE,
            "into a step of its own: `if step.index % 2 == 0:` for the first update, `else:` for the second",
            f"All backwards of a step come before its first update: the one in line {backward} stands between the "
            f"updates of lines {one} and {two}, which takes two steps.",
        )


def _pair(loop: TrainingLoop) -> tuple[Visit, Visit, Visit] | None:
    """Returns a backward, an update before it and an update after it in the same iteration; None if there is none."""
    for backward in loop.backwards:
        before = [each for each in loop.updates if each.at < backward.at and not each.excludes(backward)]
        behind = [each for each in loop.updates if each.at > backward.at and not each.excludes(backward)]
        for one in before:
            for two in behind:
                if not one.excludes(two):
                    return backward, one, two
    return None


def _accumulation(survey: Survey, loop: TrainingLoop) -> tuple[ast.If, str] | None:
    """Returns the condition `i % k` on which all updates and no backward depend, and its k; None if there is none."""
    conditions = [_conditions(loop, update) for update in loop.updates]
    if not conditions or any(not each for each in conditions):
        return None
    for condition in conditions[0]:
        if all(condition in each for each in conditions) and not any(
            condition in _conditions(loop, backward) for backward in loop.backwards
        ):
            for node in ast.walk(condition.test):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                    return condition, survey.script.one_line(node.right)
    return None


def _conditions(loop: TrainingLoop, visit: Visit) -> list[ast.If]:
    """Returns the `if` statements in the loop whose condition must be true to reach a visit."""
    first = loop.run.node.lineno
    return [
        node
        for node, answer in visit.branches
        if answer and isinstance(node, ast.If) and (node.lineno > first or loop.run.stack != visit.stack)
    ]


def _accumulated(survey: Survey, loop: TrainingLoop) -> Iterator[Finding]:
    found = _accumulation(survey, loop)
    if found is None:
        return
    condition, every = found
    instead = "after the loop over the micro-batches of the step, without the condition"
    if not _goes_over_loader(survey, loop):
        instead += f": `for _ in range({every}):` in the `with step:`"
    yield survey.script.finding(
        condition,
        Edit.MOVE,
        instead,
        "Gradients are accumulated inside of one step: a step that ends with gradients and without an update is "
        "refused.",
    )
