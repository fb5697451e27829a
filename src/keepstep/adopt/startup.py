"""Findings about the code before the first step: joining the job, ranks and devices, and actions once per job."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from keepstep.adopt.flow import Visit
from keepstep.adopt.loops import Survey
from keepstep.adopt.objects import Sort
from keepstep.adopt.script import Edit, Finding, Function

WRITES = ("write_text", "write_bytes", "unlink")
"""Methods of paths that write or remove files."""
REMOVALS = ("shutil.rmtree", "os.remove", "os.unlink", "os.rmdir", "torch.save")


# ---- joining ---------------------------------------------------------------------------------------------------------


def joining(survey: Survey) -> Iterator[Finding]:
    """Suggests `keepstep.init()` and its import, and finds processes that the script starts by itself."""
    script = survey.script
    calls = [node for node in ast.walk(script.tree) if script.calls(node, "init_process_group")]
    if not survey.has_session and (calls or survey.loops):
        yield from _import(survey)
    for call in calls:
        conditions = [each for each in script.ancestors(call) if isinstance(each, ast.If)]
        always = "Call it unconditionally: under plain python the world size is 1." if conditions else ""
        yield script.finding(
            call,
            Edit.REPLACE,
            f"{survey.session} = keepstep.init(seed={_seed(survey)})",
            f"It joins the job instead of init_process_group(), and seeds what the script builds. {always} "
            "destroy_process_group() may stay.",
        )
    if not calls and not survey.has_session and survey.loops:
        yield from _without_group(survey)
    yield from _own_processes(survey)


def _import(survey: Survey) -> Iterator[Finding]:
    script = survey.script
    imports = [node for node in script.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    has_import = any(
        isinstance(node, ast.Import) and any(alias.name == "keepstep" for alias in node.names)
        for node in ast.walk(script.tree)
    )
    if imports and not has_import:
        yield script.finding(imports[-1], Edit.INSERT_AFTER, "import keepstep", "The script does not import it.")


def _seed(survey: Survey) -> str:
    """Returns the seed that the script gives to torch, if it is a number; else "0"."""
    for node in ast.walk(survey.script.tree):
        if isinstance(node, ast.Call) and survey.script.calls(node, "manual_seed") and len(node.args) == 1:
            given = node.args[0]
            if isinstance(given, ast.Constant) and isinstance(given.value, int):
                return str(given.value)
    return "0"


def _without_group(survey: Survey) -> Iterator[Finding]:
    """Suggests `keepstep.init()` in a script that joins no process group."""
    sorts = (Sort.MODEL, Sort.OPTIMIZER, Sort.LOADER, Sort.SCALER)
    nodes = {made.node for made in survey.objects.made if made.sort in sorts}
    first = next((visit.node for visit in survey.at_start() if visit.node in nodes), None)
    if first is not None:
        yield survey.script.finding(
            first,
            Edit.INSERT_BEFORE,
            f"{survey.session} = keepstep.init(seed={_seed(survey)})",
            "The script joins no process group. With several ranks the model also needs DistributedDataParallel, and "
            "each rank its own samples.",
        )


def _own_processes(survey: Survey) -> Iterator[Finding]:
    script = survey.script
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Call) or not script.calls(node, "spawn", "start_processes") or not node.args:
            continue
        given = next((each.value for each in node.keywords if each.arg == "args"), None)
        rest = [script.one_line(each) for each in given.elts] if isinstance(given, ast.Tuple) else []
        first = f"{survey.session}.device" if survey.has_session else "0"
        yield script.finding(
            node,
            Edit.REPLACE,
            f"{script.one_line(node.args[0])}({', '.join([first, *rest])})",
            "`keepstep run` starts the ranks, as torchrun does. The first argument was the number of the process: a "
            "rank is not known at the start, and the device is session.device.",
        )


# ---- ranks and devices -----------------------------------------------------------------------------------------------


def ranks(survey: Survey) -> Iterator[Finding]:
    """Finds code that reads the rank before the loop, and devices that are selected by the local rank."""
    local: set[str] = set()
    for visit in survey.at_start():
        for asked, name in _ranks_in(survey, visit.node):
            assigned = _assigned(survey, asked)
            if name == "LOCAL_RANK" and assigned:
                local.add(assigned)
            yield _rank(survey, asked, name, assigned)
    for node in ast.walk(survey.script.tree):
        if isinstance(node, ast.Call):
            yield from _device(survey, node, local)
        elif isinstance(node, ast.JoinedStr):
            yield from _device_name(survey, node, local)
    yield from _samplers(survey)


def _ranks_in(survey: Survey, node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yields the expressions that read a rank, each with "RANK" or "LOCAL_RANK".

    It searches a call, or the parts of a statement outside of its calls.
    """
    script = survey.script
    if isinstance(node, ast.Call):
        name = script.dotted(node.func)
        if script.calls(node, "get_rank", "get_local_rank") and name.startswith("torch.distributed"):
            yield node, "RANK" if name.endswith("get_rank") and "local" not in name else "LOCAL_RANK"
        elif name in ("os.getenv", "os.environ.get") and node.args and _variable(node.args[0]):
            yield node, _variable(node.args[0])
        return
    if isinstance(node, ast.stmt) and not survey.is_of_session(getattr(node, "value", node), "protect"):
        for part in _own_expressions(node):
            if isinstance(part, ast.Subscript) and script.dotted(part.value) == "os.environ" and _variable(part.slice):
                yield part, _variable(part.slice)
            elif isinstance(part, ast.Compare) and _asks_environment(survey, part):
                yield part, _variable(part.left)
            elif isinstance(part, ast.Attribute) and script.text(part) == f"{survey.session}.rank":
                yield part, "RANK"
            elif isinstance(part, ast.Attribute) and script.text(part) == f"{survey.session}.local_rank":
                yield part, "LOCAL_RANK"


