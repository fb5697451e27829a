"""Each construct gives on keepstep's groups, bit for bit, what it gives on torch's own gloo."""

import re
import warnings
from pathlib import Path

import pytest
from tests.support.jobs import ROOT
from tests.test_docs import section
from tests.worker import ranks
from tests.worker.constructs import operations, pipelines, training
from tests.worker.constructs.construct import SIZE, Ranks, digests
from tests.worker.ranks import Watcher, file_store, join, meet
from torch import distributed as dist

PAGE = ROOT / "docs" / "upstream.md"
EQUAL = "equal"
CONSTRUCTS = training.CONSTRUCTS | pipelines.CONSTRUCTS | operations.CONSTRUCTS
DEADLINE_S = 200.0
"""For all constructs on one system: some 15 s on two cores, half of it for imports. It ends a test that hangs."""
Digests = dict[str, dict[str, str]]
"""By construct and tensor, on one rank."""


def all_constructs(rank: int, size: int, path: Path, system: str) -> Digests:
    """One after the other in the same processes, which is what takes little time."""
    warnings.simplefilter("ignore")  # torch's own, on import and about names to come
    if system == "gloo":
        dist.init_process_group("gloo", store=file_store(path), rank=rank, world_size=size)
    else:
        join(path, rank, size, Watcher(echoes=False))
    found = {}
    for name, function in CONSTRUCTS.items():
        found[name] = digests(function(Ranks(rank, path)))
        meet(path, size, name)
    return found


@pytest.fixture(scope="module")
def on_both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Digests]]:
    """By system, of each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "DEADLINE_S", DEADLINE_S)
        return {
            system: ranks.run_ranks(SIZE, all_constructs, tmp_path_factory.mktemp(system), system)
            for system in ("gloo", "keepstep")
        }


def described() -> dict[str, str]:
    """The table of the page: by construct, "equal" or why it is not."""
    text = section(PAGE, "What the backend leaves as it is")
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)[2:])


def test_the_page_has_all_constructs() -> None:
    assert sorted(described()) == sorted(CONSTRUCTS)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_gives_what_gloo_gives(name: str, on_both: dict[str, list[Digests]]) -> None:
    theirs, ours = ([found[name] for found in on_both[system]] for system in ("gloo", "keepstep"))
    assert any(theirs)
    if described()[name] == EQUAL:
        assert ours == theirs
    else:
        assert ours != theirs, "the page says that it differs"
