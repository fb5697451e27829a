"""Findings for scripts in which a framework runs the training loop or creates the process group."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from keepstep.adopt.loops import Survey, TrainingLoop
from keepstep.adopt.objects import Sort
from keepstep.adopt.script import Edit, Finding

ACCELERATOR = "from keepstep.integrations.accelerate import KeepstepAccelerator"
TRL_ARGUMENTS = ("trl.SFTConfig", "trl.DPOConfig", "trl.GRPOConfig", "trl.RewardConfig")
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def framework_findings(survey: Survey) -> list[Finding] | None:
    """Returns the lines to change if a framework trains. None if none does, so that the other rules apply."""
    found = [*_trainer(survey), *_lightning(survey), *_torchtitan(survey)] or [*_accelerate(survey)]
    return found or (None if not _is_adopted(survey) else [])


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
    """Finds trainers of `transformers` and `trl`, and classes derived from them."""
    script = survey.script
    classes = [node for node in ast.walk(script.tree) if isinstance(node, ast.ClassDef)]
    bases = [(base, each) for each in classes for base in each.bases if _is_trainer(script.dotted(base))]
    calls = [
        (node.func, node)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Call) and _is_trainer(script.dotted(node.func))
    ]
    used: list[tuple[ast.expr, ast.AST]] = [*bases, *calls]
    if used and not survey.has_session:
        yield from _before_arguments(survey)
    imported = _import_of(survey, "Trainer", "transformers")
    if imported is not None and any(script.dotted(name) == "transformers.Trainer" for name, _node in used):
        yield script.finding(
            imported,
            Edit.REPLACE,
            "from keepstep.integrations.transformers import KeepstepTrainer as Trainer",
            "The Trainer runs the loop, and KeepstepTrainer has it go on after a failure. Other names of this line "
            "stay. See docs/integrations/transformers.md.",
        )
    for name, node in used:
        if imported is None or script.dotted(name) != "transformers.Trainer":
            yield _protected(survey, name, node)


def _protected(survey: Survey, name: ast.expr, node: ast.AST) -> Finding:
    text = survey.script.text(name)
    return survey.script.finding(
        node,
        Edit.REPLACE,
        survey.script.replaced(name, f"protected({text})"),
        f"The Trainer runs the loop, and protected() of keepstep.integrations.transformers has {text} go on after a "
        "failure. See docs/integrations/transformers.md.",
    )


def _import_of(survey: Survey, name: str, module: str) -> ast.ImportFrom | None:
    """Returns the `from ... import` of a name from a package; None if there is none."""
    for node in ast.walk(survey.script.tree):
        is_module = isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == module
        if isinstance(node, ast.ImportFrom) and is_module and any(alias.name == name for alias in node.names):
            return node
    return None


def _is_trainer(name: str) -> bool:
    root, last = name.partition(".")[0], name.rpartition(".")[2]
    return root in ("transformers", "trl") and last.endswith("Trainer")


def _before_arguments(survey: Survey) -> Iterator[Finding]:
    arguments = next(
        (
            node
            for node in ast.walk(survey.script.tree)
            if isinstance(node, ast.Call)
            and survey.script.dotted(node.func).endswith(("TrainingArguments", "HfArgumentParser", *TRL_ARGUMENTS))
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
        imported = _import_of(survey, "Accelerator", "accelerate")
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
            yield from _framed_loop(survey, loop, name)


def _assigned(survey: Survey, call: ast.Call) -> str:
    statement = survey.script.statement(call)
    return survey.script.text(statement.targets[0]) if isinstance(statement, ast.Assign) else ""


def _framed_loop(survey: Survey, loop: TrainingLoop, owner: str) -> Iterator[Finding]:
    """Suggests the change of the script's own loop, in which a framework prepares the model. `owner` yields epochs."""
    script, inner = survey.script, loop.run.node
    if loop.is_adopted:
        return
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
        f"for {script.one_line(outer.target)} in {owner}.epochs({script.one_line(loader)}, {script.one_line(limit)}):",
        "It protects what was prepared, and hands out the epochs from where the job stands.",
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
            kind = survey.script.dotted(call.func).rpartition(".")[2]
            if kind == "LightningCLI":
                yield _loop_of(survey, call, "Lightning", "lightning")
                continue
            strategy = "KeepstepFabricStrategy" if kind == "Fabric" else "KeepstepStrategy"
            given = next((each.value for each in call.keywords if each.arg == "strategy"), None)
            if given is not None and survey.script.text(getattr(given, "func", given)).endswith(strategy):
                continue
            yield survey.script.finding(
                call,
                Edit.REPLACE,
                _with_strategy(survey, call, f"{strategy}()"),
                f"Lightning runs the loop; {strategy} from keepstep.integrations.lightning has it go on after a "
                "failure. See docs/integrations/lightning.md.",
            )
            if kind == "Fabric":
                name = _assigned(survey, call) or "fabric"
                for loop in survey.loops:
                    yield from _framed_loop(survey, loop, f"{name}.strategy")


def _with_strategy(survey: Survey, call: ast.Call, strategy: str) -> str:
    script = survey.script
    given = [script.one_line(each) for each in call.args]
    given += [
        f"{each.arg}={script.one_line(each.value)}" for each in call.keywords if each.arg not in (None, "strategy")
    ]
    given += [f"strategy={strategy}", *(f"**{script.one_line(each.value)}" for each in call.keywords if not each.arg)]
    return script.replaced(call, f"{script.one_line(call.func)}({', '.join(given)})")


def _torchtitan(survey: Survey) -> Iterator[Finding]:
    imports = [node for node in ast.walk(survey.script.tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    modules = {name: node for node in imports for name in _modules(node)}
    first = next((node for name, node in modules.items() if name.partition(".")[0] == "torchtitan"), None)
    if first is None or "keepstep.integrations.torchtitan" in modules:
        return
    trainer = _import_of(survey, "Trainer", "torchtitan")
    if trainer is None:
        yield _loop_of(survey, first, "torchtitan", "torchtitan")
        return
    yield survey.script.finding(
        trainer,
        Edit.REPLACE,
        "from keepstep.integrations.torchtitan import TitanTrainer as Trainer",
        "torchtitan runs the loop, and TitanTrainer has it go on after a failure. Other names of this line stay. See "
        "docs/integrations/torchtitan.md.",
    )


def _modules(node: ast.ImportFrom | ast.Import) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


def _loop_of(survey: Survey, node: ast.AST, framework: str, module: str) -> Finding:
    return survey.script.finding(
        node,
        Edit.REPLACE,
        f"see docs/integrations/{module}.md",
        f"{framework} runs the loop; keepstep.integrations.{module} protects it.",
    )
