"""Settings that travel through the environment."""

import inspect
import json
import re

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from keepstep.config import (
    VARIABLE,
    WorkerConfig,
    job_environment,
    script_environment,
    worker_config,
    worker_environment,
)
from keepstep.errors import ConfigurationError

CONFIG = WorkerConfig(
    worker=5,
    rank=2,
    local_rank=0,
    device=0,
    world_size=4,
    local_world_size=2,
    position=1,
    num_nodes=2,
    address="10.0.0.7",
    run_dir="/tmp/run",
    link_fd=3,
    page_fd=4,
    lifeline_fd=5,
    snapshots_fd=6,
)
FULL = WorkerConfig(
    worker=0,
    rank=None,
    local_rank=None,
    device=3,
    world_size=3,
    local_world_size=3,
    position=0,
    num_nodes=1,
    address="127.0.0.1",
    run_dir="/tmp/a folder/ü",
    link_fd=3,
    page_fd=4,
    lifeline_fd=5,
    snapshots_fd=6,
    digest=True,
    observer="module:function",
    checkpoint_root="/tmp/root",
)


@pytest.mark.parametrize("config", [CONFIG, FULL], ids=["rank", "spare"])
def test_what_an_agent_writes_a_worker_reads(config: WorkerConfig) -> None:
    environment = worker_environment(config)
    assert worker_config(environment) == config
    assert all(isinstance(value, str) for value in environment.values())
    assert "\0" not in "".join(environment.values())


def test_torchruns_own_names_stand_beside_it() -> None:
    environment = worker_environment(CONFIG)
    assert {name: value for name, value in environment.items() if name != VARIABLE} == {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "4",
    }


def test_a_spare_has_no_rank() -> None:
    environment = worker_environment(FULL)
    assert not {"RANK", "ROLE_RANK", "LOCAL_RANK"} & environment.keys()


def test_a_spare_inherits_no_rank_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a launcher that was itself started under torchrun."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("OTHER", "7")
    assert "LOCAL_RANK" not in script_environment()
    assert script_environment()["OTHER"] == "7"


def test_all_that_torchrun_sets_is_there() -> None:
    """Held against the torch that is installed, so that a new one cannot add a variable unnoticed."""
    parts = (LocalElasticAgent._start_workers, LocalElasticAgent._set_local_rank_env)
    names = set(re.findall(r'"([A-Z][A-Z_]+)"', "".join(map(inspect.getsource, parts))))
    names -= {
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
    }  # of the launcher, and of --virtual-local-rank
    job = job_environment(role="r", run_id="i", max_restarts=None, master_address="127.0.0.1", master_port=1)
    assert "LOCAL_RANK" in names
    assert names - job.keys() - worker_environment(CONFIG).keys() == set()


def test_no_setting_of_the_user_s_has_torch_end_a_process_that_lost_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    job = job_environment(role="r", run_id="i", max_restarts=None, master_address="127.0.0.1", master_port=1)
    assert (job["TORCH_NCCL_ASYNC_ERROR_HANDLING"], job["TORCH_NCCL_ENABLE_MONITORING"]) == ("2", "0")


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"RANK": "0"}], ids=str)
def test_without_an_agent_there_are_no_settings(environment: dict[str, str]) -> None:
    assert worker_config(environment) is None


@pytest.mark.parametrize("size", ["2", "16", "x"])
def test_another_launcher_is_named(size: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^WORLD_SIZE={size} is set but keepstep did not start this.*run'"):
        worker_config({"WORLD_SIZE": size})


def changed(**values: object) -> str:
    return json.dumps(json.loads(worker_environment(CONFIG)[VARIABLE]) | values)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("no json", "malformed"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `worker`"),
        (changed(rank="one"), "at `$.rank`"),
        (changed(link_fd=None), "at `$.link_fd`"),
        (changed(unknown=1), "contains unknown field `unknown`"),
    ],
)
def test_a_variable_that_no_agent_wrote_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        worker_config({VARIABLE: text})
    assert str(caught.value).startswith(f"{VARIABLE} is set by keepstep's agent only, and does not parse: ")
    assert what in str(caught.value)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert worker_config() is None
    for name, value in worker_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    assert worker_config() == CONFIG
