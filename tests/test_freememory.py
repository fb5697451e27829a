"""What a process may still take is what the tightest of its control groups leaves."""

from pathlib import Path

import psutil
import pytest

from keepstep.freememory import free_bytes, killed_together

MIB = 1 << 20


def group(folder: Path, limit: int | str, taken: int, cached: int = 0) -> None:
    """The files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"anon 17\ninactive_file {cached}\nactive_file 5\n")


def free(tmp_path: Path, membership: str) -> int:
    (tmp_path / "cgroup").write_text(membership)
    return free_bytes(tmp_path / "cgroup", tmp_path / "groups")


@pytest.mark.parametrize(
    ("job", "step", "expected"),
    [
        ((100 * MIB, 30 * MIB), ("max", 10 * MIB), 70 * MIB),
        (("max", 30 * MIB), (50 * MIB, 10 * MIB), 40 * MIB),
        ((100 * MIB, 90 * MIB), (50 * MIB, 10 * MIB), 10 * MIB),
        ((100 * MIB, 90 * MIB, 20 * MIB), ("max", 0), 30 * MIB),
        ((100 * MIB, 101 * MIB), ("max", 0), 0),
    ],
    ids=["the job's", "the step's", "the tighter one", "cached files can go", "too much already"],
)
def test_the_tightest_group_counts(tmp_path: Path, job: tuple, step: tuple, expected: int) -> None:
    group(tmp_path / "groups" / "job", *job)
    group(tmp_path / "groups" / "job" / "step", *step)
    assert free(tmp_path, "0::/job/step\n") == expected


def test_in_a_container_the_root_is_the_group(tmp_path: Path) -> None:
    group(tmp_path / "groups", 64 * MIB, 60 * MIB)
    assert free(tmp_path, "0::/\n") == 4 * MIB


@pytest.mark.parametrize("membership", ["", "12:memory:/old\n", "0::/nowhere\n", "0::/odd\n"])
def test_without_groups_it_is_the_machine_s(tmp_path: Path, membership: str) -> None:
    group(tmp_path / "groups" / "odd", "unheard of", 3)
    assert 0 < free(tmp_path, membership) <= psutil.virtual_memory().total
    assert 0 < free_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(("own", "parent", "found"), [("1", "0", "job/step"), ("0", "1", "job"), ("0", None, None)])
def test_a_group_that_is_killed_as_one(tmp_path: Path, own: str, parent: str | None, found: str | None) -> None:
    membership, groups = tmp_path / "cgroup", tmp_path / "groups"
    membership.write_text("0::/job/step\n")
    (groups / "job" / "step").mkdir(parents=True)
    (groups / "job" / "step" / "memory.oom.group").write_text(f"{own}\n")
    if parent is not None:
        (groups / "job" / "memory.oom.group").write_text(f"{parent}\n")
    assert killed_together(membership, groups) == (None if found is None else groups / found)
