"""Faults as text, and the right to bring one about."""

import threading
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import msgspec
import pytest

from keepstep.drill import faults
from keepstep.drill.faults import IN_A_STEP, KINDS, MOMENTS, DrillFault, claim, default_faults, fired_at, parse, weather
from keepstep.drill.records import StepPlace
from keepstep.errors import ConfigurationError

GOOD = {
    "kill@step=7,phase=backward,rank=1": DrillFault(number=0, kind="kill", step=7, phase="backward", rank=1),
    "hang@step=9,phase=synced": DrillFault(number=0, kind="hang", step=9, phase="synced", rank=1),
    "kill@during=restore,rank=0": DrillFault(number=0, kind="kill", during="restore", rank=0),
    "exit@during=stop": DrillFault(number=0, kind="exit", during="stop", rank=1),
    "raise@during=reset": DrillFault(number=0, kind="raise", during="reset", rank=1),
    "kill@phase=random,count=50,seed=3": DrillFault(number=0, kind="kill", phase="random", count=50, seed=3),
    "hang@phase=random,rank=2": DrillFault(number=0, kind="hang", phase="random", rank=2),
    "pause@step=9,phase=forward,seconds=0.5": DrillFault(
        number=0, kind="pause", step=9, phase="forward", rank=1, seconds=0.5
    ),
    "pause@during=forward,rank=0,seconds=20": DrillFault(
        number=0, kind="pause", during="forward", rank=0, seconds=20.0
    ),
    " segv@phase=random ; ": DrillFault(number=0, kind="segv", phase="random"),
    "raise@rank=2,phase=forward,step=0": DrillFault(number=0, kind="raise", step=0, phase="forward", rank=2),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_good_specification(text: str) -> None:
    assert parse(text, 3) == [GOOD[text]]


def test_a_spare_is_killed_from_outside() -> None:
    (fault,) = parse("spare-kill@step=5", 3)
    assert (fault.kind, fault.step, fault.rank, fault.in_worker) == ("spare-kill", 5, None, False)
    assert parse(str(fault), 3) == [fault]
    assert not parse("kill@phase=random", 3)[0].in_worker
    assert parse("kill@step=1,phase=synced", 3)[0].in_worker
    assert parse("kill@during=restore", 3)[0].in_worker


def test_ranks_that_are_not_named_are_dealt_out_in_turn() -> None:
    text = ";".join(f"kill@step={step},phase=forward" for step in range(5))
    assert [fault.rank for fault in parse(text, 3)] == [1, 2, 0, 1, 2]
    assert [fault.number for fault in parse(text, 3)] == [0, 1, 2, 3, 4]
    assert [fault.rank for fault in parse(text, 1)] == [0] * 5


def test_several_have_numbers_of_their_own() -> None:
    found = parse("kill@step=1,phase=forward;; hang@step=2,phase=synced ;spare-kill@step=3;", 2)
    assert [fault.kind for fault in found] == ["kill", "hang", "spare-kill"]
    assert len({fault.number for fault in found}) == 3


@pytest.mark.parametrize(("kind", "phase"), [pair for pair in product(KINDS, IN_A_STEP) if pair[0] != "spare-kill"])
def test_every_kind_in_every_phase_is_what_it_says(kind: str, phase: str) -> None:
    (fault,) = parse(f"{kind}@step=4,phase={phase},rank=0" + (",seconds=1.5" if kind == "pause" else ""), 2)
    assert (fault.kind, fault.phase) == (kind, phase)
    assert parse(str(fault), 2) == [fault]


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_moment_of_a_recovery(moment: str) -> None:
    (fault,) = parse(f"kill@during={moment},rank=1", 2)
    assert str(fault) == f"kill@during={moment},rank=1"
    assert parse(str(fault), 2) == [fault]


BAD = [
    ("", "--faults '' names no fault; for example kill@step=7,phase=backward,rank=1"),
    (" ; ", "--faults ' ; ' names no fault"),
    ("burn@step=1", "fault 'burn@step=1': unknown kind 'burn'; allowed are kill, hang, segv, exit, raise, pause"),
    ("step=1", "fault 'step=1': unknown kind 'step=1'; allowed are kill"),
    ("kill", "fault 'kill': step= and phase= are needed, or during="),
    ("kill@", "fault 'kill@': step= and phase= are needed, or during="),
    ("kill@step=3", "fault 'kill@step=3': step= and phase= are needed, or during="),
    ("kill@phase=synced", "fault 'kill@phase=synced': step= and phase= are needed, or during="),
    ("kill@step", "fault 'kill@step': 'step' is not understood; allowed are step=, phase=, during=, rank=, seconds="),
    ("kill@stop=3", "fault 'kill@stop=3': 'stop=3' is not understood; allowed are step=, phase="),
    ("kill@step=3, phase=synced", "fault 'kill@step=3, phase=synced': ' phase=synced' is not understood"),
    ("kill@step=x,phase=synced", "fault 'kill@step=x,phase=synced': step='x' is not a number of 0 or more"),
    ("kill@step=-1,phase=synced", "fault 'kill@step=-1,phase=synced': step='-1' is not a number of 0 or more"),
    ("kill@step=,phase=synced", "fault 'kill@step=,phase=synced': step='' is not a number of 0 or more"),
    ("kill@step=1.5,phase=synced", "fault 'kill@step=1.5,phase=synced': step='1.5' is not a number of 0 or more"),
    ("kill@step=1,phase=sync", "fault 'kill@step=1,phase=sync': unknown phase 'sync'; allowed are forward, backward,"),
    ("kill@during=lunch", "fault 'kill@during=lunch': unknown during 'lunch'; allowed are stop, reset, restore"),
    (
        "kill@step=1,phase=synced,rank=3",
        "fault 'kill@step=1,phase=synced,rank=3': rank 3 is not there; allowed are 0",
    ),
    ("kill@phase=random,count=0", "fault 'kill@phase=random,count=0': count must be 1 or more"),
    (
        "raise@phase=random",
        "fault 'raise@phase=random': a fault at a random instant comes from outside: kill, hang",
    ),
    ("exit@phase=random", "fault 'exit@phase=random': a fault at a random instant comes from outside"),
    ("kill@during=stop,step=1", "fault 'kill@during=stop,step=1': during= stands in place of step= and phase="),
    ("kill@during=stop,phase=synced", "fault 'kill@during=stop,phase=synced': during= stands in place of step="),
    ("raise@during=stop", "fault 'raise@during=stop': nothing can be raised during=stop; use kill, hang, segv or exit"),
    ("spare-kill", "fault 'spare-kill': a spare-kill needs step= and nothing else"),
    ("spare-kill@step=1,phase=synced", "fault 'spare-kill@step=1,phase=synced': a spare-kill needs step= and nothing"),
    ("spare-kill@during=stop", "fault 'spare-kill@during=stop': a spare-kill needs step= and nothing else"),
    (
        "spare-kill@step=1,rank=0",
        "fault 'spare-kill@step=1,rank=0': a spare-kill needs step= and nothing else; rank= would be ignored",
    ),
    (
        "spare-kill@step=1,count=3,seed=2",
        "fault 'spare-kill@step=1,count=3,seed=2': a spare-kill needs step= and nothing else; count=, seed= would be",
    ),
    ("kill@step=1,step=2,phase=synced", "fault 'kill@step=1,step=2,phase=synced': step= is given twice; allowed is o"),
    ("kill@rank=1,during=stop,rank=1", "fault 'kill@rank=1,during=stop,rank=1': rank= is given twice"),
    (
        "kill@step=1,phase=random",
        "fault 'kill@step=1,phase=random': phase=random takes rank=, count= and seed= and nothing else; step= would",
    ),
    (
        "kill@during=stop,phase=random",
        "fault 'kill@during=stop,phase=random': phase=random takes rank=, count= and seed= and nothing else; during= w",
    ),
    (
        "kill@step=1,phase=synced,count=4",
        "fault 'kill@step=1,phase=synced,count=4': step= and phase= are needed, or during=; rank= may follow; count= w",
    ),
    (
        "kill@during=stop,seed=4",
        "fault 'kill@during=stop,seed=4': during= stands in place of step= and phase=; rank= may follow; seed= would",
    ),
    (
        "pause@step=1,phase=synced",
        "fault 'pause@step=1,phase=synced': step= and phase= are needed, or during=; rank= ma",
    ),
    (
        "raise@step=1,phase=synced,seconds=1",
        "fault 'raise@step=1,phase=synced,seconds=1': step= and phase= are needed, or",
    ),
    ("pause@during=forward,seconds=0", "fault 'pause@during=forward,seconds=0': seconds='0' is not a number above 0"),
    (
        "pause@during=forward,seconds=nan",
        "fault 'pause@during=forward,seconds=nan': seconds='nan' is not a number above 0",
    ),
    ("kill@step=1,phase=synced;burn", "fault 'burn': unknown kind 'burn'"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text or "nothing" for text, _message in BAD])
def test_a_bad_specification_is_named_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, 3)
    assert str(caught.value).startswith(message)


