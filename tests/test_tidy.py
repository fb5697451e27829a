"""House rules as tests.

Each check reads one file, most of them as a syntax tree, and returns what it finds. Below the checks stand
examples that each of them must reject and examples that it must let pass: a check that has never fired is unproven.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = ("src", "tests", "examples", "benchmarks")

MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8

PICKLES = {"pickle", "_pickle", "cloudpickle", "dill"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
BROAD = {"Exception", "BaseException", "builtins.Exception", "builtins.BaseException"}
VAGUE_NAME = re.compile(r"(Manager|Handler|Helper|Util)s?$")
SILENCER = re.compile(
    r"#\s*(?:type:\s*ignore|(?:ruff:\s*)?noqa)\b(?P<codes>\[[\w\s,-]+\]|:\s*[A-Z]+\d+(?:\s*,\s*[A-Z]+\d+)*)?"
)
# Joined here, for this file must not contain them either.
LOCAL_PATHS = ("/" + "work/", ".." + "/shared")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[int, str]


@dataclass(frozen=True)
class Source:
    """One file: its path relative to the root, with forward slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def comments(self) -> dict[int, str]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for, as a dotted name."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return names

    def dotted(self, node: ast.AST | None) -> str:
        """The full name of `a.b.c` with import aliases replaced, or "" for any other expression."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self.dotted(node.value)):
            return f"{owner}.{node.attr}"
        return ""


# ---- The checks -----------------------------------------------------------------------------------------------------


def has_reason(text: str) -> bool:
    """Two words are the least that can be a reason."""
    return len(re.findall(r"[^\W\d_]{2,}", text)) >= 2


def docstring_lines(node: Function) -> int:
    """How many lines the docstring of a function takes."""
    if ast.get_docstring(node, clean=False) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def long_functions(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, Function):
            num_lines = (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node)
            if num_lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {num_lines} lines, {MAX_FUNCTION_LINES} are allowed"


def many_arguments(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, Function):
            a = node.args
            names = [arg.arg for arg in [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg] if arg]
            num_arguments = len(names) - (names[:1] in (["self"], ["cls"]))
            if num_arguments > MAX_ARGUMENTS:
                yield node.lineno, f"{node.name} takes {num_arguments} arguments, {MAX_ARGUMENTS} are allowed"


def names_broad(source: Source, node: ast.expr | None) -> bool:
    """Whether an except clause, or suppress(), names an exception that covers nearly everything."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(source.dotted(part) in BROAD for part in parts)


def broad_excepts(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "a bare except"
            continue
        caught: list[ast.expr | None] = []
        if isinstance(node, ast.ExceptHandler):
            caught = [node.type]
        elif isinstance(node, ast.Call) and source.dotted(node.func).rpartition(".")[2] == "suppress":
            caught = [*node.args]
        if any(names_broad(source, expression) for expression in caught):
            comment = SILENCER.sub("", source.comments.get(node.lineno, ""))
            if not has_reason(comment):
                yield node.lineno, "catches every exception without a comment that says why"


def pickle_imports(source: Source) -> Iterator[Finding]:
    if source.path == "src/keepstep/integrations/checkpoint_engine.py":
        return  # the protocol of checkpoint-engine's consumers: off unless `pickled=True`; it unpickles nothing
    for node in source.nodes:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            if module.partition(".")[0] in PICKLES:
                yield node.lineno, f"imports {module}; messages are msgspec, weights are raw buffers"


def environment_reads(source: Source) -> Iterator[Finding]:
    if source.path == "src/keepstep/config.py":
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name) and source.dotted(node) in ENVIRONMENT:
            comment = source.comments.get(node.lineno, "")
            mark = re.search(r"#\s*environ:(.*)", comment)
            if not (mark and has_reason(mark[1])):
                yield node.lineno, "touches the environment; only config.py does, or a line with `# environ: reason`"


def vague_class_names(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and VAGUE_NAME.search(node.name):
            yield node.lineno, f"{node.name}: name the class for what it is"


def sleeps(source: Source) -> Iterator[Finding]:
    if "sleep" not in source.text:
        return  # to parse all tests takes seconds
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name) and source.dotted(node) == "time.sleep":
            yield node.lineno, "time.sleep; wait for the thing itself, with a deadline"