def _own_expressions(node: ast.stmt) -> Iterator[ast.AST]:
    """Yields the nodes of a statement itself, without the statements of its block."""
    waiting: list[ast.AST] = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [
            child
            for child in ast.iter_child_nodes(each)
            if not isinstance(child, ast.stmt | ast.Lambda | ast.ExceptHandler | ast.match_case)
        ]


def _variable(node: ast.AST) -> str:
    """Returns "RANK" or "LOCAL_RANK", which a spare does not have, if the node is this string; else ""."""
    names = ("RANK", "LOCAL_RANK")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names else ""


def _asks_environment(survey: Survey, node: ast.Compare) -> bool:
    is_in = len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn) and bool(_variable(node.left))
    return is_in and survey.script.dotted(node.comparators[0]) == "os.environ"


def _assigned(survey: Survey, node: ast.AST) -> str:
    """Returns the name to which a rank is assigned, directly or through `int()`; else ""."""
    statement = survey.script.statement(node)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    value = statement.value
    if isinstance(value, ast.Call) and survey.script.text(value.func) == "int" and value.args:
        value = value.args[0]
    return survey.script.text(statement.targets[0]) if value is node else ""


def _rank(survey: Survey, node: ast.expr, name: str, assigned: str) -> Finding:
    script, session = survey.script, survey.session
    compared = node if isinstance(node, ast.Compare) else _comparison(survey, node)
    why = ""
    if compared is not None and name == "RANK" and _is_about_joining(survey, compared):
        return script.finding(node, Edit.REMOVE, "", "keepstep.init() needs no condition.")
    if compared is not None and name == "RANK" and (compared is node or _is_sentinel(compared)):
        instead = script.replaced(compared, f"{session}.world_size > 1")
        why = "A spare that waits for a rank has no RANK in its environment, and would train alone."
    elif compared is not None and name == "RANK" and _is_zero(compared):
        instead = script.replaced(compared, f"{session}.is_main")
        why = (
            "Asking for the rank before the loop blocks a spare there; is_main does not. What must happen once per "
            "job belongs under session.once()."
        )
    elif name == "LOCAL_RANK":
        instead = script.replaced(_as_number(survey, node), f"{session}.device")
        why = "LOCAL_RANK does not name the device under keepstep, and a spare that waits for a rank has none."
    else:
        whole = script.replaced(_as_number(survey, node), f"{session}.rank")
        instead = f"{whole}, inside of the loop" if assigned else f"{session}.rank, inside of the loop"
        why = (
            "Asking for the rank before the loop blocks a spare there, and RANK is not in its environment: the "
            "rest of the start then adds to the recovery. For `rank == 0`, is_main does not wait."
        )
    used = sorted(set(_lines_with(survey, assigned)) - {script.line(node)}) if assigned else []
    if used:
        why += f" `{assigned}` is used in {_in_lines(used)}."
    if name == "LOCAL_RANK" and (counted := sorted(set(_lines_as_number(survey, assigned)))):
        why += (
            f" In {_in_lines(counted)} it is a number: write {session}.local_rank there, inside of the loop, and for "
            f"`== 0` {session}.is_main."
        )
    if survey.is_in_front_of_init(script.statement(node)):
        why += " keepstep.init() must come before this line."
    return script.finding(node, Edit.REPLACE, instead, why)