def places(num_steps: int, **pauses: float) -> list[StepPlace]:
    """Steps with all phases, after some of which, ``after_N``, more time passes than usual."""
    return [StepPlace(step, IN_A_STEP, pauses.get(f"after_{step}", 0.001)) for step in range(num_steps)]


def without(found: list[StepPlace], phases: str, *steps: int) -> list[StepPlace]:
    return [
        StepPlace(place.step, tuple(phase for phase in place.phases if phase not in phases.split()), place.after_s)
        if not steps or place.step in steps
        else place
        for place in found
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_by_default_each_phase_is_struck_and_rank_0_twice_the_last_time_late(world_size: int) -> None:
    *kills, slow = default_faults(world_size, places(60))
    assert {fault.kind for fault in kills} == {"kill"}
    assert Counter(fault.phase for fault in kills) == Counter(IN_A_STEP)
    assert [fault.step for fault in kills if fault.rank == 0][-1] == 55
    assert sum(fault.rank == 0 for fault in kills) >= 2
    steps = [fault.step or 0 for fault in kills]
    assert all(two - one > 1 for one, two in pairwise(steps)), "a spare has no time to start"
    assert (slow.kind, slow.during, slow.rank) == ("pause", "forward", 0)
    assert [fault.number for fault in (*kills, slow)] == list(range(7))
    assert parse(";".join(map(str, (*kills, slow))), world_size) == [*kills, slow]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 9, 20])
