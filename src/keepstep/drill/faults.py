"""The specification of faults as text: what happens to which rank, and when.

::

    kill@step=7,phase=backward,rank=1        SIGKILL to rank 1 in the backward of step 7
    hang@step=9,phase=synced                 SIGSTOP; the rank is chosen if none is named
    kill@during=restore,rank=0               ... while the recovery of another fault restores state
    kill@step=9,phase=updated,seconds=0.5    half a second after that moment, as in the middle of an evaluation
    pause@step=9,phase=forward,seconds=2     its training thread does nothing for two seconds
    pause@during=forward,rank=0,seconds=2    each replacement of rank 0 is slow in the first forward of its process
    kill@phase=random,count=50,seed=3        fifty, at random instants, one after the other
    spare-kill@step=5                        kills a warm spare

Several faults are separated by ``;``. ``none`` means no fault at all. A step that does not have the phase, as one in
which no optimizer runs, passes its fault on to the next one.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from keepstep.drill.records import IN_A_STEP, StepPlace
from keepstep.errors import ConfigurationError

KINDS = ("kill", "hang", "segv", "exit", "raise", "pause", "spare-kill")
PHASES = (*IN_A_STEP, "random")
MOMENTS = ("stop", "reset", "restore", "forward")
KEYS = ("step", "phase", "during", "rank", "seconds", "count", "seed")
PLAN_FILE = "faults.json"
SPARES_SOCKET = "spares.sock"
"""Socket in a run's folder. A rank connects to it before a step with a fault, and gets an answer when a spare is warm
or when none will come."""
HOLD_FILE = "hold"
"""File in a run's folder. While it exists, no rank begins another step before a spare is warm, because a fault from
outside is due."""
FIRST_STEP = 3
"""Step of the first default fault, as far as the script does not give it another place."""
LATE_STEPS = 5
"""How many steps before the end of the run the last default fault comes."""
_TELLING_PAUSE = 3.0
"""By what factor more time than usual passes between two steps where the script does something there."""
_SHORT_S = 0.005
"""A shorter time between two steps is nothing that the script does there."""
SLOW_START_S = 2.0
"""How long a replacement takes for its first batch by default: twice the time after which a drill suspects a rank."""
WEATHER_SPACING = 4
LONGEST_PAUSE_S = 86_400.0
_DECIMAL = re.compile(r"\d+(\.\d+)?")
NONE = "none"
"""The specification without any fault: the drill runs the job twice without failures."""


class DrillFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault of a drill."""

    number: int
    kind: str
    step: int | None = None
    phase: str | None = None
    during: str | None = None
    rank: int | None = None
    seconds: float | None = None
    count: int = 1
    seed: int = 0

    def __str__(self) -> str:
        values = {key: getattr(self, key) for key in ("step", "phase", "during", "rank", "seconds")}
        shown = {key: f"{value:g}" if key == "seconds" else value for key, value in values.items() if value is not None}
        return f"{self.kind}@" + ",".join(f"{key}={value}" for key, value in shown.items())

    @property
    def in_worker(self) -> bool:
        """Whether the rank injects the fault itself, at an exact place; otherwise the launcher does."""
        return self.kind != "spare-kill" and self.phase != "random"

    @property
    def loses_rank(self) -> bool:
        """Whether it costs the job a rank, so that it needs a spare."""
        return self.kind not in ("pause", "spare-kill")

    @property
    def strikes_each_replacement(self) -> bool:
        """Whether it strikes every process that takes the rank. All others strike once."""
        return self.kind == "pause" and self.during == "forward"


def parse(text: str, world_size: int) -> list[DrillFault]:
    """Returns the faults of a specification, in order.

    Args:
        text: the specification; see the module's docstring.
        world_size: number of ranks. Faults without a rank are assigned to the ranks in turn.

    Raises:
        ConfigurationError: the specification is invalid; the message names the part and the allowed values.
    """
    if text.strip() == NONE:
        return []
    faults = [
        _parse_one(part.strip(), number, world_size) for number, part in enumerate(text.split(";")) if part.strip()
    ]
    if not faults:
        raise ConfigurationError(
            f"--faults {text!r} names no fault; for example kill@step=7,phase=backward,rank=1, or none"
        )
    return faults


