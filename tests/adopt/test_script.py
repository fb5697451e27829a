"""A script as text and tree."""

from __future__ import annotations

import ast

import pytest

from keepstep.adopt.flow import Flow
from keepstep.adopt.script import Script
from keepstep.errors import ConfigurationError


def call_of(script: Script) -> ast.Call:
    return next(node for node in ast.walk(script.tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch.distributed as dist\ndist.barrier()", "torch.distributed.barrier"),
        ("from torch import distributed\ndistributed.barrier()", "torch.distributed.barrier"),
        ("from torch.distributed import barrier as wait\nwait()", "torch.distributed.barrier"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("groups[0].barrier()", "groups.barrier"),
        ("make().barrier()", ""),
    ],
)
def test_full_names(text: str, name: str) -> None:
    script = Script(text)
    assert script.dotted(call_of(script).func) == name


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("x = f(1)", "x = NEW"),
        ("x = [\n    'ä', f(1),\n]", "x = ['ä', NEW]"),
        ("if f(1):\n    pass", "if NEW:"),
        ("x = (\r\n    f(\r\n        1))", "x = (NEW)"),
    ],
)
def test_a_statement_with_something_else_in_it(text: str, replaced: str) -> None:
    script = Script(text)
    assert script.replaced(call_of(script), "NEW") == replaced


@pytest.mark.parametrize(
    ("text", "line"), [("x = 1\nprint 1\n", "line 2"), ("f(async=True)", "line 1"), ("a\0", "a.py")]
)
def test_no_python(text: str, line: str) -> None:
    with pytest.raises(ConfigurationError, match=line):
        Script(text, "a.py")


def lines_in_order(text: str) -> list[int]:
    visits = Flow(Script(text)).visits
    return [visit.node.lineno for visit in visits if isinstance(visit.node, ast.stmt)]


def test_functions_are_followed_where_they_are_called() -> None:
    text = "def f():\n    a = 1\ndef g():\n    f()\nb = 2\ng()\n"
    assert lines_in_order(text) == [5, 2, 4, 6]


def test_methods_are_followed() -> None:
    text = "class A:\n    def __init__(self):\n        self.f()\n    def f(self):\n        pass\na = A()\na.f()\n"
    assert lines_in_order(text) == [5, 3, 6, 5, 7]


def test_a_function_that_calls_itself_is_followed_once() -> None:
    assert lines_in_order("def f():\n    f()\nf()\n") == [2, 3]


def test_one_that_another_calls_for_it() -> None:
    assert lines_in_order("def f():\n    pass\nmp.spawn(f, nprocs=2)\n") == [2, 3]
    assert lines_in_order("def f():\n    pass\nmap(f, x)\n") == [3]


def test_a_script_that_calls_without_end_is_left_out() -> None:
    """Each function calls the next one twice: to follow all of it would take for ever."""
    functions = "".join(f"def f{n}():\n    f{n + 1}()\n    f{n + 1}()\n" for n in range(60))
    assert len(Flow(Script(f"{functions}f0()\n")).visits) < 200_000


def test_loops_know_those_around_them() -> None:
    flow = Flow(Script("def f():\n    for b in x:\n        g()\nfor a in y:\n    f()\n"))
    inner, outer = flow.loops
    assert (inner.node.lineno, outer.node.lineno) == (2, 4)
    assert [each.node for each in inner.outer] == [outer.node]
    assert outer.outer == ()


def test_branches_exclude_each_other() -> None:
    flow = Flow(Script("if a:\n    f()\nelse:\n    g()\nif b:\n    h()\n    raise SystemExit\nk()\n"))
    calls = {call.func.id: visit for visit, call in flow.calls() if isinstance(call.func, ast.Name)}
    assert calls["f"].excludes(calls["g"])
    assert calls["h"].excludes(calls["k"])
    assert not calls["f"].excludes(calls["h"])
