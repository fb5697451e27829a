"""What two runs have written, compared."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.tensorboard import SummaryWriter

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


def write_dcp(folder: Path, values: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        dcp.save(values, checkpoint_id=folder, no_dist=True)


def test_a_dcp_folder_is_compared_by_value(first: Path, second: Path) -> None:
    values = {"model": {"a": torch.ones(3), "b": torch.zeros(2, 2)}, "step": 4}
    write_dcp(first / "out" / "step-4", values)
    write_dcp(second / "out" / "step-4", dict(reversed(values.items())))
    assert (first / "out/step-4/.metadata").read_bytes() != (second / "out/step-4/.metadata").read_bytes()
    assert compare_files(first, second, ["out"]) == [ComparedFile("out/step-4", None)]
    assert compare_files(first, second, ["out/*/*.distcp"]) == [ComparedFile("out/step-4", None)]
    write_dcp(second / "out" / "step-4", {**values, "step": 5})
    assert compare_files(first, second, ["out"]) == [ComparedFile("out/step-4", "['step'] is 4 and 5")]
    write_dcp(second / "out" / "step-4", {**values, "model": {"a": torch.ones(3), "b": torch.ones(2, 2)}})
    found = "['model.b']: 4 of 4 values differ, by up to 1"
    assert compare_files(first, second, ["out"]) == [ComparedFile("out/step-4", found)]
    for broken in ("__0_0.distcp", ".metadata"):
        (second / "out" / "step-4" / broken).write_bytes(b"cut off")
        (file,) = compare_files(first, second, ["out"])
        assert str(file.difference).startswith("its bytes differ, and torch.distributed.checkpoint does not read it: ")


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_safetensors_are_compared_by_value(first: Path, second: Path) -> None:
    one, other = (folder / "out" / "m.safetensors" for folder in (first, second))
    tensors = {"a": torch.ones(2), "empty": torch.empty(0), "b": torch.zeros(3)}
    write_safetensors(one, tensors, x="1", y="2")
    write_safetensors(other, dict(reversed(tensors.items())), y="2", x="1")
    assert one.read_bytes() != other.read_bytes()
    assert compare_files(first, second, ["out"]) == [ComparedFile("out/m.safetensors", None)]
    write_safetensors(other, {**tensors, "b": torch.tensor([0.0, 0.5, 0.0])}, x="1", y="2")
    found = "['b']: 1 of 3 values differ, by up to 0.5"
    assert compare_files(first, second, ["out"]) == [ComparedFile("out/m.safetensors", found)]
    other.write_bytes(other.read_bytes()[:-4])
    (file,) = compare_files(first, second, ["out"])
    assert "the format of safetensors does not read it: the file is cut off" in str(file.difference)


def write_events(folder: Path, values: list[float], begin: int = 0) -> None:
    writer = SummaryWriter(str(folder), filename_suffix=f".{begin}")
    for step, value in enumerate(values, start=begin):
        writer.add_scalar("loss", value, step)
    writer.close()


def test_event_files_of_a_folder_are_compared_as_one_series(first: Path, second: Path) -> None:
    pytest.importorskip("tensorboard")
    write_events(first / "out", [3.0, 2.0, 1.0])
    write_events(second / "out", [3.0, 2.0])
    (missing,) = compare_files(first, second, ["out"])
    name = "out/events.out.tfevents.*"
    assert missing == ComparedFile(name, "['loss'][2] is there in only one of the runs")
    write_events(second / "out", [2.0, 1.0], begin=1)  # as a replacement does
    assert compare_files(first, second, ["out"]) == [ComparedFile(name, None)]
    write_events(second / "out", [1.5], begin=2)
    assert compare_files(first, second, ["out"]) == [ComparedFile(name, "['loss'][2] is 1.0 and [1.0, 1.5]")]


def test_event_files_without_tensorboard_are_compared_by_their_bytes(
    first: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    for folder, data in ((first, b"a"), (second, b"b")):
        (folder / "out" / f"events.out.tfevents.{folder.name}").write_bytes(data)
    (file,) = compare_files(first, second, ["out"])
    assert str(file.difference).startswith("its bytes differ, and tensorboard does not read it: ")
    (second / "out" / "events.out.tfevents.second").write_bytes(b"a")
    assert compare_files(first, second, ["out"]) == [ComparedFile("out/events.out.tfevents.*", None)]


def test_a_symbolic_link_is_compared_as_what_it_leads_to(first: Path, second: Path) -> None:
    for folder in (first, second):
        for step in ("step-10", "step-20"):
            (folder / "out" / step).mkdir()
            (folder / "out" / step / "a.txt").write_text("a")
        (folder / "out" / "last").symlink_to("step-20")
    assert compare_files(first, second, ["out/last"]) == [ComparedFile("out/last", None)]
    (second / "out" / "step-20" / "a.txt").write_text("b")
    found = "out/step-20/a.txt: differs from byte 0 on"
    assert compare_files(first, second, ["out/last"]) == [ComparedFile("out/last", found)]
    (second / "out" / "last").unlink()
    (second / "out" / "last").symlink_to("step-10")
    found = "is a symbolic link to out/step-20 and out/step-10"
    assert compare_files(first, second, ["out"])[0] == ComparedFile("out/last", found)


def test_a_symbolic_link_out_of_the_working_directory_is_not_followed(first: Path, second: Path) -> None:
    for folder in (first, second):
        (folder / "out" / "data").symlink_to(folder.parent)
        (folder / "out" / "up").symlink_to("..")
    (data, up) = compare_files(first, second, ["out"])
    assert data.difference == (
        f"is a symbolic link out of the working directory, to {first.parent}, and is not followed"
    )
    assert up.difference is None


def test_a_folder_reached_through_a_link_is_the_same_to_both(first: Path, second: Path, tmp_path: Path) -> None:
    for folder in (first, second):
        (folder / "out" / "config.yaml").write_text(f"folder: {folder}/out\n")
    (tmp_path / "link").symlink_to(tmp_path)
    for way in (tmp_path / "link", tmp_path / "first" / ".."):
        assert compare_files(way / "first", way / "second", ["out"]) == [ComparedFile("out/config.yaml", None)]