def _is_about_joining(survey: Survey, compared: ast.Compare) -> bool:
    """Whether a condition only guards `init_process_group()`."""
    around = survey.script.statement(compared)
    if not isinstance(around, ast.If) or around.test is not compared or len(around.body) != 1:
        return False
    return any(survey.script.calls(each, "init_process_group") for each in ast.walk(around.body[0]))


def _as_number(survey: Survey, node: ast.expr) -> ast.expr:
    """Returns the `int(...)` around an environment variable, if there is one; else the node itself."""
    around = next(survey.script.ancestors(node))
    return around if isinstance(around, ast.Call) and survey.script.text(around.func) == "int" else node


def _comparison(survey: Survey, node: ast.expr) -> ast.Compare | None:
    """Returns the comparison with the rank as one side; None if there is none."""
    around = next(survey.script.ancestors(_as_number(survey, node)))
    return around if isinstance(around, ast.Compare) else None


def _is_sentinel(compared: ast.Compare) -> bool:
    """Whether it compares with -1 or None, as scripts do to check whether torchrun has started them."""
    return any(ast.unparse(end) in ("-1", "None", "'-1'") for end in compared.comparators)


def _is_zero(compared: ast.Compare) -> bool:
    ends = compared.comparators
    return isinstance(compared.ops[0], ast.Eq) and isinstance(ends[0], ast.Constant) and ends[0].value in (0, "0")


def _lines_with(survey: Survey, name: str) -> Iterator[int]:
    for node in ast.walk(survey.script.tree):
        is_read = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        if is_read and survey.script.text(node) == name:
            yield survey.script.line(node)


def _lines_as_number(survey: Survey, name: str) -> Iterator[int]:
    """Yields the lines that use a name as a number, in comparisons or arithmetic. A device cannot be used so."""
    for node in ast.walk(survey.script.tree):
        counts = isinstance(node, ast.Compare | ast.BinOp | ast.AugAssign)
        if counts and any(survey.script.text(child) == name for child in ast.iter_child_nodes(node)):
            yield survey.script.line(node)


def _in_lines(lines: list[int]) -> str:
    return f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"


def _device(survey: Survey, call: ast.Call, local: set[str]) -> Iterator[Finding]:
    """Finds `set_device(local_rank)`, `device("cuda", local_rank)` and `device_ids=[local_rank]`."""
    script = survey.script
    why = "LOCAL_RANK does not name the device under keepstep: session.device does."
    if script.calls(call, "set_device") and call.args and _is_local(survey, call.args[0], local):
        yield script.finding(call, Edit.REPLACE, script.replaced(call.args[0], f"{survey.session}.device"), why)
    elif script.calls(call, "device") and call.args and _is_local(survey, call.args[-1], local):
        yield script.finding(call, Edit.REPLACE, script.replaced(call, f"{survey.session}.device"), why)
    elif script.calls(call, "DistributedDataParallel"):
        ids = next((each.value for each in call.keywords if each.arg == "device_ids"), None)
        if isinstance(ids, ast.List) and ids.elts and _is_local(survey, ids.elts[0], local):
            yield script.finding(call, Edit.REPLACE, script.replaced(ids, f"[{survey.session}.device]"), why)


