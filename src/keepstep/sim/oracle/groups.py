"""The oracle's checks of groups that stay in a recovery, from the events on their connections.

It never reads a claim or a counter of a rank. It sees operations begin and end, connections break and processes end.
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
"""(group, cohort): the connections of a group that were made in this cohort."""


class GroupWatch:
    """Watches one run's groups."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: dict[Connections, dict[Key, int]] = {}
        """Connections -> operation in progress -> number of members that have yet to end it."""
        self._cut: dict[Connections, set[int]] = {}
        """Connections -> the processes that have closed their end."""
        self._has: dict[int, dict[str, int]] = {}
        """process -> group -> the cohort in which it made its connections."""
        self._why_not: dict[Connections, str | None] = {}
        """Why the group could not stay when it was connected in this cohort; None: it could."""
        self._stayed: dict[Connections, bool] = {}
        """Whether the first member has kept its connections in this cohort."""
        self._attempts: dict[Key, tuple[int, int, str]] = {}
        """Collective of all ranks in progress -> the attempt of the first rank that has entered it."""
        self.num_kept = self.num_worlds_kept = 0

    # ---- what happens on connections --------------------------------------------------------------------------------

    def began(self, group: str, key: Key, num_members: int) -> None:
        """Records that a member begins an operation of ``num_members``."""
        self._under_way.setdefault((group, key[0]), {}).setdefault(key, num_members)

    def ended(self, group: str, key: Key) -> None:
        """Records that an operation has ended on one member."""
        operations = self._under_way[group, key[0]]
        operations[key] -= 1
        if not operations[key]:
            del operations[key]
            self._attempts.pop(key, None)

    def meets(self, process: int, key: Key, attempt: tuple[int, int, str]) -> None:
        """Checks that all ranks enter a collective of all ranks in the same attempt at a step.

        Args:
            process: the process that enters.
            key: the number of the collective on the connections.
            attempt: the cohort and the step that the process is in, and which collective of the step this is.

        Raises:
            ViolationError: another rank has entered it in another attempt.
        """
        first = self._attempts.setdefault(key, attempt)
        if attempt != first:
            raise ViolationError(
                Check.GROUPS, f"process {process} meets others in {key}, which are in {first}, and is in {attempt}"
            )

    def cut(self, group: str, cohort: int, process: int) -> None:
        """Records that a process has broken its connections."""
        self._cut.setdefault((group, cohort), set()).add(process)

    def died(self, process: int) -> None:
        """Records that a process has ended, with all its connections."""
        for group, cohort in self._has.get(process, {}).items():
            self.cut(group, cohort, process)

    def received(self, process: int, key: Key, rows: tuple[int, ...], attempt: int) -> None:
        """Checks the values that a process receives in an operation.

        Raises:
            ViolationError: a value was sent in another attempt at a step than the process is in.
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
        """Decides which groups may stay, when all ranks are ready to connect."""
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
        """Checks whether a process may keep its connections of a group (``stays``), or make new ones.

        Raises:
            ViolationError: it keeps a group that may not stay, or rebuilds one that others keep or that may stay.
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
