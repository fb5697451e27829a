"""Each process has a GPU of its own, or may share one."""

import msgspec
import pytest
from tests.test_config import CONFIG

from keepstep.config import MULTI_RANK_VARIABLE, WorkerConfig
from keepstep.errors import ConfigurationError
from keepstep.worker.backends.own_device import refuse_sharing

NEW, OLD = (2, 30, 7), (2, 28, 9)


def at(slot: int, *, shares_gpus: bool = False, rank: int | None = 1) -> WorkerConfig:
    return msgspec.structs.replace(CONFIG, slot=slot, shares_gpus=shares_gpus, rank=rank)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_process_with_a_gpu_of_its_own_may_use_it(slot: int) -> None:
    refuse_sharing(at(slot), 2, OLD)


def test_more_ranks_than_gpus_need_a_permission() -> None:
    with pytest.raises(ConfigurationError, match=r"rank 1 is process 3 of its node, which has 2 GPUs: .*--share-gpus"):
        refuse_sharing(at(2), 2, NEW)


def test_a_spare_without_a_gpu_needs_one_too() -> None:
    with pytest.raises(ConfigurationError, match=r"a spare is process 2 of its node, which has 1 GPU: "):
        refuse_sharing(at(1, rank=None), 1, NEW)


def test_an_old_nccl_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTI_RANK_VARIABLE, "1")
    with pytest.raises(ConfigurationError, match=r"--share-gpus: rank 1 .* from 2\.30 on .* built with 2\.28\.9"):
        refuse_sharing(at(2, shares_gpus=True), 2, OLD)


def test_a_new_nccl_shares_where_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTI_RANK_VARIABLE, "1")
    refuse_sharing(at(2, shares_gpus=True), 2, NEW)
    monkeypatch.delenv(MULTI_RANK_VARIABLE)
    with pytest.raises(ConfigurationError, match="NCCL_MULTI_RANK_GPU_ENABLE=1"):
        refuse_sharing(at(2, shares_gpus=True), 2, NEW)


def test_gloo_shares_anyway() -> None:
    refuse_sharing(at(2, shares_gpus=True), 2, ())
