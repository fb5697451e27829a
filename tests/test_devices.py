"""Each process finds its own device at LOCAL_RANK."""

import itertools
import os
from pathlib import Path

import pytest

from keepstep.agent.environment import environment_of
from keepstep.agent.settings import AgentSettings, NodePlace
from keepstep.config import leave_park, worker_config
from keepstep.devices import names_of, order_for
from keepstep.protocol.node.effects import Spawn

DEVICES = ("4", "5", "6", "7")


def test_a_process_on_the_device_of_its_number_sees_them_as_they_are() -> None:
    assert [order_for(DEVICES, number, number) for number in range(4)] == [DEVICES] * 4


def test_a_replacement_finds_its_own_device_at_the_lost_ranks_number() -> None:
    assert order_for(DEVICES, device=3, local_rank=1) == ("6", "7", "4", "5")


def test_whatever_the_numbers_the_own_device_is_where_the_script_looks() -> None:
    for device, local_rank in itertools.product(range(9), range(9)):
        order = order_for(DEVICES, device, local_rank)
        assert sorted(order) == sorted(DEVICES)
        assert order[local_rank % 4] == DEVICES[device % 4]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ("0", "1")), ("2, 3", ("2", "3")), ("GPU-a,GPU-b", ("GPU-a", "GPU-b")), ("0,1,-1,2", ("0", "1"))],
)
def test_devices_keep_the_names_that_the_environment_gives_them(visible: str | None, expected: tuple[str, ...]) -> None:
    assert names_of(visible, 2) == expected


def test_no_device_is_there() -> None:
    assert names_of("", 0) == names_of(None, 0) == ()


def environment(worker: Spawn, devices: tuple[str, ...] = DEVICES) -> dict[str, str]:
    settings = AgentSettings(("script",), False, False, True, NodePlace.alone(3, 1), Path("/run"), devices=devices)
    return environment_of(worker, settings)


def test_only_who_is_elsewhere_is_told_of_devices() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in environment(Spawn(1, 1, 1, 1, 3))
    assert "CUDA_VISIBLE_DEVICES" not in environment(Spawn(3, None, 3, None, 3))
    assert "CUDA_VISIBLE_DEVICES" not in environment(Spawn(4, 1, 3, 1, 3), devices=())
    assert environment(Spawn(4, 1, 3, 1, 3))["CUDA_VISIBLE_DEVICES"] == "6,7,4,5"


def test_processes_that_share_gpus_are_told_and_nccl_too() -> None:
    settings = AgentSettings(
        ("script",), False, False, True, NodePlace.alone(3, 1), Path("/run"), devices=("0",), shares_gpus=True
    )
    told = environment_of(Spawn(2, 1, 1, 1, 3), settings)
    config = worker_config(told)
    assert config is not None
    assert config.shares_gpus
    assert told["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    alone = worker_config(environment(Spawn(1, 1, 1, 1, 3)))
    assert alone is not None
    assert not alone.shares_gpus


def test_a_parked_spare_gets_the_order_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment(Spawn(4, None, 3, None, 3))
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "ROLE_RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that they are put back at the end
    config = worker_config(before)
    assert config is not None
    leave_park(config, rank=5, local_rank=1, local_world_size=3)
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["5", "1", "3"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7,4,5"
    after = worker_config()
    assert after is not None
    assert (after.device, after.rank) == (1, None)


def test_a_parked_spare_beyond_the_devices_gets_one_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment(Spawn(4, None, 9, None, 3))
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "ROLE_RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that they are put back at the end
    config = worker_config(before)
    assert config is not None
    leave_park(config, rank=5, local_rank=1, local_world_size=3, device=2)
    assert os.environ["CUDA_VISIBLE_DEVICES"].split(",")[1] == "6", "the third of its node"
    after = worker_config()
    assert after is not None
    assert (after.device, after.slot) == (1, 2)


@pytest.mark.parametrize(("worker", "expected"), [(Spawn(4, 1, 3, 1, 3), 1), (Spawn(3, None, 3, None, 3), 3)])
def test_the_session_knows_where_its_own_device_stands(worker: Spawn, expected: int) -> None:
    config = worker_config(environment(worker))
    assert config is not None
    assert config.device == expected
