"""Real jobs whose devices a fake of NVML makes sick. The ranks compute on the CPU: no GPU was there for these tests."""

import asyncio
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
import torch
from torch.nn.parallel import DistributedDataParallel
import keepstep

session = keepstep.init(seed=3)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
for step in session.steps(150):
    with step:
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step.index * 100 + session.rank))
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.02)
"""
DEADLINE_S = 120.0


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


def makes_sick(*deeds: Callable[[], object]) -> Callable[[Job], Any]:
    """Beside a job: does one thing after the other, each when all ranks train and a spare, if there is any, is warm."""

    async def companion(job: Job) -> None:
        for generation, deed in enumerate(deeds, start=1):
            await trains(job, generation)
            deed()

    return companion


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
    undisturbed = run_job(options(tmp_path, "--spares", "2"))
    assert undisturbed["recoveries"] == []
    deeds = (lambda: nvml.raise_xid(1, 79), lambda: nvml.raise_xid(0, 74))
    result = run_job(options(tmp_path, "--spares", "2"), makes_sick(*deeds))
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


def test_without_a_device_for_the_rank_the_job_ends_with_the_reason(
    tmp_path: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the state is saved

    def lose() -> None:
        nvml.devices[1].error = 15  # NVML_ERROR_GPU_IS_LOST

    result = run_job(options(tmp_path, "--spares", "0"), makes_sick(lose))
    assert result["exit_code"] == EXIT_TOO_FEW_RANKS
    assert "no device is left for ranks [1]: rank 1 lost: GPU 1 (" in result["reason"]
    assert "GPU is lost" in result["reason"]


def test_a_sick_spare_is_not_chosen(tmp_path: Path, nvml: FakeNvml) -> None:
    """The devices of ranks 0 and 1 and of two spares; that of the first spare fails first."""
    nvml.devices[2].rows = (0, 1, 0, 1)
    placed: list[int] = []

    async def companion(job: Job) -> None:
        await makes_sick(lambda: nvml.raise_xid(1, 95))(job)
        await trains(job, 2)
        placed.extend(worker.device for worker in job.controller.job.roster.workers.values())

    result = run_job(options(tmp_path, "--spares", "2"), companion)
    assert result["exit_code"] == 0, result["reason"]
    assert 2 not in placed
    assert sorted(placed)[:3] == [0, 1, 3]


def test_a_job_that_has_too_few_devices_from_the_start_is_refused(tmp_path: Path, nvml: FakeNvml) -> None:
    nvml.devices[0].rows = (0, 1, 0, 1)
    with pytest.raises(ConfigurationError, match=r"2 ranks were asked for, and 1 devices are fit to be used: GPU 0 \("):
        run_job(options(tmp_path, "--spares", "0"))


def test_a_warning_changes_nothing(tmp_path: Path, nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_job(options(tmp_path, mode=HealthMode.WARN), makes_sick(lambda: nvml.raise_xid(1, 79)))
    assert (result["exit_code"], result["recoveries"]) == (0, [])
    assert "Xid 79" in capsys.readouterr().err


def test_where_no_gpu_is_visible_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _out, err = run("run", "--nproc-per-node", 1, "--spares", 0, SCRIPTS / "tiny.py", "--steps", 2)
    assert (code, err) == (0, "")


def test_where_no_gpu_is_visible_act_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = run("run", "--nproc-per-node", 1, "--health", "act", SCRIPTS / "tiny.py", "--steps", 2)
    assert code != 0
    assert out == ""
    assert "--health act: torch sees no CUDA device on this node; or leave --health out" in err
