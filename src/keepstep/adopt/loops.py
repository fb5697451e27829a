"""The training loops of a script, and queries of the rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep.adopt.flow import Flow, LoopRun, Visit
from keepstep.adopt.objects import Objects, Sort
from keepstep.adopt.script import Script

PROGRESS_BARS = ("enumerate", "tqdm", "trange", "track", "iter")
"""Calls that yield the elements of their argument."""
HANDED_OUT = ("steps", "batches", "epochs")
"""Methods of a session over which a loop iterates."""


@dataclass(frozen=True)
class TrainingLoop:
    """A loop with a backward and an update in each iteration, or a loop over a session's steps, batches or epochs.

    Attributes:
        run: the loop.
        updates: calls of `optimizer.step()` or `scaler.step()` in it.
        backwards: calls of `backward()` in it.
        is_adopted: whether keepstep yields its steps already.
    """

    run: LoopRun
    updates: list[Visit] = field(default_factory=list)
    backwards: list[Visit] = field(default_factory=list)
    is_adopted: bool = False

    @property
    def epochs(self) -> LoopRun | None:
        """The innermost loop around it; None if there is none."""
        return self.run.outer[0] if self.run.outer else None

    @property
    def outermost(self) -> LoopRun:
        """The outermost loop around it, or the loop itself."""
        return self.run.outer[-1] if self.run.outer else self.run


class Survey:
    """The analysed script that the rules use.

    Attributes:
        script: its text and syntax tree.
        flow: the order of its calls and statements.
        objects: the kinds of its objects.
        loops: its training loops.
        session: the name of the session, even if the script does not have one yet.
        has_session: whether the script calls `keepstep.init()`.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.flow = Flow(script)
        self.objects = Objects(script)
        self.session, self.has_session = self._session()
        self.loops = self._training_loops()
        if not self.loops:
            self.flow.enter_the_rest()
            self.loops = self._training_loops()

    @property
    def is_protected(self) -> bool:
        """Whether the script calls `session.protect()`."""
        return any(self.is_of_session(call, "protect") for _visit, call in self.flow.calls())

    def is_in_front_of_init(self, node: ast.AST) -> bool:
        """Whether a line runs before the script calls `keepstep.init()` or `init_process_group()`."""
        for visit in self.flow.visits:
            if visit.node is node:
                return True
            is_init = isinstance(visit.node, ast.Call) and self.script.dotted(visit.node.func) == "keepstep.init"
            if is_init or self.script.calls(visit.node, "init_process_group"):
                return False
        return False

    def at_start(self) -> Iterator[Visit]:
        """Yields the visits before the first training loop, the first of each node."""
        seen: set[ast.AST] = set()
        if not self.loops:
            return
        first = self.loops[0].outermost
        for visit in self.flow.visits:
            if visit.root == first.root and visit.at < first.first and visit.node not in seen:
                seen.add(visit.node)
                yield visit

    def in_loop(self, loop: LoopRun) -> list[Visit]:
        """Returns the visits in a loop."""
        return [visit for visit in self.flow.visits[loop.first : loop.last] if loop.holds(visit)]

    def iterated(self, node: ast.expr) -> ast.expr:
        """Returns the expression over which a loop iterates, without `enumerate` and progress bars."""
        while isinstance(node, ast.Call) and node.args:
            name = self.script.dotted(node.func).rpartition(".")[2]
            if any(self.is_of_session(node, each) for each in HANDED_OUT):
                break
            if name not in PROGRESS_BARS and self.objects.sort_of(node.args[0]) is not Sort.LOADER:
                break
            node = node.args[0]
        return node

    # ---- loops ----------------------------------------------------------------------------------------------------

    def _session(self) -> tuple[str, bool]:
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Call) and self.script.dotted(node.func) == "keepstep.init":
                statement = self.script.statement(node)
                name = self.script.text(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
                return name or "session", True
        return "session", False

    def is_of_session(self, node: ast.AST, method: str) -> bool:
        """Whether a node calls a method of the session."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != method:
            return False
        return self.script.text(node.func.value) in (self.session, f"self.{self.session}", "session", "self.session")

    def hands_out_steps(self, node: ast.AST) -> bool:
        """Whether a loop iterates over the steps, batches or epochs of a session, or over the epochs of a framework."""
        if not isinstance(node, ast.For):
            return False
        each = self.iterated(node.iter)
        if isinstance(each, ast.Call) and self.script.text(each.func).endswith(
            ("accelerator.epochs", "strategy.epochs")
        ):
            return True
        return any(self.is_of_session(each, name) for name in HANDED_OUT)

    def _training_loops(self) -> list[TrainingLoop]:
        updates = [visit for visit, call in self.flow.calls() if self.objects.is_update(call)]
        backwards = [visit for visit, call in self.flow.calls() if self.objects.is_backward(call)]
        chosen = [run for run in self.flow.loops if self.hands_out_steps(run.node)]
        for update in updates:
            around = (run for run in self.flow.loops if run.holds(update))  # the innermost first
            found = next((run for run in around if any(run.holds(backward) for backward in backwards)), None)
            if found is not None and found not in chosen:
                chosen.append(found)
        outer = [run for run in chosen if not any(around in chosen for around in run.outer)]
        return [
            TrainingLoop(
                run,
                [visit for visit in updates if run.holds(visit)],
                [visit for visit in backwards if run.holds(visit)],
                self.hands_out_steps(run.node),
            )
            for run in self._once_each(outer)
        ]

    def _once_each(self, runs: list[LoopRun]) -> list[LoopRun]:
        """Returns one run of each loop: the first of those with the most loops around them."""
        best: dict[ast.AST, LoopRun] = {}
        for run in sorted(runs, key=lambda run: (run.root, run.first)):
            if run.node not in best or len(run.outer) > len(best[run.node].outer):
                best[run.node] = run
        return sorted(best.values(), key=lambda run: run.first)
