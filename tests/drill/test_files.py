"""What two runs have written, compared."""

from pathlib import Path

import pytest
import torch

from keepstep.drill.files import ComparedFile, compare_files


@pytest.fixture
def first(tmp_path: Path) -> Path:
    (tmp_path / "first" / "out").mkdir(parents=True)
    return tmp_path / "first"


@pytest.fixture
def second(tmp_path: Path) -> Path:
    (tmp_path / "second" / "out").mkdir(parents=True)
    return tmp_path / "second"


def test_equal_files_have_no_difference(first: Path, second: Path) -> None:
    for folder in (first, second):
        (folder / "out" / "log.txt").write_text("same")
        torch.save({"weight": torch.ones(3)}, folder / "out" / "best.pt")
    assert compare_files(first, second, ["out/*"]) == [
        ComparedFile("out/best.pt", None),
        ComparedFile("out/log.txt", None),
    ]


def test_the_first_differing_byte_is_named(first: Path, second: Path) -> None:
    (first / "out" / "log.txt").write_bytes(b"x" * (1 << 20) + b"abc")
    (second / "out" / "log.txt").write_bytes(b"x" * (1 << 20) + b"abd")
    assert compare_files(first, second, ["out/*.txt"]) == [ComparedFile("out/log.txt", "differs from byte 1048578 on")]
    (second / "out" / "log.txt").write_bytes(b"x" * (1 << 20) + b"a")
    assert compare_files(first, second, ["out/*.txt"]) == [ComparedFile("out/log.txt", "differs from byte 1048577 on")]


def test_a_file_of_one_run_is_named(first: Path, second: Path) -> None:
    (first / "out" / "a.pt").write_bytes(b"")
    (second / "out" / "b.pt").write_bytes(b"")
    assert compare_files(first, second, ["out/*.pt"]) == [
        ComparedFile("out/a.pt", "only the first run has written it"),
        ComparedFile("out/b.pt", "only the second run has written it"),
    ]


def test_a_pattern_without_a_file_is_no_yes(first: Path, second: Path) -> None:
    assert compare_files(first, second, ["out/*.pt"]) == [
        ComparedFile("out/*.pt", "neither run has written such a file")
    ]


def test_a_folder_stands_for_all_files_in_it_and_a_file_is_compared_once(first: Path, second: Path) -> None:
    for folder in (first, second):
        (folder / "out" / "deep").mkdir()
        (folder / "out" / "deep" / "a.txt").write_text("a")
    assert compare_files(first, second, ["out", "out/**/*.txt"]) == [ComparedFile("out/deep/a.txt", None)]


def test_a_checkpoint_whose_bytes_differ_is_compared_by_value(first: Path, second: Path) -> None:
    torch.save({"a": torch.ones(2), "b": 1}, first / "out" / "best.pt")
    torch.save({"b": 1, "a": torch.ones(2)}, second / "out" / "best.pt")
    assert (first / "out" / "best.pt").read_bytes() != (second / "out" / "best.pt").read_bytes()
    assert compare_files(first, second, ["out/*.pt"]) == [ComparedFile("out/best.pt", None)]
    torch.save({"b": 2, "a": torch.ones(2)}, second / "out" / "best.pt")
    assert compare_files(first, second, ["out/*.pt"]) == [ComparedFile("out/best.pt", "['b'] is 1 and 2")]


def test_nothing_is_compared_where_nothing_was_asked_for(first: Path, second: Path) -> None:
    assert compare_files(first / "is not there", second, []) == []


def test_the_path_of_a_runs_own_directory_is_the_same_to_both(first: Path, second: Path) -> None:
    for folder in (first, second):
        best = f"{folder}/out/best.ckpt"
        torch.save({"best": best, "all": {best: torch.ones(1)}, "last": [(best, 1)]}, folder / "out" / "last.ckpt")
        (folder / "out" / "config.yaml").write_text(f"folder: {folder}/out\n")
    assert compare_files(first, second, ["out"]) == [
        ComparedFile("out/config.yaml", None),
        ComparedFile("out/last.ckpt", None),
    ]
    (second / "out" / "config.yaml").write_text(f"folder: {second}/in\n")
    torch.save({"best": f"{second}/out/last.ckpt"}, first / "out" / "last.ckpt")
    torch.save({"best": f"{first}/out/last.ckpt"}, second / "out" / "last.ckpt")
    differences = {each.file: str(each.difference) for each in compare_files(first, second, ["out"])}
    assert differences["out/config.yaml"].startswith("differs from byte")
    assert differences["out/last.ckpt"].startswith("['best'] is '/"), "of the other run"


def test_files_of_torch_save_are_compared_value_by_value(first: Path, second: Path) -> None:
    def compared() -> list[ComparedFile]:
        return compare_files(first / "out", second / "out", ["*"])

    assert compared() == [ComparedFile("*", "neither run has written such a file")]
    for folder in (first, second):
        for rank in range(2):
            torch.save({"optimizer": {"state": {0: {"moment": torch.ones(2)}}}}, folder / "out" / f"rank{rank}.pt")
    assert compared() == [ComparedFile("rank0.pt", None), ComparedFile("rank1.pt", None)]
    torch.save({"optimizer": {"state": {0: {"moment": torch.zeros(2)}}}}, second / "out" / "rank1.pt")
    found = "['optimizer']['state'][0]['moment']: 2 of 2 values differ, by up to 1"
    assert compared() == [ComparedFile("rank0.pt", None), ComparedFile("rank1.pt", found)]
    (second / "out" / "rank0.pt").unlink()
    assert compared()[0] == ComparedFile("rank0.pt", "only the first run has written it")
