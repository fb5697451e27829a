"""Which groups may stay in a recovery, judged by the events that the oracle has seen on their connections.

It never looks at a claim or a counter of a rank. It sees operations begin and end, connections break and processes end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from keepstep.sim.cluster.collectives import WORLD
from keepstep.sim.cluster.groups.mesh import groups_of
from keepstep.sim.oracle.checks import Check, ViolationError

if TYPE_CHECKING:
    from keepstep.sim.cluster.collectives import Key
    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World

Connections = tuple[str, int]
"""Those of a group that were made in one cohort."""


class GroupWatch:
    """Watches one run's groups."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: dict[Connections, dict[Key, int]] = {}
        """Of each operation that was begun, how many members have yet to end it."""
        self._cut: dict[Connections, set[int]] = {}
        """Processes whose end of the connections is closed."""
        self._has: dict[int, dict[str, int]] = {}
        """process -> group -> the cohort in which it made its connections."""
        self._why_not: dict[Connections, str | None] = {}
        """Of each group and cohort, why the group could not stay when it was connected; None: it could."""
        self._stayed: dict[Connections, bool] = {}
        """What the first member has done."""
        self._attempts: dict[Key, tuple[int, int, str]] = {}
        """Of each collective of all ranks that is under way, what the first rank has begun there."""
        self.num_kept = self.num_worlds_kept = 0

    # ---- what happens on connections --------------------------------------------------------------------------------

    def began(self, group: str, key: Key, num_members: int) -> None:
        """A member begins an operation that takes so many."""
        self._under_way.setdefault((group, key[0]), {}).setdefault(key, num_members)

    def ended(self, group: str, key: Key) -> None:
        """It has ended on one of them."""
        operations = self._under_way[group, key[0]]
        operations[key] -= 1
        if not operations[key]:
            del operations[key]
            self._attempts.pop(key, None)

    def meets(self, process: int, key: Key, attempt: tuple[int, int, str]) -> None:
        """A process begins a collective of all ranks: those that the others begin with it are of the same attempt.

        Args:
            process: the process.
            key: its place on the connections.
            attempt: the cohort and the step that the process is in, and what it is.

        Raises:
            ViolationError: they are not.
        """
        first = self._attempts.setdefault(key, attempt)
        if attempt != first:
            raise ViolationError(
                Check.GROUPS, f"process {process} meets others in {key}, which are in {first}, and is in {attempt}"
            )

    def cut(self, group: str, cohort: int, process: int) -> None:
        """A process has broken its connections in the middle of an operation."""
        self._cut.setdefault((group, cohort), set()).add(process)

    def died(self, process: int) -> None:
        """A process has ended, with all connections."""
        for group, cohort in self._has.get(process, {}).items():
            self.cut(group, cohort, process)

    def received(self, process: int, key: Key, rows: tuple[int, ...], attempt: int) -> None:
        """A process has got what an operation gave it.

        Raises:
            ViolationError: some of it was given in another attempt than the one in which it asked for it.
        """
        if any(row != attempt for row in rows):
            of = [divmod(row, 1 << 32) for row in rows]
            raise ViolationError(
                Check.GROUPS,
                f"process {process} receives in operation {key} what was given in cohorts and steps {of}, "
                f"and is in {divmod(attempt, 1 << 32)}",
            )

    # ---- recoveries -------------------------------------------------------------------------------------------------

    def met(self, cohort: int, members: Mapping[int, SimulatedProcess]) -> None:
        """All ranks have come to connect: from here on it is settled which groups may stay."""
        for group in groups_of(self._world.layout.shards, self._world.layout.has_mesh):
            processes = [members[rank].process for rank in group.members]
            self._why_not[group.name, cohort] = self._why_no_longer(group.name, processes)

    def _why_no_longer(self, group: str, processes: list[int]) -> str | None:
        made = [self._has.get(process, {}).get(group) for process in processes]
        first = made[0]
        if first is None or None in made:
            return f"of its processes {processes} some were never connected: the cohorts are {made}"
        if len(set(made)) > 1:
            return f"its processes {processes} have connections of cohorts {made}"
        if cut := self._cut.get((group, first)):
            return f"processes {sorted(cut)} have broken the connections"
        if under_way := self._under_way.get((group, first)):
            return f"{under_way} are under way, of each operation with so many members that have yet to end it"
        return None

    def connects(self, process: int, group: str, cohort: int, *, stays: bool) -> None:
        """A process goes on with a group in a cohort: it keeps its connections, or makes new ones.

        Raises:
            ViolationError: it keeps what may not stay, or rebuilds what others keep or what could have stayed.
        """
        if stays and (why_not := self._why_not[group, cohort]):
            raise ViolationError(
                Check.GROUPS, f"process {process} keeps group {group} in cohort {cohort}, and {why_not}"
            )
        if (group, cohort) not in self._stayed:
            self._stayed[group, cohort] = stays
            self.num_kept += stays
            self.num_worlds_kept += stays and group == WORLD
        elif self._stayed[group, cohort] is not stays:
            what = "keeps" if stays else "rebuilds"
            raise ViolationError(Check.GROUPS, f"process {process} {what} group {group}, and another member does not")
        if stays:
            return
        if self._why_not[group, cohort] is None:
            raise ViolationError(Check.GROUPS, f"process {process} rebuilds group {group}, which could have stayed")
        if (before := self._has.setdefault(process, {}).get(group)) is not None:
            self.cut(group, before, process)
        self._has[process][group] = cohort
