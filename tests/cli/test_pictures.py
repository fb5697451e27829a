"""``keepstep trace``, ``keepstep report`` and what ``run`` and ``drill`` leave behind, as a user meets them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, run
from tests.support.published import FOLDER, published_run
from tests.support.recorded import recorded_run

from keepstep.cli.main import main
from keepstep.drill.drill import Drill, run_drill
from keepstep.drill.faults import default_faults
from keepstep.errors import ConfigurationError
from keepstep.launcher.flags import job_options, make_parser
from keepstep.trace.record import runfolder

TINY = SCRIPTS / "tiny.py"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one recovery."""
    return recorded_run(tmp_path_factory.getbasetemp()).folder


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_drawing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("trace", "draw", folder, "-o", tmp_path / "last.svg") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'last.svg'}\n"
    assert command("trace", "draw", folder, "--recovery", 1, "-o", tmp_path / "first.svg") == 0
    assert ET.parse(tmp_path / "last.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "last.svg").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.svg", "last.svg"]


def test_drawing_an_update_of_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, published = tmp_path / "x.svg", published_run(folder, tmp_path / "run")
    for run_folder, weights, message in (
        (folder, FOLDER, "--weights /run/weights: this run has not published there; it has in: nothing"),
        (published, "/else", "--weights /else: this run has not published there; it has in: /run/weights"),
    ):
        assert command("trace", "draw", run_folder, "--weights", weights, "-o", target) == 2
        assert message in capsys.readouterr().err
    assert command("trace", "draw", published, "--weights", FOLDER, "-o", target) == 0
    drawn = target.read_text("utf-8")
    assert all(f"device {number}" in drawn for number in (0, 1))
    boxes = ET.parse(target).getroot().findall(".//{http://www.w3.org/2000/svg}rect")
    kinds = [box.get("class") for box in boxes]
    # Three buckets of each stage on each device, and the legend.
    assert [kinds.count(kind) for kind in ("h2d", "broadcast", "reload")] == [7, 7, 7]


def test_exporting_and_reporting(folder: Path, tmp_path: Path) -> None:
    assert command("trace", "export", folder, "-o", tmp_path / "trace.json") == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert command("report", folder, "-o", tmp_path / "report.html") == 0
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_what_cannot_be_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (
            ("trace", "draw", folder, "--recovery", 2, "-o", tmp_path / "x.svg"),
            "--recovery 2: the run has 1, so 1 to 1",
        ),
        (
            ("trace", "draw", folder, "--recovery", 0, "-o", tmp_path / "x.svg"),
            "--recovery 0: the run has 1, so 1 to 1",
        ),
        (("trace", "draw", folder, "-o", tmp_path / "x.jpg"), "x.jpg: the name must end with .svg"),
        (("trace", "draw", tmp_path, "-o", tmp_path / "x.svg"), "no run is recorded there"),
        (("trace", "export", folder, "-o", tmp_path / "no" / "x.json"), "no does not exist"),
        (("report", tmp_path / "nothing", "-o", tmp_path / "x.html"), "no run is recorded there"),
        (("report", folder, "-o", tmp_path), "is a folder; name a file"),
    ):
        assert command(*arguments) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_failure_has_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _out, err = run(
        "run", "--nproc-per-node", 1, "--spares", 0, "--run-dir", tmp_path / "run", "--trace", tmp_path / "trace.json",
        TINY, "--steps", 3,
    )  # fmt: skip
    assert code == 0, err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {0, 1, 2}
    assert command("trace", "draw", tmp_path / "run", "-o", tmp_path / "x.svg") == 2
    assert "there is no recovery to draw" in capsys.readouterr().err
    assert command("report", tmp_path / "run", "-o", tmp_path / "report.html") == 0


def test_a_trace_of_a_run_that_failed_in_a_folder_that_goes(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    code, _out, err = run("run", "--nproc-per-node", 1, "--spares", 0, "--trace", tmp_path / "trace.json", script)
    assert code != 0, err
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["command"] == str(script)


def test_the_target_of_a_trace_is_checked_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^--trace .*does not exist"):
        job_options(make_parser("keepstep run").parse_args(["--trace", str(tmp_path / "no" / "t.json"), str(TINY)]))


def test_a_drill_keeps_both_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    flags = ("--nproc-per-node", 2, "--run-dir", runs, "--faults", "kill@step=4,phase=backward,rank=1")
    (runs / "reference").mkdir(parents=True)
    (runs / "reference" / "left.txt").write_text("from an earlier drill")
    targets = (
        "--html",
        tmp_path / "drill.html",
        "--trace",
        tmp_path / "drill.json",
        "--json",
        tmp_path / "result.json",
    )
    code, out, err = run("drill", *flags, *targets, TINY, "--steps", 8)
    assert code == 0, out + err
    assert (runs / "earlier-1" / "reference" / "left.txt").exists()
    assert not (runs / "reference" / "left.txt").exists()
    assert {path.name for path in runs.iterdir()} == {"reference", "with-faults", "earlier-1"}
    assert runfolder.newest_run(runs) == runs / "with-faults"
    assert '"taken_by_worker":{"1":2}' in (tmp_path / "drill.html").read_text("utf-8")
    assert any(event["ph"] == "s" for event in json.loads((tmp_path / "drill.json").read_text())["traceEvents"])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["identical"]
    assert command("trace", "draw", runs, "-o", tmp_path / "drill.svg") == 0


def test_two_drills_do_not_share_a_folder(tmp_path: Path) -> None:
    options = job_options(make_parser("keepstep drill").parse_args(["--run-dir", str(tmp_path), str(TINY)]))

    async def follow(title: str, job: object) -> None:
        pytest.fail("it has begun")

    (tmp_path / "reference").mkdir()
    with runfolder.occupied(tmp_path / "reference"), pytest.raises(ConfigurationError, match="another drill"):
        run_drill(options, Drill(default_faults(1)), follow, tmp_path)
    assert (tmp_path / "reference").exists()


@pytest.mark.parametrize("flag", ["--html", "--json"])
def test_the_targets_of_a_drill_are_checked_before_it(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("drill", flag, tmp_path / "no" / "file", TINY) == 2
    assert f"{flag} {tmp_path / 'no' / 'file'}: the folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err
