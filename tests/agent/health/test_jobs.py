"""Real jobs whose devices a fake of NVML makes sick. The ranks compute on the CPU: no GPU was there for these tests."""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_nvml import FakeNvml
from tests.support.jobs import SCRIPTS, run

from keepstep.agent.health import watch
from keepstep.agent.settings import HealthMode, HealthSettings
from keepstep.errors import ConfigurationError
from keepstep.launcher.flags import job_options, make_parser
from keepstep.launcher.job import Job, JobOptions, run_job
from keepstep.protocol.recovery import EXIT_TOO_FEW_RANKS, Stage

SCRIPT = """
import time
from pathlib import Path
import torch
from torch.nn.parallel import DistributedDataParallel
import keepstep

session = keepstep.init(seed=3)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
for step in session.steps(60):
    while step.index in (20, 40) and not Path(__file__).with_name(f"gate-{step.index}").exists():
        time.sleep(0.02)
    with step:
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step.index * 100 + session.rank))
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
GATES = (20, 40)
"""Before these steps the ranks wait for a file, so that what happens there does so while they train."""
DEADLINE_S = 120.0
SOON_S = 3.0
"""A device is found sick before that. The gate stays shut meanwhile, or ranks would wait at the next one already."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.1)
    fake = FakeNvml(4)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def options(tmp_path: Path, *flags: str, mode: HealthMode = HealthMode.ACT) -> JobOptions:
    """A job of two ranks on a node whose devices are those of the fake."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), *flags, str(script)]
    job = job_options(make_parser("keepstep run").parse_args(words))
    agent = dataclasses.replace(
        job.agent, devices=("0", "1", "2", "3"), health=HealthSettings(mode, by_bus=True), digest=True
    )
    return dataclasses.replace(job, agent=agent)


def makes_sick(tmp_path: Path, *deeds: Callable[[Job], object]) -> Callable[[Job], Any]:
    """Beside a job: one thing at each gate, when all ranks train in the next generation, and all spares are warm."""

    async def companion(job: Job) -> None:
        for generation, (gate, deed) in enumerate(zip(GATES, deeds, strict=False), start=1):
            await trains(job, generation)
            deed(job)
            with contextlib.suppress(TimeoutError):  # not each of them begins a recovery
                async with asyncio.timeout(SOON_S):
                    while job.controller.job.generation == generation:  # noqa: ASYNC110  # a machine sends no event
                        await asyncio.sleep(0.02)
            (tmp_path / f"gate-{gate}").touch()
        open_gates(tmp_path)

    return companion


def open_gates(tmp_path: Path) -> None:
    """No rank waits any more."""
    for gate in GATES:
        (tmp_path / f"gate-{gate}").touch()


async def trains(job: Job, generation: int) -> None:
    """Waits until all ranks train in a generation, and all spares are warm."""
    machine = job.controller.job
    async with asyncio.timeout(DEADLINE_S):
        while True:
            steps = [int(str(each["step"])) for each in job.agent.status() if each["rank"] is not None]
            is_warm = machine.roster.num_ready_spares == len(machine.roster.spares())
            if (machine.stage, machine.generation) == (Stage.TRAINING, generation) and is_warm and min(steps) > 2:
                return
            await asyncio.sleep(0.02)


def test_the_weights_are_those_of_a_run_in_which_no_device_fails(tmp_path: Path, nvml: FakeNvml) -> None:
    """Device 1 is lost, then device 0 is to be drained: both ranks end on other devices, and no step is lost."""
    open_gates(tmp_path)
    undisturbed = run_job(options(tmp_path, "--spares", "2"))
    assert undisturbed["recoveries"] == []
    for gate in GATES:
        (tmp_path / f"gate-{gate}").unlink()
    deeds = (lambda _job: nvml.raise_xid(1, 79), lambda _job: nvml.raise_xid(0, 74))
    result = run_job(options(tmp_path, "--spares", "2"), makes_sick(tmp_path, *deeds))
    assert result["exit_code"] == 0, result["reason"]
    assert result["digests"] == undisturbed["digests"]
    first, second = result["recoveries"]
    uuids = [device.uuid for device in nvml.devices]
    assert (first["cause"], first["failed_ranks"]) == ("device failed", [1])
    assert first["detail"] == f"rank 1 lost: GPU 1 ({uuids[1]}): Xid 79: GPU has fallen off the bus"
    assert first["step"] is not None
    assert (second["cause"], second["failed_ranks"]) == ("rank moved", [0])
    assert second["detail"] == f"rank 0 lost: its device is sick: GPU 0 ({uuids[0]}): Xid 74: NVLINK Error"
    assert max(each["steps_recomputed"] for each in (first, second)) <= 1
    assert [place.partition(" of ")[0] for place in result["closed_devices"]] == ["device 0", "device 1"]
    assert all("Xid" in reason for reason in result["closed_devices"].values())


def test_without_a_device_for_the_rank_the_job_ends_with_the_reason(
    tmp_path: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the state is saved

    def lose(_job: Job) -> None:
        nvml.devices[1].error = 15  # NVML_ERROR_GPU_IS_LOST

    result = run_job(options(tmp_path, "--spares", "0"), makes_sick(tmp_path, lose))
    assert result["exit_code"] == EXIT_TOO_FEW_RANKS
    assert "no device is left for ranks [1]: rank 1 lost: GPU 1 (" in result["reason"]
    assert "GPU is lost" in result["reason"]


def test_a_sick_spare_is_not_chosen(tmp_path: Path, nvml: FakeNvml) -> None:
    """The devices of ranks 0 and 1 and of two spares; that of the first spare fails first."""
    nvml.devices[2].rows = (0, 1, 0, 1)
    placed: list[int] = []

    def look(job: Job) -> None:
        placed.extend(worker.device for worker in job.controller.job.roster.workers.values())

    companion = makes_sick(tmp_path, lambda _job: nvml.raise_xid(1, 95), look)
    result = run_job(options(tmp_path, "--spares", "2"), companion)
    assert result["exit_code"] == 0, result["reason"]
    assert 2 not in placed
    assert sorted(placed)[:3] == [0, 1, 3]


def test_a_job_that_has_too_few_devices_from_the_start_is_refused(tmp_path: Path, nvml: FakeNvml) -> None:
    nvml.devices[0].rows = (0, 1, 0, 1)
    with pytest.raises(ConfigurationError, match=r"2 ranks were asked for, and 1 devices are fit to be used: GPU 0 \("):
        run_job(options(tmp_path, "--spares", "0"))


def test_a_warning_changes_nothing(tmp_path: Path, nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_job(options(tmp_path, mode=HealthMode.WARN), makes_sick(tmp_path, lambda _job: nvml.raise_xid(1, 79)))
    assert (result["exit_code"], result["recoveries"]) == (0, [])
    assert "Xid 79" in capsys.readouterr().err


def test_where_no_gpu_is_visible_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _out, err = run("run", "--nproc-per-node", 1, "--spares", 0, SCRIPTS / "tiny.py", "--steps", 2)
    assert (code, err) == (0, "keepstep: 2 steps, no rank lost\n")


def test_where_no_gpu_is_visible_act_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = run("run", "--nproc-per-node", 1, "--health", "act", SCRIPTS / "tiny.py", "--steps", 2)
    assert code != 0
    assert out == ""
    assert "--health act: torch sees no CUDA device on this node; or leave --health out" in err