def default_faults(
    world_size: int, places: Sequence[StepPlace], *, most: int = sys.maxsize, written: int | None = None
) -> list[DrillFault]:
    """Returns kills where scripts are weak, chosen from the run without failures: one in each phase that occurs.

    Rank 0 is lost twice. The first time it is where most time passes between two steps, as at the end of an epoch: what
    the script has summed up starts over there. The second time it is late: all ranks have long been warm, and each
    replacement takes its time for its first batch. Another rank is lost in the middle of what takes most time between
    two steps, an evaluation or a checkpoint, and one after the first file was written, which a replacement finds.

    Args:
        world_size: number of ranks.
        places: the steps of the run without failures, in their order.
        most: how many kills at most, but at least one in each phase.
        written: the step that followed the first file.
    """
    if not places:
        return []
    last = max(0, len(places) - LATE_STEPS)
    usual_s = statistics.median(place.after_s for place in places)
    pauses = [
        n for n in range(FIRST_STEP, len(places) - 1) if places[n].after_s > max(_TELLING_PAUSE * usual_s, _SHORT_S)
    ]
    pauses.sort(key=lambda n: -places[n].after_s)
    ends = [n for n, (one, two) in enumerate(pairwise(places)) if _trains(one) and not _trains(two)]
    plan = _Plan(places, world_size)
    plan.add("updated", (ends or pauses or [last // 2])[0], 0)
    plan.add("forward", last, 0)
    if (pause := next(filter(plan.is_free, pauses), None)) is not None:
        plan.add("updated", pause, 1, seconds=round(places[pause].after_s / 2, 3))
    if written is not None:
        plan.add("forward", next((n for n, place in enumerate(places) if place.step >= written), last), 1)
    spread = [phase for phase in IN_A_STEP if phase not in ("updated", "forward")]
    for number, phase in enumerate(spread):
        plan.add(phase, FIRST_STEP + number * max(1, (last - FIRST_STEP) // len(spread)), 1 + number)
    return plan.faults(most)


def _trains(place: StepPlace) -> bool:
    return "backward" in place.phases


class _Plan:
    """Kills at steps of their own."""

    def __init__(self, places: Sequence[StepPlace], world_size: int) -> None:
        self._places = places
        self._world_size = world_size
        self._found: list[DrillFault] = []
        self._taken: set[int] = set()

    def is_free(self, place: int) -> bool:
        """Whether nothing comes at a place or beside it."""
        return not {place - 1, place, place + 1} & self._taken

    def add(self, phase: str, near: int, rank: int, seconds: float | None = None) -> None:
        """Adds a kill at the place ``near``, or at the nearest one that has the phase and is not beside another one."""
        places = self._places
        free = [n for n, place in enumerate(places) if phase in place.phases and self.is_free(n)]
        if not free:
            return
        at = min(free, key=lambda n: (abs(n - near), n))
        self._taken.add(at)
        rank %= self._world_size
        self._found.append(
            DrillFault(number=0, kind="kill", step=places[at].step, phase=phase, rank=rank, seconds=seconds)
        )

    def faults(self, most: int) -> list[DrillFault]:
        """One kill in each phase and some others, by their steps, and a slow start of what replaces rank 0."""
        first = {fault.phase: fault for fault in reversed(self._found)}
        further = [fault for fault in self._found if fault is not first[fault.phase]]
        kept = [*first.values(), *further[: max(0, most - len(first))]]
        kept.sort(key=lambda fault: fault.step or 0)
        slow = DrillFault(number=0, kind="pause", during="forward", rank=0, seconds=SLOW_START_S)
        late = max((n for n, fault in enumerate(kept) if fault.rank == 0), default=0)
        kept.insert(late + 1, slow)  # it waits for all kills in front of it
        return [msgspec.structs.replace(fault, number=number) for number, fault in enumerate(kept)]


def weather(world_size: int, num_steps: int, hang_after_s: float) -> list[DrillFault]:
    """Returns pauses that are nobody's fault, so that a job must not lose a rank by any of them.

    First a rank pauses for a quarter of the time after which it would be suspected, in each phase. Then several pause
    for three times that time, as if their storage did not answer, and then all, early and late.

    Args:
        world_size: number of ranks.
        num_steps: number of steps of the run without failures.
        hang_after_s: ``--hang-after``.
    """
    phases = [phase for phase in IN_A_STEP if phase != "barrier"]
    places = [(phase, [n % world_size], hang_after_s / 4) for n, phase in enumerate(phases)]
    together = [list(range(world_size // 2 + 1)), list(range(world_size)), list(range(world_size))]
    for ranks, phase in zip(together, ("backward", "forward", "updated"), strict=True):
        places.append((phase, ranks, 3 * hang_after_s))
    steps = [FIRST_STEP + n * WEATHER_SPACING for n in range(len(places))]
    steps[-1] = max(steps[-1], num_steps - LATE_STEPS)
    found: list[DrillFault] = []
    for step, (phase, ranks, seconds) in zip(steps, places, strict=True):
        for rank in ranks:
            pause = DrillFault(number=len(found), kind="pause", step=step, phase=phase, rank=rank, seconds=seconds)
            found.append(pause)
    return found


def _parse_one(text: str, number: int, world_size: int) -> DrillFault:
    kind, _, rest = text.partition("@")
    if kind not in KINDS:
        raise ConfigurationError(f"fault {text!r}: unknown kind {kind!r}; allowed are {', '.join(KINDS)}")
    values = _values(text, rest)
    _check_choice(text, values, "phase", PHASES)
    _check_choice(text, values, "during", MOMENTS)
    seconds = _seconds(text, values)
    numbers = {
        key: _number(text, key, value) for key, value in values.items() if key not in ("phase", "during", "seconds")
    }
    _check_whole(text, kind, values, numbers)
    if numbers.get("rank", 0) >= world_size:
        raise ConfigurationError(
            f"fault {text!r}: rank {numbers['rank']} is not there; allowed are 0 to {world_size - 1}"
        )
    chosen_late = kind == "spare-kill" or values.get("phase") == "random"
    return DrillFault(
        number=number,
        kind=kind,
        step=numbers.get("step"),
        phase=values.get("phase"),
        during=values.get("during"),
        rank=numbers.get("rank", None if chosen_late else (number + 1) % world_size),
        seconds=seconds,
        count=numbers.get("count", 1),
        seed=numbers.get("seed", 0),
    )


def _values(text: str, rest: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in KEYS:
            raise ConfigurationError(
                f"fault {text!r}: {part!r} is not understood; allowed are {', '.join(key + '=' for key in KEYS)}"
            )
        if key in values:
            raise ConfigurationError(f"fault {text!r}: {key}= is given twice; allowed is once")
        values[key] = value
    return values


def _check_choice(text: str, values: dict[str, str], key: str, allowed: tuple[str, ...]) -> None:
    if key in values and values[key] not in allowed:
        raise ConfigurationError(f"fault {text!r}: unknown {key} {values[key]!r}; allowed are {', '.join(allowed)}")


def _number(text: str, key: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigurationError(f"fault {text!r}: {key}={value!r} is not a number of 0 or more")
    return int(value)


def _seconds(text: str, values: dict[str, str]) -> float | None:
    if "seconds" not in values:
        return None
    value = float(values["seconds"]) if _DECIMAL.fullmatch(values["seconds"]) else 0.0
    if not 0.0 < value <= LONGEST_PAUSE_S:
        raise ConfigurationError(
            f"fault {text!r}: seconds={values['seconds']!r} is not a number above 0 and up to {LONGEST_PAUSE_S:g}"
        )
    return value


def _check_whole(text: str, kind: str, values: dict[str, str], numbers: dict[str, int]) -> None:
    """Checks that the keys fit the fault: none is missing, and none would be ignored."""
    needed, rule = {"step", "phase"}, "step= and phase= are needed, or during=; rank= may follow"
    allowed = needed | {"rank"}
    if kind == "spare-kill":
        needed, rule = {"step"}, "a spare-kill needs step= and nothing else"
        allowed = needed
    elif values.get("phase") == "random":
        needed, rule = {"phase"}, "phase=random takes rank=, count= and seed= and nothing else"
        allowed = needed | {"rank", "count", "seed"}
    elif "during" in values:
        needed, rule = {"during"}, "during= stands in place of step= and phase=; rank= may follow"
        allowed = needed | {"rank"}
    if kind == "pause":
        needed, allowed = needed | {"seconds"}, allowed | {"seconds"}
        rule = f"{rule}; a pause needs seconds="
    elif "step" in needed and kind not in ("raise", "spare-kill"):
        allowed = allowed | {"seconds"}
    if surplus := [f"{key}=" for key in values if key not in allowed]:
        raise ConfigurationError(f"fault {text!r}: {rule}; {', '.join(surplus)} would be ignored")
    if needed - values.keys():
        raise ConfigurationError(f"fault {text!r}: {rule}")
    if values.get("phase") == "random" and kind not in ("kill", "hang", "segv"):
        raise ConfigurationError(f"fault {text!r}: a fault at a random instant comes from outside: kill, hang or segv")
    if numbers.get("count", 1) < 1:
        raise ConfigurationError(f"fault {text!r}: count must be 1 or more")
    if kind == "raise" and values.get("during") == "stop":
        raise ConfigurationError(f"fault {text!r}: nothing can be raised during=stop; use kill, hang, segv or exit")


def write_plan(run_dir: Path, faults: list[DrillFault]) -> None:
    """Writes the faults to a run's folder, where its workers read them."""
    (run_dir / PLAN_FILE).write_bytes(msgspec.json.encode(faults))


def read_plan(run_dir: Path) -> list[DrillFault]:
    """Reads the faults of a run."""
    return msgspec.json.decode((run_dir / PLAN_FILE).read_bytes(), type=list[DrillFault])


def claim(run_dir: Path, fault: DrillFault, now_s: float) -> bool:
    """Records that the caller injects a fault now. Returns False if a process has injected it already."""
    try:
        with (run_dir / f"fired-{fault.number}").open("x", encoding="ascii") as file:
            file.write(repr(now_s))
    except FileExistsError:
        return False
    return True


def is_fired(run_dir: Path, fault: DrillFault) -> bool:
    """Whether a fault has been injected."""
    return (run_dir / f"fired-{fault.number}").exists()


def fired_at(run_dir: Path, fault: DrillFault) -> float | None:
    """Returns when a fault was injected, in monotonic seconds; None if it was not."""
    try:
        return float((run_dir / f"fired-{fault.number}").read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
