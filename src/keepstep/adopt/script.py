"""A training script as text and syntax tree, and findings about its lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from keepstep.errors import ConfigurationError

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While


class Edit(StrEnum):
    """What to do with a line."""

    REPLACE = "replace"
    INSERT_BEFORE = "insert before"
    INSERT_AFTER = "insert after"
    REMOVE = "remove"
    MOVE = "move"


@dataclass(frozen=True)
class Finding:
    """One line of a script to change.

    Attributes:
        line: its number, from 1.
        source: its text, without indentation.
        edit: what to do with it.
        instead: the text to write; for `Edit.MOVE` the place where the line belongs, for `Edit.REMOVE` nothing.
        why: the reason, and the rule of keepstep behind it.
    """

    line: int
    source: str
    edit: Edit
    instead: str
    why: str


class Script:
    """The source of a script, which is parsed and never run.

    Args:
        text: the source.
        name: name of the file, for errors.

    Raises:
        ConfigurationError: this interpreter cannot parse it; the message names the line.
    """

    def __init__(self, text: str, name: str = "script") -> None:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise ConfigurationError(f"{name}, line {error.lineno}: no Python: {error.msg}") from None
        except ValueError as error:  # a null byte, before Python 3.11.4
            raise ConfigurationError(f"{name}: no Python: {error}") from None
        self.lines = text.split("\n")
        self._bytes = text.encode()
        self._starts = [0, *(at + 1 for at, byte in enumerate(self._bytes) if byte == ord("\n"))]
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._aliases = _aliases(self.tree)

    # ---- names ----------------------------------------------------------------------------------------------------

    def text(self, node: ast.AST | None) -> str:
        """Returns the name `a.b.c` as in the script; for `a.b[0]` without the index; for other expressions ""."""
        match node:
            case ast.Name():
                return node.id
            case ast.Attribute():
                owner = self.text(node.value)
                return f"{owner}.{node.attr}" if owner else ""
            case ast.Subscript():
                return self.text(node.value)
            case _:
                return ""

    def dotted(self, node: ast.AST | None) -> str:
        """Returns the full name of `a.b.c`, with aliases of imports resolved; for other expressions ""."""
        if isinstance(node, ast.Subscript):
            return ""
        head, dot, tail = self.text(node).partition(".")
        return self._aliases.get(head, head) + dot + tail

    def calls(self, node: ast.AST, *names: str, of: str = "torch") -> bool:
        """Whether a node calls one of these functions or classes of a package, in any of its modules."""
        if not isinstance(node, ast.Call):
            return False
        root, _, rest = self.dotted(node.func).partition(".")
        return root == of and rest.rpartition(".")[2] in names

    # ---- places ---------------------------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the ancestors of a node, from the inside out."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Returns the statement that a node is, or is part of."""
        for each in (node, *self.ancestors(node)):
            if isinstance(each, ast.stmt):
                return each
        raise ValueError("a node of no statement")

    def function(self, node: ast.AST) -> Function | None:
        """Returns the function around a node; None at module level."""
        return next((each for each in self.ancestors(node) if isinstance(each, Function)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Returns the class around a node; None if there is none."""
        return next((each for each in self.ancestors(node) if isinstance(each, ast.ClassDef)), None)

    def siblings(self, statement: ast.stmt) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Returns the statements of the same block before a statement, and those after it."""
        parent = self._parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                at = block.index(statement)
                return block[:at], block[at + 1 :]
        return [], []

    # ---- text -----------------------------------------------------------------------------------------------------

    def line(self, node: ast.AST) -> int:
        """Returns the number of the line in which a node begins."""
        return int(getattr(node, "lineno", 1))

    def one_line(self, node: ast.AST) -> str:
        """Returns the source of an expression or a simple statement on one line; for a compound one, its header."""
        return _on_one_line(self._bytes[slice(*self._extent(node))])

    def replaced(self, node: ast.AST, text: str) -> str:
        """Returns the statement around a node, on one line, with the node replaced by other text."""
        first, last = self._extent(self.statement(node))
        begin, end = self._extent(node)
        return _on_one_line(self._bytes[first:begin] + text.encode() + self._bytes[end:last])

    def finding(self, node: ast.AST, edit: Edit, instead: str, why: str) -> Finding:
        """Returns a finding about the line in which a node begins."""
        number = self.line(node)
        return Finding(number, self.lines[number - 1].strip(), edit, instead, " ".join(why.split()))

    def _extent(self, node: ast.AST) -> tuple[int, int]:
        """Returns start and end of a node in bytes, because the columns of `ast` count UTF-8 bytes."""
        first = self._starts[self.line(node) - 1] + int(getattr(node, "col_offset", 0))
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:  # only the header of a compound statement
            return first, self._extent(body[0])[0]
        return first, self._starts[int(getattr(node, "end_lineno", 1)) - 1] + int(getattr(node, "end_col_offset", 0))


def _on_one_line(source: bytes) -> str:
    lines = [line.strip() for line in source.decode().strip().splitlines()]
    joined = lines[0] if lines else ""
    for line in lines[1:]:
        is_tight = joined.endswith(("(", "[", "{")) or line[:1] in (")", "]", "}")
        joined = joined.rstrip(",") + line if line[:1] in (")", "]", "}") else joined + ("" if is_tight else " ") + line
    return joined


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Returns imported name -> full name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names
