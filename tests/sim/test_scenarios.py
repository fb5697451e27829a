"""The scenarios: what they say happens is what happens. ``pytest --regenerate`` rewrites them, for review."""

from pathlib import Path

import pytest
from tests.support.scenario import parse, play

from keepstep.errors import ConfigurationError

FOLDER = Path(__file__).resolve().parent.parent / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))


def test_the_failures_that_matter_have_a_scenario() -> None:
    names = {path.stem for path in FILES}
    assert names >= {"forward", "backward", "barrier", "optimizer", "two_at_once", "during_restore"}
    assert "controller_restart" in names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_story_is_the_one_that_is_written_down(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    story = play(parse(text))
    if request.config.getoption("--regenerate"):
        path.write_text(story)
    else:
        assert story == text, f"{path.name}: the story is another one now; see it with pytest --regenerate and git diff"


CLUSTER = "3 ranks, 1 spares, 1 nodes, 4 steps"


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (["only a title"], "a title and its cluster"),
        (["title", "three ranks"], "three ranks"),
        (["title", CLUSTER, "kill rank one in forward of step 2"], "kill rank one"),
        (["title", CLUSTER, "tickle rank 1 in forward of step 2"], "tickle rank 1"),
    ],
)
def test_a_line_that_says_nothing_is_named(head: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse("\n".join([*head, "", ""]))


def test_a_fault_whose_moment_never_comes_is_reported() -> None:
    with pytest.raises(ConfigurationError, match="never came"):
        play(parse(f"title\n{CLUSTER}\nkill rank 1 in forward of step 99\n\n"))
