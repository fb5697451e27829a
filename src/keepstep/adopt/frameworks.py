"""Scripts whose loop, or whose process group, belongs to a framework."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator

from keepstep.adopt.loops import Survey, TrainingLoop
from keepstep.adopt.objects import Sort
from keepstep.adopt.script import Edit, Finding

ACCELERATOR = "from keepstep.integrations.accelerate import KeepstepAccelerator"
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def framework_findings(survey: Survey) -> list[Finding] | None:
    """What to change where a framework trains. None if none does, and the other rules hold."""
    found = [*_trainer(survey), *_lightning(survey), *_torchtitan(survey)] or [*_accelerate(survey)]
    return found or (None if not _is_adopted(survey) else [])


def is_there(module: str) -> bool:
    """Whether this release of keepstep has the integration."""
    return importlib.util.find_spec(f"keepstep.integrations.{module}") is not None


def _is_adopted(survey: Survey) -> bool:
    imported = (node.module for node in ast.walk(survey.script.tree) if isinstance(node, ast.ImportFrom))
    return any(
        (module or "").startswith("keepstep.integrations.") and not (module or "").endswith((".ray", ".opentelemetry"))
        for module in imported
    )


def _calls_of(survey: Survey, package: str, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(survey.script.tree):
        if isinstance(node, ast.Call) and survey.script.calls(node, *names, of=package):
            yield node


# ---- Hugging Face Transformers and TRL -------------------------------------------------------------------------------


def _trainer(survey: Survey) -> Iterator[Finding]:
    script = survey.script
    own = {
        node.name: node
        for node in ast.walk(script.tree)
        if isinstance(node, ast.ClassDef) and any(_is_trainer(script.dotted(base)) for base in node.bases)
    }
    made = [
        node for node in ast.walk(script.tree) if isinstance(node, ast.Call) and _is_trainer(script.dotted(node.func))
    ]
    if not own and not made:
        return
    if not survey.has_session:
        yield from _before_arguments(survey)
    for owner in own.values():
        base = next(each for each in owner.bases if _is_trainer(script.dotted(each)))
        yield script.finding(
            owner,
            Edit.REPLACE,
            script.replaced(base, f"KeepstepMixin, {script.text(base)}"),
            "The Trainer runs the loop; keepstep.integrations.transformers.KeepstepMixin has it go on after a failure. "
            "See docs/integrations/transformers.md.",
        )
    for call in made:
        name = script.text(call.func).rpartition(".")[2]
        if name == "Trainer":
            instead = script.replaced(call.func, "KeepstepTrainer")
            why = "KeepstepTrainer from keepstep.integrations.transformers goes on after a failure."
        else:
            instead = script.replaced(call.func, f"protected({script.text(call.func)})")
            why = f"protected() of keepstep.integrations.transformers has {name} go on after a failure."
        yield script.finding(
            call, Edit.REPLACE, instead, f"The Trainer runs the loop. {why} See docs/integrations/transformers.md."
        )


def _is_trainer(name: str) -> bool:
    root, last = name.partition(".")[0], name.rpartition(".")[2]
    return root in ("transformers", "trl") and last.endswith("Trainer")


def _before_arguments(survey: Survey) -> Iterator[Finding]:
    arguments = next(
        (
            node
            for node in ast.walk(survey.script.tree)
            if isinstance(node, ast.Call)
            and survey.script.dotted(node.func).rpartition(".")[2].endswith(("TrainingArguments", "HfArgumentParser"))
        ),
        None,
    )
    if arguments is not None:
        yield survey.script.finding(
            arguments,
            Edit.INSERT_BEFORE,
            "keepstep.init(seed=0)",
            "It has to come before the training arguments are made: they make a process group of their own otherwise. "
            "The script needs `import keepstep`.",
        )


# ---- Hugging Face Accelerate -----------------------------------------------------------------------------------------


def _accelerate(survey: Survey) -> Iterator[Finding]:
    script = survey.script
    for call in _calls_of(survey, "accelerate", "Accelerator"):
        by_name = (
            node
            for node in ast.walk(script.tree)
            if isinstance(node, ast.ImportFrom) and any(alias.name == "Accelerator" for alias in node.names)
        )
        imported = next(by_name, None)
        yield script.finding(
            call if imported is None else imported,
            Edit.REPLACE,
            script.replaced(call.func, "KeepstepAccelerator")
            if imported is None
            else f"{ACCELERATOR} as {script.text(call.func)}",
            "KeepstepAccelerator from keepstep.integrations.accelerate joins the job, and protects what "
            "prepare() gets. See docs/integrations/accelerate.md.",
        )
        name = _assigned(survey, call) or "accelerator"
        for loop in survey.loops:
            if not loop.is_adopted:
                yield from _accelerated_loop(survey, loop, name)


def _assigned(survey: Survey, call: ast.Call) -> str:
    statement = survey.script.statement(call)
    return survey.script.text(statement.targets[0]) if isinstance(statement, ast.Assign) else ""


def _accelerated_loop(survey: Survey, loop: TrainingLoop, accelerator: str) -> Iterator[Finding]:
    script, inner = survey.script, loop.run.node
    outer = None if loop.epochs is None else loop.epochs.node
    if not isinstance(inner, ast.For) or not isinstance(outer, ast.For):
        return
    loader = survey.iterated(inner.iter)
    if survey.objects.sort_of(loader) is not Sort.LOADER:
        return
    limit = outer.iter.args[-1] if isinstance(outer.iter, ast.Call) and outer.iter.args else outer.iter
    yield script.finding(
        outer,
        Edit.REPLACE,
        f"for {script.one_line(outer.target)} in {accelerator}.epochs({script.one_line(loader)}, "
        f"{script.one_line(limit)}):",
        "It protects what was prepared, and hands out the epochs from where the job stands. The number of the epoch "
        "is the attribute `index`.",
    )
    is_counted = isinstance(inner.target, ast.Tuple) and script.text(getattr(inner.iter, "func", None)) == "enumerate"
    names = [script.one_line(each) for each in inner.target.elts] if isinstance(inner.target, ast.Tuple) else []
    step, batch = names if is_counted and len(names) == 2 and names[1].isidentifier() else ("step", "batch")
    yield script.finding(
        inner,
        Edit.REPLACE,
        f"def train_step({step}, {batch}):",
        f"The body of the loop becomes a function, with `{script.one_line(outer.target)}.run(train_step)` behind it. "
        "An interrupted step calls it again. What must not happen twice in it, such as a line of a log, goes through "
        "session.defer().",
    )


# ---- others ----------------------------------------------------------------------------------------------------------


def _lightning(survey: Survey) -> Iterator[Finding]:
    for package in LIGHTNING:
        for call in _calls_of(survey, package, "Trainer", "Fabric", "LightningCLI"):
            yield _loop_of(survey, call, "Lightning", "lightning")


def _torchtitan(survey: Survey) -> Iterator[Finding]:
    for node in ast.walk(survey.script.tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.partition(".")[0] == "torchtitan" for name in names):
            yield _loop_of(survey, node, "torchtitan", "torchtitan")
            return


def _loop_of(survey: Survey, node: ast.AST, framework: str, module: str) -> Finding:
    if is_there(module):
        instead = f"see docs/integrations/{module}.md"
        why = f"{framework} runs the loop; keepstep.integrations.{module} protects it."
    else:
        instead = "nothing: the script stays as it is"
        why = (
            f"{framework} runs the loop. This release of keepstep has no integration: such a script runs, unprotected."
        )
    return survey.script.finding(node, Edit.REPLACE, instead, why)
