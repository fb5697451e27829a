"""Where the package refuses what a script asks for: every ``raise`` of an error of the user's doing, by its source."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType

from keepstep import errors

PACKAGE = Path(errors.__file__).parent
USERS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, (errors.ConfigurationError, errors.UsageError))
}
"""By whose doing: names of the errors that a fresh process would meet as well."""


@dataclass(frozen=True, order=True)
class Site:
    """One ``raise``."""

    function: str
    """``module:Class.function``, the module below ``keepstep``."""
    first_line: int
    last_line: int = field(compare=False)

    def holds(self, file: str, line: int) -> bool:
        """Whether a traceback's line is in it."""
        module = self.function.partition(":")[0].replace(".", "/")
        return Path(file) == PACKAGE / f"{module}.py" and self.first_line <= line <= self.last_line


def sites_in(path: Path) -> Iterator[Site]:
    """All of one file."""
    module = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
    yield from _sites(ast.parse(path.read_text("utf-8")), module, "")


def _sites(node: ast.AST, module: str, name: str) -> Iterator[Site]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = f"{name}.{child.name}".strip(".")
        if (isinstance(child, ast.Raise) and _raised(child) in USERS) or _is_passed_on(child):
            yield Site(f"{module}:{name}", child.lineno, child.end_lineno or child.lineno)
        yield from _sites(child, module, inner)


def _raised(node: ast.Raise) -> str:
    return getattr(getattr(node.exc, "func", None), "id", "")


def _is_passed_on(node: ast.AST) -> bool:
    """An error that is made here, and reported instead of raised."""
    return isinstance(node, ast.Assign) and getattr(getattr(node.value, "func", None), "id", "") in USERS


def reachable_from(method: Callable[..., object]) -> set[Site]:
    """The sites in a function and in all functions of the package that it calls.

    Followed are names that a module defines or imports, the constructors of classes, and methods of ``self``. Calls of
    methods of other objects are not, and what stands in a lambda is called later: see `sites_in` for all of a file.
    """
    found: set[Site] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(inspect.getmodule(method), method.__qualname__)]
    while todo:
        module, name = todo.pop()
        if module is None or (module.__name__, name) in seen:
            continue
        seen.add((module.__name__, name))
        definition = _definition(module, name)
        if definition is None:
            continue
        own = f"{module.__name__.removeprefix('keepstep.')}:{name}"
        found |= {site for site in sites_in(Path(str(module.__file__))) if site.function == own}
        todo += _called(definition, module, name)
    return found


def _definition(module: ModuleType, name: str) -> ast.FunctionDef | None:
    scope: ast.AST = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    for part in name.split("."):
        named = (node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == part)
        scope = next(named, ast.Pass())
    return scope if isinstance(scope, ast.FunctionDef) else None


def _called(definition: ast.FunctionDef, module: ModuleType, name: str) -> Iterator[tuple[ModuleType | None, str]]:
    owner = name.rpartition(".")[0]
    for node in _walk(definition):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id=called):
                yield from _resolved(getattr(module, called, None))
            case ast.Attribute(value=ast.Name(id="self"), attr=called) if owner:
                yield module, f"{owner}.{called}"
            case ast.Attribute(value=ast.Name(id=holder), attr=called):
                yield from _resolved(getattr(getattr(module, holder, None), called, None))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Lambda):
            yield child
            yield from _walk(child)


def _resolved(thing: object) -> Iterator[tuple[ModuleType | None, str]]:
    home = getattr(thing, "__module__", None) or ""
    if isinstance(home, str) and home.startswith("keepstep."):
        importlib.import_module(home)
        name = getattr(thing, "__qualname__", "")
        yield sys.modules[home], f"{name}.__init__" if isinstance(thing, type) else name


def raised_at(trace: TracebackType | None) -> tuple[str, int]:
    """File and line of where an error was raised: the innermost frame."""
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