def unexplained_silencers(source: Source) -> Iterator[Finding]:
    if not SILENCER.search(source.text):
        return
    for line, comment in source.comments.items():
        found = list(SILENCER.finditer(comment))
        if any(not silencer["codes"] for silencer in found):
            yield line, "silences a checker without naming the code"
        elif found and not has_reason(SILENCER.sub("", comment)):
            yield line, "silences a checker without saying why"


def local_paths(source: Source) -> Iterator[Finding]:
    for line, text in enumerate(source.text.splitlines(), start=1):
        for path in LOCAL_PATHS:
            if path in text:
                yield line, f"{path} exists on one machine only"


def shared_class_names(sources: Iterable[Source]) -> list[str]:
    """Public classes of the package that have the same name."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.path)
    return [f"class {name} is in {' and '.join(paths)}" for name, paths in places.items() if len(paths) > 1]


Check = Callable[[Source], Iterator[Finding]]
# Each check with the folders that it holds for.
CHECKS: dict[Check, tuple[str, ...]] = {
    long_functions: ("src/keepstep",),
    many_arguments: ("src/keepstep",),
    broad_excepts: ("src/keepstep",),
    pickle_imports: ("src/keepstep",),
    environment_reads: ("src/keepstep",),
    vague_class_names: ("src/keepstep",),
    sleeps: ("src", "tests"),
    unexplained_silencers: CODE,
}


# ---- The project holds the rules ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def code() -> list[Source]:
    """All Python files: each is parsed once, and forgotten when the last test of this module has run."""
    paths = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


@pytest.fixture(scope="module")
def package(code: list[Source]) -> list[Source]:
    return within(("src/keepstep",), code)


def within(folders: tuple[str, ...], sources: list[Source]) -> list[Source]:
    return [source for source in sources if source.path.startswith(tuple(f"{folder}/" for folder in folders))]


def project_files() -> list[Path]:
    """What git tracks or would track. An unpacked archive has no git: there, the folders that it was packed from."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        folders = [path for name in (*CODE, "docs") for path in (ROOT / name).rglob("*")]
        return [path for path in [*ROOT.glob("*.md"), *folders] if path.is_file() and path.suffix != ".pyc"]
    # A file that was deleted but not yet committed is still listed.
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def violations(check: Check, sources: list[Source]) -> list[str]:
    return [f"{source.path}:{line}: {what}" for source in sources for line, what in check(source)]


def fail_with(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join([f"{len(found)} found:", *found]), pytrace=False)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_code_is_tidy(check: Check, code: list[Source]) -> None:
    sources = within(CHECKS[check], code)
    assert sources, "nothing was read, so nothing was checked"
    fail_with(violations(check, sources))


def test_a_class_has_its_name_alone(package: list[Source]) -> None:
    fail_with(shared_class_names(package))


def test_a_shared_class_name_is_found() -> None:
    one, other = (Source(f"src/keepstep/{name}.py", "class Line:\n    pass\nclass _Own:\n    pass\n") for name in "ab")
    assert shared_class_names([one]) == []
    assert shared_class_names([one, other]) == ["class Line is in src/keepstep/a.py and src/keepstep/b.py"]


def test_no_file_names_a_path_of_one_machine() -> None:
    found: list[str] = []
    for path in project_files():
        try:
            source = Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # an image or other bytes
        found += violations(local_paths, [source])
    fail_with(found)


# ---- Each check can fail --------------------------------------------------------------------------------------------

ARGUMENTS = ", ".join(f"a{i}" for i in range(MAX_ARGUMENTS))
BODY = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)

