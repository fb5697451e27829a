"""The controller's knowledge of ranks without progress: its explanation, and whether the job can never complete a
step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from keepstep.protocol.messages import RanksStand
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.waiting.explanation import RankState, explain, uneven
from keepstep.protocol.waiting.operations import Standing, WaitsFor

GRACE_S = 1.0
"""How long to wait for reports of other nodes, so that one sentence contains all of them."""
LEAST_S = 10.0
"""Least time between two sentences, however often the situation changes."""
REPEAT_S = 290.0
"""The same sentence is repeated after so long. Agents repeat their reports a little later (`watch.REPEAT_S`)."""


class Standstill:
    """The ranks without progress of one job, in its current generation."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.text: str | None = None
        """One sentence that says which ranks wait where; None if no rank waits for long."""
        self.published: list[str] = []
        """All sentences so far, so that a log can notice a new one."""
        self.silent_nodes: dict[str, float] = {}
        """Nodes that have not been heard lately -> when they were last heard. Only for the sentence."""
        self.due_s: float | None = None
        """When `tick` is due."""
        self._moving: set[str] = set()
        """The nodes that have not reported that all their ranks wait in a collective past its deadline."""
        self._by_node: dict[str, dict[int, tuple[Standing, float]]] = {}
        """node -> worker -> (its report, time of its last progress)."""
        self._finished_at: dict[int, int] = {}
        self._kept_s: dict[int, float] = {}
        """worker -> when the reason was last published for which it is not given up."""
        self._situation = ""
        """The last published sentence, without durations."""
        self._announced = ""
        """The last sentence of `announce`, until it is withdrawn."""
        self._told_s = float("-inf")

    def clear(self) -> None:
        """Forgets all reports, because a new generation begins."""
        self.text, self.due_s, self._situation, self._announced = None, None, "", ""
        self._by_node.clear()
        self._finished_at.clear()
        self._kept_s.clear()

    def all_move(self) -> None:
        """Records that every rank trains."""
        self._moving = {worker.node for worker in self._roster.holders()}

    def stalled(self, node: str) -> bool:
        """Records that all ranks of a node wait past their deadlines. Returns whether this is true of all nodes.

        If another node makes progress, the rank at fault is there, and its agent finds it.
        """
        self._moving.discard(node)
        return not self._moving

    def finished(self, workers: Iterable[int], step: int) -> None:
        """Records that the loops of workers have ended after ``step`` steps."""
        self._finished_at |= dict.fromkeys(workers, step)

    def stands(self, message: RanksStand, now_s: float) -> None:
        """Processes an agent's report on its ranks without progress."""
        known = self._roster.workers
        found = {each.worker: (each, now_s - each.still_s) for each in message.standing if each.worker in known}
        self._by_node[message.node] = {n: each for n, each in found.items() if known[n].node == message.node}
        if not message.standing and any(worker.node == message.node for worker in self._roster.holders()):
            self._moving.add(message.node)
        if not any(self._by_node.values()):
            self.text, self.due_s, self._situation = None, None, ""
            return
        is_one_node = len(self._roster.nodes) == 1
        self.due_s = max(now_s if is_one_node else now_s + GRACE_S, self._told_s + LEAST_S)
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Publishes a due sentence, if it is new. Does nothing if none is due."""
        if self.due_s is None or now_s < self.due_s:
            return
        self.due_s = None
        self.text = explain(self._states(), now_s)
        situation = explain(self._states(), None) or ""
        if self.text is not None and (situation != self._situation or now_s >= self._told_s + REPEAT_S):
            self._situation, self._told_s = situation, now_s
            self.published.append(self.text)

    def keeps(self, worker: Worker, text: str, now_s: float) -> None:
        """Publishes why a silent rank is not given up, at intervals."""
        if now_s >= self._kept_s.get(worker.worker, -math.inf) + REPEAT_S:
            self._kept_s[worker.worker] = now_s
            self.text = text
            self.published.append(text)

    def announce(self, text: str) -> None:
        """Makes it the present sentence for what the job waits, and publishes it if it is new."""
        self.text = text
        if text != self._announced:
            self._announced = text
            self.published.append(text)

    def no_longer(self, text: str) -> None:
        """Withdraws a sentence of `announce`."""
        if text == self._announced:
            self._announced = ""
        if text == self.text:
            self.text = None

    def idle(self) -> set[int]:
        """Returns the workers that may hang: they have made no progress for long, and wait for no other rank.

        Nor does the copy of one count that waits for a reader, who may never come.
        """
        alone = (WaitsFor.NOTHING, WaitsFor.SIGNAL, WaitsFor.READER)
        return {n for node in self._by_node.values() for n, (where, _) in node.items() if where.waits_for in alone}

    def explained(self, detail: str, now_s: float) -> str:
        """Returns ``detail`` with the explanation of where ranks wait, if there is one."""
        where = explain(self._states(), now_s)
        return f"{detail}: {where}" if where else detail

    def uneven(self) -> str | None:
        """Returns why no rank can complete another step; None if that is not certain."""
        return uneven(self._states()) if self._finished_at and self._by_node else None

    def _states(self) -> list[RankState]:
        standing = {number: each for node in self._by_node.values() for number, each in node.items()}
        states = []
        for worker in sorted(self._roster.holders(), key=lambda worker: worker.rank or 0):
            assert worker.rank is not None
            where, since_s = standing.get(worker.worker, (None, 0.0))
            heard_s = self.silent_nodes.get(worker.node)
            states.append(RankState(worker.rank, where, since_s, self._finished_at.get(worker.worker), heard_s))
        return states
