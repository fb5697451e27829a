"""Findings about `session.protect()`: its place, its arguments, and what it refuses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from keepstep.adopt.loops import Survey
from keepstep.adopt.objects import Sort
from keepstep.adopt.script import Edit, Finding, Function

PROTECTED = (Sort.MODEL, Sort.OPTIMIZER, Sort.SCHEDULER, Sort.SCALER, Sort.AVERAGE)
"""Kinds of objects to protect, in the order of the arguments."""


def protection(survey: Survey) -> Iterator[Finding]:
    """Suggests a call of `protect()` before the outermost loop, if the script has none."""
    if survey.is_protected or not survey.loops:
        return
    script, loop = survey.script, survey.loops[0]
    outermost = loop.outermost.node
    function = script.function(outermost)
    given = ", ".join(f"{name}={value}" for name, value in arguments(survey, function))
    elsewhere = function is not _function_of_init(survey)
    has_load = any(script.calls(node, "load") for node in ast.walk(script.tree))
    loads = ", and after the loading of a checkpoint" if has_load else ""
    again = "A second keepstep.init() returns the same session." if elsewhere else ""
    yield script.finding(
        outermost,
        Edit.INSERT_BEFORE,
        f"{survey.session}.protect({given})",
        f"It names everything that a recovery restores. Call it once, before the first step{loads}. {again}",
    )


def arguments(survey: Survey, function: Function | None) -> list[tuple[str, str]]:
    """Returns the arguments of `protect()` as pairs of keyword and name. The function can use all of the names."""
    known = list(survey.objects.known_in(function))
    wrapped = _wrapped(survey)
    found: list[tuple[str, str]] = []
    for sort in PROTECTED:
        names = list(dict.fromkeys(name for name, each in known if each is sort))
        if sort is Sort.MODEL:
            names = [name for name in names if name in wrapped] or names
        elif sort is Sort.OPTIMIZER and not names:
            names = _updated_in(survey, function)
        if len(names) == 1:
            found.append((str(sort), names[0]))
        else:
            found += [(_keyword(name, sort, number), name) for number, name in enumerate(names)]
        if not names and sort in (Sort.MODEL, Sort.OPTIMIZER):
            found.append((str(sort), "..."))
    return found


def _keyword(name: str, sort: Sort, number: int) -> str:
    last = name.rpartition(".")[2]
    return last if last.isidentifier() else f"{sort}{number}"


def _wrapped(survey: Survey) -> set[str]:
    """Returns the names of models that DDP, FSDP1 or `fully_shard` wraps."""
    names = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
    return {
        made.name
        for made in survey.objects.made
        if made.sort is Sort.MODEL and any(survey.script.calls(each, *names) for each in ast.walk(made.node))
    }


def _updated_in(survey: Survey, function: Function | None) -> list[str]:
    """Returns the names of optimizers that the function itself steps, or that are attributes of `self`."""
    names: dict[str, None] = {}
    for loop in survey.loops:
        for update in loop.updates:
            call = update.node
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                name = survey.script.text(call.args[0] if call.args else call.func.value)
                if survey.script.function(call) is function or name.startswith("self."):
                    names[name] = None
    return list(names)


def _function_of_init(survey: Survey) -> Function | None:
    """Returns the function in which the session is created, or will be."""
    for node in ast.walk(survey.script.tree):
        is_init = isinstance(node, ast.Call) and survey.script.dotted(node.func) == "keepstep.init"
        if is_init or survey.script.calls(node, "init_process_group"):
            return survey.script.function(node)
    return survey.script.function(survey.loops[0].outermost.node)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refusals(survey: Survey) -> Iterator[Finding]:
    """Finds objects that `protect()` refuses with an error."""
    script = survey.script
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Call):
            continue
        if script.calls(node, "FullyShardedDataParallel"):
            model = script.one_line(node.args[0]) if node.args else "model"
            yield script.finding(
                node,
                Edit.REPLACE,
                script.replaced(node, f"fully_shard({model})"),
                "protect() refuses FSDP1, which flattens tensors. FSDP2 is torch.distributed.fsdp.fully_shard(): call "
                "it for each block as well.",
            )
        elif script.calls(node, "DistributedDataParallel"):
            yield from _ddp(survey, node)
        elif script.dotted(node.func) == "torch.optim.LBFGS":
            yield script.finding(
                node,
                Edit.REPLACE,
                script.replaced(node.func, "torch.optim.AdamW"),
                "protect() refuses LBFGS, which computes gradients in the middle of an update. Any optimizer without a "
                "closure will do.",
            )
        elif script.calls(node, "DataLoader") and node.args:
            yield from _iterable(survey, node)


def _ddp(survey: Survey, call: ast.Call) -> Iterator[Finding]:
    script = survey.script
    on = {each.arg for each in call.keywords if isinstance(each.value, ast.Constant) and each.value.value is True}
    if "static_graph" in on:
        yield script.finding(
            call,
            Edit.REPLACE,
            _without(survey, call, "static_graph"),
            "protect() refuses static_graph=True: DDP records its graph in the first step, which a replacement does "
            "not run.",
        )
    if {"find_unused_parameters", "gradient_as_bucket_view"} <= on:
        yield script.finding(
            call,
            Edit.REPLACE,
            _without(survey, call, "gradient_as_bucket_view"),
            "protect() refuses find_unused_parameters with gradient_as_bucket_view: which gradients are views then "
            "depends on earlier steps. Use one of the two.",
        )


def _without(survey: Survey, call: ast.Call, option: str) -> str:
    script = survey.script
    given = [script.one_line(each) for each in call.args]
    given += [f"{each.arg}={script.one_line(each.value)}" for each in call.keywords if each.arg and each.arg != option]
    return script.replaced(call, f"{script.one_line(call.func)}({', '.join(given)})")


def _iterable(survey: Survey, loader: ast.Call) -> Iterator[Finding]:
    """Finds a loader of a training loop whose iterable dataset, defined by the script, has no `state_dict()`."""
    script = survey.script
    iterable = {
        node.name
        for node in ast.walk(script.tree)
        if isinstance(node, ast.ClassDef)
        and any(script.dotted(base).rpartition(".")[2] == "IterableDataset" for base in node.bases)
        and not any(isinstance(each, ast.FunctionDef) and each.name == "state_dict" for each in node.body)
    }
    made = {
        script.text(target): script.text(node.value.func)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
    }
    kind = script.text(getattr(loader.args[0], "func", None)) or made.get(script.text(loader.args[0]), "")
    name = next((script.text(each) for each in getattr(script.statement(loader), "targets", [])), "")
    goes_over = {
        script.text(survey.iterated(loop.run.node.iter)) for loop in survey.loops if isinstance(loop.run.node, ast.For)
    }
    if kind in iterable and name in goes_over:
        yield script.finding(
            loader,
            Edit.REPLACE,
            script.replaced(loader.func, "StatefulDataLoader"),
            "The batches of an IterableDataset cannot be indexed. torchdata's StatefulDataLoader has a "
            f"position to go back to: `{survey.session}.batches({name}, steps=num_steps)` takes the training's length.",
        )