REJECTED: list[tuple[Check, str, list[int]]] = [
    (long_functions, f"def f():\n{BODY}    x = 1\n", [1]),
    (long_functions, f'\nasync def f():\n    """Doc."""\n{BODY}    x = 1\n', [2]),
    (many_arguments, f"def f({ARGUMENTS}, b): ...", [1]),
    (many_arguments, f"def f({ARGUMENTS}, *rest): ...", [1]),
    (many_arguments, f"class A:\n    def f(self, {ARGUMENTS}, *, b): ...", [2]),
    (broad_excepts, "try: ...\nexcept: ...  # a good reason", [2]),
    (broad_excepts, "try: ...\nexcept Exception: ...", [2]),
    (broad_excepts, "try: ...\nexcept BaseException as error: ...  # noqa: BLE001", [2]),
    (broad_excepts, "try: ...\nexcept (OSError, Exception): ...", [2]),
    (broad_excepts, "from contextlib import suppress as s\nwith s(Exception): ...", [2]),
    (pickle_imports, "import os, pickle", [1]),
    (pickle_imports, "def f():\n    from cloudpickle import dumps", [2]),
    (environment_reads, "import os\nx = os.environ['A']\ny = os.getenv('B')", [2, 3]),
    (environment_reads, "from os import environ as e\nx = e.get('A')", [2]),
    (environment_reads, "import os\nx = dict(os.environ)  # environ:", [2]),
    (vague_class_names, "class GroupManager: ...\nclass PathUtils: ...\nclass Helper: ...", [1, 2, 3]),
    (sleeps, "import time as t\nt.sleep(1)", [2]),
    (sleeps, "from time import sleep\nwait = sleep", [2]),
    (unexplained_silencers, "x = 1  # noqa\ny = 1  # type: ignore", [1, 2]),
    (unexplained_silencers, "x = 1  # noqa: E501\ny = 1  # type: ignore[misc]", [1, 2]),
    (unexplained_silencers, "# ruff: noqa\n", [1]),
    (local_paths, f"first\nsee {LOCAL_PATHS[0]}main", [2]),
    (local_paths, f"see {LOCAL_PATHS[1]}/notes", [1]),
]

ACCEPTED: list[tuple[Check, str]] = [
    (long_functions, f'def f():\n    """Doc.\n\n    More.\n    """\n{BODY}'),
    (many_arguments, f"class A:\n    def f(self, {ARGUMENTS}): ..."),
    (broad_excepts, "try: ...\nexcept OSError: ..."),
    (broad_excepts, "try: ...\nexcept Exception: ...  # noqa: BLE001 the user's code may raise anything"),
    (pickle_imports, "import pickles"),
    (environment_reads, "import os\nx = dict(os.environ)  # environ: a child inherits ours"),
    (environment_reads, "environ = {}\nx = environ['A']"),
    (vague_class_names, "class Session: ...\nclass Managers_: ..."),
    (sleeps, "import asyncio\nasync def f():\n    await asyncio.sleep(1)"),
    (unexplained_silencers, "x = 1  # noqa: E501 the table reads better whole"),
    (unexplained_silencers, "x = 1  # type: ignore[misc]  # upstream ships no types"),
    (unexplained_silencers, "x = '# noqa'  # a string, not a comment"),
    (local_paths, "the framework/worker pair"),
]


def case_ids(case: object) -> str | None:
    return getattr(case, "__name__", None)


@pytest.mark.parametrize(("check", "text", "lines"), REJECTED, ids=case_ids)
def test_check_rejects(check: Check, text: str, lines: list[int]) -> None:
    assert [line for line, _ in check(Source("src/keepstep/part.py", text))] == lines


@pytest.mark.parametrize(("check", "text"), ACCEPTED, ids=case_ids)
def test_check_accepts(check: Check, text: str) -> None:
    assert list(check(Source("src/keepstep/part.py", text))) == []


def test_every_check_is_proven_both_ways() -> None:
    checks = {*CHECKS, local_paths}
    assert {check for check, *_ in REJECTED} == checks
    assert {check for check, *_ in ACCEPTED} == checks


def test_config_may_read_the_environment() -> None:
    text = "import os\nx = os.environ"
    assert list(environment_reads(Source("src/keepstep/config.py", text))) == []
    assert list(environment_reads(Source("src/keepstep/agent/config.py", text))) != []


def test_violations_name_file_and_line() -> None:
    assert violations(sleeps, [Source("src/a.py", "import time\ntime.sleep(1)")])[0].startswith("src/a.py:2: ")