def test_a_short_run_is_struck_as_often_as_its_steps_allow(num_steps: int) -> None:
    kills = [fault for fault in default_faults(2, places(num_steps)) if fault.kind == "kill"]
    assert len(kills) >= min(3, -(-num_steps // 3))
    assert all(fault.step in range(num_steps) for fault in kills)


def test_a_phase_that_does_not_occur_is_not_struck() -> None:
    *kills, _slow = default_faults(2, without(places(60), "synced barrier optimizer"))
    assert {fault.phase for fault in kills} == {"forward", "backward", "updated"}


def test_rank_0_is_lost_where_the_code_at_the_end_of_an_epoch_begins() -> None:
    found = without(places(60, after_30=0.5), "backward", 9, 19, 29, 39, 49, 59)
    *kills, _slow = default_faults(2, found)
    assert DrillFault(number=0, kind="kill", step=8, phase="updated", rank=0) in [
        msgspec.structs.replace(fault, number=0) for fault in kills
    ]
    assert all(fault.step not in (9, 19) for fault in kills if fault.phase == "backward")


def test_one_is_lost_before_an_evaluation_and_another_one_in_the_middle() -> None:
    *kills, _slow = default_faults(2, places(60, after_20=0.5, after_40=0.4))
    struck = {(fault.step, fault.rank, fault.seconds) for fault in kills if fault.phase == "updated"}
    assert struck == {(20, 0, None), (40, 1, 0.2)}


def test_a_slow_start_follows_the_late_loss_of_rank_0_though_another_rank_is_lost_later() -> None:
    found = default_faults(2, places(60, after_20=0.5, after_58=0.4))
    assert [(fault.kind, fault.step, fault.rank) for fault in found][-3:] == [
        ("kill", 55, 0),
        ("pause", None, 0),
        ("kill", 58, 1),
    ]
    assert [fault.number for fault in found] == list(range(len(found)))


def test_one_is_lost_after_the_first_file_was_written() -> None:
    *kills, _slow = default_faults(2, places(60), written=30)
    assert (30, 1) in [(fault.step, fault.rank) for fault in kills if fault.phase == "forward"]


@pytest.mark.parametrize(("most", "extra"), [(1, 0), (6, 0), (7, 1), (8, 2)])
def test_where_time_is_short_one_in_each_phase_remains(most: int, extra: int) -> None:
    *kills, slow = default_faults(2, places(60, after_20=0.5, after_30=0.4), most=most, written=40)
    assert {fault.phase for fault in kills} == set(IN_A_STEP)
    assert len(kills) == len(IN_A_STEP) + extra
    assert {(20, "updated", 0), (55, "forward", 0)} <= {(fault.step, fault.phase, fault.rank) for fault in kills}
    assert slow.during == "forward"


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_weather_is_pauses_of_one_rank_below_its_deadline_and_of_most_of_them_beyond_it(world_size: int) -> None:
    found = weather(world_size, 100, hang_after_s=2.0)
    assert parse(";".join(map(str, found)), world_size) == found
    assert max(fault.step or 0 for fault in found) == 95
    together = Counter((fault.step, fault.phase, fault.seconds) for fault in found)
    assert {num for (_step, _phase, seconds), num in together.items() if seconds == 0.5} == {1}
    beyond = [num for (_step, _phase, seconds), num in together.items() if seconds == 6.0]
    assert beyond == [world_size // 2 + 1, world_size, world_size]
    assert not any(fault.loses_rank for fault in found)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = [*default_faults(2, places(99)), *parse("hang@phase=random,count=3,seed=8;spare-kill@step=1", 2)]
    faults.write_plan(tmp_path, plan)
    assert faults.read_plan(tmp_path) == plan


def test_a_fault_is_claimed_once(tmp_path: Path) -> None:
    first, second = default_faults(2, places(99))[:2]
    assert fired_at(tmp_path, first) is None
    assert claim(tmp_path, first, 12.25)
    assert not claim(tmp_path, first, 99.0)
    assert (fired_at(tmp_path, first), fired_at(tmp_path, second)) == (12.25, None)
    assert claim(tmp_path, second, 0.1)


def test_of_many_that_claim_at_once_one_wins(tmp_path: Path) -> None:
    fault = default_faults(2, places(99))[0]
    gate, won = threading.Barrier(8), []

    def compete(number: int) -> None:
        gate.wait()
        if claim(tmp_path, fault, float(number)):
            won.append(number)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert fired_at(tmp_path, fault) == float(won[0])
