"""Runs one seed: its cluster and its faults, and reports violations."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path

from keepstep.errors import KeepstepError
from keepstep.sim.cluster.layout import ClusterLayout, draw_devices, draw_layout, draw_mesh, draw_snapshots
from keepstep.sim.faults import (
    LOAD_FAULTS,
    WRONG_LOADS,
    Injector,
    SimulatedFault,
    draw_group_error,
    draw_load,
    draw_plan,
    draw_relays,
    draw_sick_device,
    draw_silence,
    draw_suspension,
)
from keepstep.sim.oracle import Check, ViolationError
from keepstep.sim.recording import Recording
from keepstep.sim.story import Story
from keepstep.sim.world import World

PATIENCE_S = 400.0
"""Virtual time from the end of the last fault until the job must have ended. It is enough for every deadline twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A case to run: a cluster, the faults to inject, and the seed of everything else."""

    seed: int
    layout: ClusterLayout
    plan: tuple[SimulatedFault, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    case: Case
    check: Check | None
    """The check that failed; None: the run has passed."""
    detail: str
    num_failures: int
    num_recoveries: int
    num_events: int
    num_kept_groups: int
    """How many groups stayed in recoveries, in all."""
    virtual_s: float
    story: tuple[str, ...] = ()


def case_of(seed: int) -> Case:
    """Returns the case of a seed."""
    rng = random.Random(seed)
    layout = draw_layout(rng)
    num_relays, plan = draw_relays(rng, draw_plan(rng, layout))
    # From separate generators, so that seeds without snapshots, mesh and these faults keep their cases.
    layout = draw_snapshots(random.Random(f"snapshots of {seed}"), layout)
    layout = draw_mesh(random.Random(f"mesh of {seed}"), layout)
    layout = draw_devices(random.Random(f"devices of {seed}"), layout)
    plan = draw_sick_device(random.Random(f"sick device of {seed}"), plan)
    plan = draw_group_error(random.Random(f"group error of {seed}"), plan)
    plan = draw_load(random.Random(f"refused load of {seed}"), plan, LOAD_FAULTS, 0.1)
    if (comparing := random.Random(f"comparison of {seed}")).random() < 0.3:
        layout = dataclasses.replace(layout, compares=True)
        plan = draw_load(comparing, plan, WRONG_LOADS, 0.33)
    if (first_batch := random.Random(f"first batch of {seed}")).random() < 0.1:
        layout = dataclasses.replace(layout, first_batch_s=first_batch.choice((3.0, 10.0, 20.0)))
    plan = draw_suspension(random.Random(f"suspension of {seed}"), plan)
    plan = draw_silence(random.Random(f"silence of {seed}"), plan)
    return Case(seed, dataclasses.replace(layout, num_relays=num_relays), plan)


def run(case: Case, *, tell: bool = False, record: Path | None = None) -> Outcome:
    """Runs one case. The same case gives the same outcome, event by event.

    Args:
        case: the case.
        tell: record the trace, which takes time.
        record: a folder to write the run into, as a real job does.
    """
    story = Story() if tell else None
    if story is not None:
        story.lines += [f"seed {case.seed}: {case.layout}", *(f"  {fault}" for fault in case.plan)]
    world = World(case.layout, case.seed, story)
    injector = Injector(world, case.plan)
    world.add_part("injector", injector)
    with Recording(record, str(case.layout), case.layout.settings) if record else contextlib.nullcontext() as recording:
        world.recording = recording
        check, detail = _live(world, injector)
        if recording is not None:
            recording.ended(
                0 if world.ended is None else world.ended.exit_code, _ending(world, check, detail), world.schedule.now_s
            )
    if story is not None:
        story.add(world.schedule.now_s, "END", _ending(world, check, detail))
    return Outcome(
        case,
        check,
        detail,
        world.oracle.num_failures,
        world.num_recoveries,
        world.schedule.num_events,
        world.oracle.groups.num_kept,
        world.schedule.now_s,
        tuple(story.lines) if story is not None else (),
    )


def _live(world: World, injector: Injector) -> tuple[Check | None, str]:
    """Runs events until the job has ended or a check fails. Returns that check, or None, and the details."""
    try:
        world.boot()
        while world.ended is None and world.schedule.now_s < injector.over_s + PATIENCE_S:
            event = world.schedule.next()
            if event is None:
                break
            world.happen(event)
        if world.ended is None:
            raise ViolationError(Check.STUCK, f"{PATIENCE_S:g} s after the last fault was over the job goes on")
    except ViolationError as violation:
        return violation.check, violation.detail
    except (KeepstepError, AssertionError) as error:
        return Check.RAISED, f"{type(error).__name__}: {error}"
    return None, ""


def _ending(world: World, check: Check | None, detail: str) -> str:
    return f"{check}: {detail}" if check else str(world.ended and world.ended.reason)