def _device_name(survey: Survey, node: ast.JoinedStr, local: set[str]) -> Iterator[Finding]:
    """Finds `f"cuda:{local_rank}"`."""
    parts = [each.value for each in node.values if isinstance(each, ast.FormattedValue)]
    begins = node.values[0] if node.values else None
    if not isinstance(begins, ast.Constant) or begins.value != "cuda:" or len(parts) != 1:
        return
    if _is_local(survey, parts[0], local):
        call = next(survey.script.ancestors(node))
        whole = call if survey.script.calls(call, "device") else node
        yield survey.script.finding(
            node,
            Edit.REPLACE,
            survey.script.replaced(whole, f"{survey.session}.device"),
            "LOCAL_RANK does not name the device under keepstep: session.device does.",
        )


def _is_local(survey: Survey, node: ast.expr, local: set[str]) -> bool:
    return survey.script.text(node) in local


def _samplers(survey: Survey) -> Iterator[Finding]:
    script = survey.script
    for visit in survey.at_start():
        call = visit.node
        if not isinstance(call, ast.Call) or not script.calls(call, "DistributedSampler"):
            continue
        rank = next((each.value for each in call.keywords if each.arg == "rank"), None)
        rank = call.args[2] if rank is None and len(call.args) > 2 else rank
        if rank is None or isinstance(rank, ast.Constant) or script.text(rank).endswith("data_rank"):
            continue
        options = [each for each in call.keywords if each.arg not in ("rank", "num_replicas")]
        given = [*map(script.one_line, [*call.args[:1], *call.args[3:]])]
        given += [f"{each.arg}={script.one_line(each.value)}" for each in options]
        yield script.finding(
            call,
            Edit.REPLACE,
            script.replaced(call, f"{script.one_line(call.func)}({', '.join(given)})"),
            "Without num_replicas and rank the sampler asks for them when it is used: a spare can make it before it "
            "has a rank.",
        )


# ---- once ------------------------------------------------------------------------------------------------------------


def once(survey: Survey) -> Iterator[Finding]:
    """Finds files that the script writes or removes before the loop, and logs that it opens there."""
    for visit in survey.at_start():
        if isinstance(visit.node, ast.Call) and not _is_under_once(survey, visit):
            yield from _once(survey, visit.node)


def _once(survey: Survey, call: ast.Call) -> Iterator[Finding]:
    script = survey.script
    name = script.dotted(call.func)
    last = name.rpartition(".")[2] or getattr(call.func, "attr", "")
    line = script.one_line(script.statement(call))
    if last == "SummaryWriter" or name == "wandb.init":
        is_open = "wandb.run" if name == "wandb.init" else _assigned(survey, call) or "writer"
        yield script.finding(
            call,
            Edit.MOVE,
            f"into the loop, after the update: `if {survey.session}.rank == 0 and {is_open} is None:`",
            f"{last if last != 'init' else name} opens a log when the script starts, and a spare and each replacement "
            "start it as well. A replacement of rank 0 needs one of its own, and a spare none.",
        )
    elif name in REMOVALS or last in WRITES or _truncates(name, last, call):
        yield script.finding(
            call,
            Edit.REPLACE,
            f'if {survey.session}.once("{_label(last)}"):\n    {line}',
            "A spare and each replacement run the script's start as well, and would do this again in the middle of the "
            "job. once() is True in one process of the job.",
        )


def _truncates(name: str, last: str, call: ast.Call) -> bool:
    """Whether a call is `open(..., "w")` or `path.open("w")`, or the same with "x"."""
    if name != "open" and last != "open":
        return False
    position = 1 if name in ("open", "io.open") else 0
    mode = next((each.value for each in call.keywords if each.arg == "mode"), None)
    mode = call.args[position] if mode is None and len(call.args) > position else mode
    if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
        return False
    return len(mode.value) <= 3 and bool(set("wx") & set(mode.value))


def _label(last: str) -> str:
    return {"rmtree": "clean", "remove": "clean", "unlink": "clean", "rmdir": "clean", "save": "save"}.get(last, "log")


def _is_under_once(survey: Survey, visit: Visit) -> bool:
    """Whether an `if` or `with` around the visit, or around a call that led to it, uses `session.once()`."""
    script = survey.script
    for node in (visit.node, *visit.stack):
        for around in script.ancestors(node):
            parts = [around.test] if isinstance(around, ast.If) else []
            parts += [item.context_expr for item in around.items] if isinstance(around, ast.With) else []
            if any(survey.is_of_session(each, "once") for part in parts for each in ast.walk(part)):
                return True
            if isinstance(around, Function):
                break
    return False
