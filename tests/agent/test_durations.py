"""What the phases of a step take, read from a ring."""

import os

from keepstep.agent.durations import longest_phases
from keepstep.protocol.deadlines import DEADLINES
from keepstep.protocol.messages import Tag
from keepstep.protocol.node.liveness import MEASURED, LivenessMachine, Observation
from keepstep.protocol.phases import Phase
from keepstep.shared import tagpage
from keepstep.shared.tagpage import PhaseEvent

STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED)


def events(*changes: tuple[float, int, int, Phase]) -> list[PhaseEvent]:
    """(seconds, generation, step, phase) each."""
    return [PhaseEvent(round(at_s * 1e9), generation, step, phase) for at_s, generation, step, phase in changes]


def test_the_longest_of_each_phase() -> None:
    found = longest_phases(
        events(
            (1.0, 1, 0, Phase.FORWARD),
            (1.5, 1, 0, Phase.BACKWARD),
            (1.75, 1, 0, Phase.FORWARD),
            (2.0, 1, 0, Phase.BACKWARD),
            (3.0, 1, 0, Phase.SYNCED),
            (3.0, 1, 0, Phase.OPTIMIZER),
            (4.0, 1, 0, Phase.UPDATED),
            (9.0, 1, 1, Phase.FORWARD),
        )
    )
    assert found == [
        (Phase.FORWARD, 1.0, 1.5),
        (Phase.BACKWARD, 2.0, 3.0),
        (Phase.SYNCED, 3.0, 3.0),
    ]


def test_what_was_undone_or_cut_off_or_has_not_ended_is_no_measure() -> None:
    assert longest_phases(events((1.0, 1, 5, Phase.BACKWARD), (7.0, 1, 4, Phase.UPDATED))) == []
    assert longest_phases(events((1.0, 1, 5, Phase.SYNCED), (7.0, 2, 5, Phase.SYNCED))) == []
    assert longest_phases(events((1.0, 1, 5, Phase.FORWARD))) == []
    assert longest_phases([]) == []


def test_a_job_with_steps_shorter_than_a_look_teaches_all_its_phases() -> None:
    """Each look finds it in the same phase, a few steps further."""
    descriptor = tagpage.create("test")
    writer, reader = tagpage.TagWriter(descriptor), tagpage.TagReader(descriptor)
    os.close(descriptor)
    machine = LivenessMachine("node-a", DEADLINES)
    machine.is_initialised = True
    machine.watch(0, 0, 0.0)
    read = 0
    for look in range(3):
        for step in range(10 * look, 10 * look + 10):
            for phase in STEP:
                writer.write(1, step, phase)
        view = reader.read()
        assert view.tag.phase is Phase.UPDATED
        now_s = view.since_ns / 1e9
        machine.observe(0, Observation(view.tag, view.progress, False, False, False, False), now_s)
        for passed in longest_phases(reader.events_since(read - 1)):
            machine.passed(0, *passed)
        read = view.events_written
    for phase in MEASURED:
        machine.observe(0, Observation(Tag(1, 30, phase), 0, False, False, False, False), now_s)
        assert machine.deadline_s(0) < DEADLINES.long_s
    reader.close()


def test_what_had_ended_before_does_not_count_again() -> None:
    found = events((1.0, 1, 0, Phase.FORWARD), (3.0, 1, 0, Phase.BACKWARD), (4.0, 1, 0, Phase.SYNCED))
    assert longest_phases(found, round(3.0e9)) == [(Phase.BACKWARD, 3.0, 4.0)]
    assert longest_phases(found, round(4.0e9)) == []
