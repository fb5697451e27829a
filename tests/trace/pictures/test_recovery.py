"""The picture of a recovery: whatever happened, it is a whole file, and no label touches another one."""

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.recorded import growing, recorded_run
from tests.trace.pictures.conftest import SEEDS, opened

from keepstep.trace.pictures.drawing import Line, Picture, Rectangle, Text, text_width
from keepstep.trace.pictures.recovery import FIRST_LANE, draw_recovery
from keepstep.trace.record import runfolder
from keepstep.trace.timeline.run import Run


def overlapping(picture: Picture) -> Iterator[tuple[str, str]]:
    """Pairs of texts of which one covers the other, and texts that leave the picture."""
    texts = [shape for shape in picture.shapes if isinstance(shape, Text)]
    for number, text in enumerate(texts):
        begin, end = text.span
        if begin < 0 or end > picture.width or not 0 < text.y < picture.height:
            yield text.content, "the edge"
        for other in texts[number + 1 :]:
            other_begin, other_end = other.span
            if abs(text.y - other.y) < 9 and begin < other_end and other_begin < end:
                yield text.content, other.content


def contents(picture: Picture) -> set[str]:
    return {shape.content for shape in picture.shapes if isinstance(shape, Text)}


def kinds(picture: Picture) -> set[str]:
    return {shape.kind for shape in picture.shapes if isinstance(shape, Rectangle)}


def test_a_rank_that_was_killed(real: Run) -> None:
    picture = draw_recovery(real, 1)
    ET.fromstring(picture.svg())
    assert list(overlapping(picture)) == []
    said = contents(picture)
    assert {"Rank 1 lost: killed by SIGKILL", "rank 0", "rank 1", "rank 2", "spare", "parameters", "recovery"} <= said
    assert any("12, again" in text for text in said)
    assert {"forward", "backward", "optimizer", "stop", "reset", "restore", "send", "band"} <= kinds(picture)
    assert sum(shape.kind == "bolt" for shape in picture.shapes) == 1
    assert sum(shape.kind == "barrier" for shape in picture.shapes) >= 2


def test_a_recovery_that_was_overtaken_and_one_that_never_ended(overtaken: Run) -> None:
    first, second = draw_recovery(overtaken, 1), draw_recovery(overtaken, 2)
    assert any("another failure interrupted" in text for text in contents(first))
    assert any("the job ended during this recovery" in text for text in contents(second))
    for picture in (first, second):
        ET.fromstring(picture.svg())
        assert list(overlapping(picture)) == []


def has_narrow_bracket(picture: Picture) -> bool:
    """Whether one of the brackets over the lanes is too narrow for the word."""
    brackets = [shape.points for shape in picture.shapes if isinstance(shape, Line) and shape.points[0][1] < FIRST_LANE]
    return any(right - left + 24 < text_width("recovery", "head") for (left, _), (right, _) in brackets)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens(simulated: Callable[[int], Run], seed: int) -> None:
    run = simulated(seed)
    for scene in run.scenes:
        picture = draw_recovery(run, scene.number)
        ET.fromstring(picture.svg())
        assert list(overlapping(picture)) == []
        boxes = [shape for shape in picture.shapes if isinstance(shape, Rectangle)]
        assert all(box.width > 0 and box.x >= 0 and box.x + box.width <= picture.width for box in boxes)
        is_whole = scene.overtaken_s is None and scene.record.resumed_s is not None
        assert "recovery" in contents(picture) or not is_whole or has_narrow_bracket(picture)


def test_those_seeds_have_what_is_hard(simulated: Callable[[int], Run]) -> None:
    scenes = [scene for seed in SEEDS for scene in simulated(seed).scenes]
    assert any(scene.overtaken_s is not None for scene in scenes)
    assert any(len(scene.record.failures) > 2 for scene in scenes)
    assert any(scene.record.decided_s is None for scene in scenes)
    assert any(not scene.replacements for scene in scenes)
    assert any(len(scene.replacements) > 1 for scene in scenes)


def test_at_every_moment_of_a_recovery(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """While it goes on: after each entry of the journal, the picture is whole."""
    source = recorded_run(tmp_path_factory.getbasetemp()).folder
    with growing(source, tmp_path / "growing") as copy:
        run = Run(copy.folder)
        outcomes = set()
        while copy.lines:
            copy.grow()
            run.poll()
            if run.scenes:
                picture = draw_recovery(run, 1)
                ET.fromstring(picture.svg())
                assert list(overlapping(picture)) == []
                outcomes |= contents(picture)
        run.close()
    assert any("the recovery is in progress" in outcome for outcome in outcomes)
    assert any("training continues from step" in outcome for outcome in outcomes)


def test_without_phases_there_is_still_the_journal(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = recorded_run(tmp_path_factory.getbasetemp()).folder
    for name in (runfolder.INFO, runfolder.JOURNAL):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    run = opened(tmp_path)
    picture = draw_recovery(run, 1)
    run.close()
    ET.fromstring(picture.svg())
    assert list(overlapping(picture)) == []
    assert {"stop", "reset", "restore", "send"} <= kinds(picture)
    assert "forward" not in kinds(picture)
    assert "recovery" in contents(picture)
