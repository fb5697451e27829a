"""The backend in vLLM's own worker methods, factories and layerwise reload, on a CPU.

``make test-engines`` runs it, in an environment of its own. vLLM's wheel has no kernels for a CPU, so its scheduler and
model runner do not run here: the worker under test is vLLM's class without the parts that hold devices.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.jobs import SCRIPTS
from tests.worker.ranks import DEADLINE_S

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines")

from vllm.config import DeviceConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.v1.worker.gpu_worker import Worker

from keepstep.errors import KeepstepError, LoadError, WeightsNotReady
from keepstep.integrations.vllm import BACKEND, KeepstepTrainerInfo
from keepstep.weights.publisher import Publisher

SHAPES = {"qkv.weight": (12, 4), "qkv.bias": (12,), "out.weight": (4, 4), "out.bias": (4,)}
PATIENCE_S = 1.0


class Model(torch.nn.Module):
    """What an engine runs: it takes weights by their names in the checkpoint, and keeps them its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(4, 12), torch.nn.Linear(4, 4)
        self.refuses: str | None = None

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As vLLM's models do it, each tensor by the loader of its parameter."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name == self.refuses:
                raise KeyError(name)
            parameter = parameters[name]
            getattr(parameter, "weight_loader", lambda mine, given: mine.data.copy_(given))(parameter, tensor)


class EngineWorker(Worker):
    """vLLM's worker, as far as its weights go."""

    def __init__(self, model: Model) -> None:
        config = VllmConfig(device_config=DeviceConfig("cpu"))
        config.weight_transfer_config = WeightTransferConfig(backend=BACKEND)
        self.vllm_config, self.model, self.rank = config, model, 0
        self.vllm_config.model_config = SimpleNamespace(dtype=torch.float32)
        self._weight_update_active = self._weight_update_is_draft = False
        self.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, torch.device("cpu"), model
        )


class Client:
    """Calls every worker, as vLLM's collective_rpc does: all of them act, and then the first error is raised."""

    def __init__(self, *workers: EngineWorker) -> None:
        self.workers, self.version, self.before = workers, None, {}

    def _all(self, name: str, *arguments: Any) -> None:
        self.before.pop(name, lambda: None)()
        errors = []
        for worker in self.workers:
            try:
                getattr(worker, name)(*arguments)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_weight_transfer_engine", init_info | {"deadline_s": PATIENCE_S})

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")
        self.version = weight_version or self.version


class Setting:
    """A trainer, and an engine with two workers."""

    def __init__(self, folder: Path) -> None:
        self.trained = Model()
        self.models = [Model(), Model()]
        for model in self.models:
            record_metadata_for_reloading(model)
        self.client = Client(*map(EngineWorker, self.models))
        self.publisher = Publisher(folder, self.trained, copies=True, deadline_s=PATIENCE_S)
        self.trainer = WeightTransferTrainerFactory.trainer_init(
            KeepstepTrainerInfo(self.publisher, str(folder), rank=0),
            client=self.client,
            source=ModuleSource(self.trained),
        )
        self.publisher.wait_for_consumers(2, DEADLINE_S)

    def train(self) -> dict[str, torch.Tensor]:
        """New weights; a copy of them."""
        with torch.no_grad():
            for parameter in self.trained.parameters():
                parameter.add_(torch.randn_like(parameter))
        return weights_of(self.trained)

    def close(self) -> None:
        for worker in self.client.workers:
            worker.weight_transfer_engine.shutdown()
        self.publisher.close()


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path / "w")
    yield made
    made.close()


def test_vllm_finds_the_backend_by_its_entry_point() -> None:
    """In a process that has not imported it."""
    script = """if True:
        from vllm.plugins import load_general_plugins
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
        assert "keepstep" not in Factory._registry
        load_general_plugins()
        load_general_plugins()
        print("it is", Factory._registry["keepstep"]().__name__)
    """
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "it is KeepstepWeightTransferEngine" in printed


def test_each_session_brings_every_worker_to_the_next_version(setting: Setting) -> None:
    objects = [list(model.parameters()) for model in setting.models]
    for version in (1, 2, 3):
        trained = setting.train()
        setting.trainer.send_weights()
        assert all(same(weights_of(model), trained) for model in setting.models)
        assert setting.client.version == str(version)
    kept = [list(model.parameters()) for model in setting.models]
    for before, after in zip(objects, kept, strict=True):  # captured graphs read the same memory
        assert [each.data_ptr() for each in before] == [each.data_ptr() for each in after]


def test_a_worker_that_does_not_get_the_version_leaves_all_at_the_old_one(setting: Setting) -> None:
    """One of two has it, the other has not: neither loads it, and the next session works."""
    old = setting.train()
    setting.trainer.send_weights()
    lost = setting.client.workers[1].weight_transfer_engine
    setting.train()
    setting.client.before["start_weight_update"] = lost._subscriber.close
    with pytest.raises(WeightsNotReady, match="version 2 did not come"):
        setting.trainer.send_weights()
    assert all(same(weights_of(model), old) for model in setting.models)
    assert setting.client.version == "1"
    assert not any(worker._weight_update_active for worker in setting.client.workers)

    again = KeepstepTrainerInfo(setting.publisher, str(setting.publisher._settings.folder), rank=0)
    trainer = WeightTransferTrainerFactory.trainer_init(
        again, client=setting.client, source=ModuleSource(setting.trained)
    )
    setting.publisher.wait_for_consumers(2, DEADLINE_S)
    new = setting.train()
    trainer.send_weights(3)
    assert all(same(weights_of(model), new) for model in setting.models)


def test_a_publication_that_fails_leaves_the_engine_ready(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    old = setting.train()
    setting.trainer.send_weights()
    with monkeypatch.context() as patch:

        def broken(version: int) -> None:
            raise LoadError(f"version {version}: the link is down")

        patch.setattr(setting.publisher, "publish", broken)
        with pytest.raises(LoadError, match="the link is down"):
            setting.trainer.send_weights()
    assert all(same(weights_of(model), old) for model in setting.models)
    new = setting.train()
    setting.trainer.send_weights()
    assert all(same(weights_of(model), new) for model in setting.models)


def test_a_model_that_refuses_a_version_takes_the_next_one(setting: Setting) -> None:
    """What its own loader raises reaches the trainer; no session stays open, and a whole version repairs it."""
    setting.train()
    setting.trainer.send_weights()
    setting.models[0].refuses = "out.weight"
    setting.train()
    with pytest.raises(KeyError, match=r"out\.weight"):
        setting.trainer.send_weights()
    assert not any(worker._weight_update_active for worker in setting.client.workers)
    setting.models[0].refuses = None
    new = setting.train()
    setting.trainer.send_weights()
    assert all(same(weights_of(model), new) for model in setting.models)


def test_a_version_that_another_one_has_overwritten_is_not_loaded(setting: Setting) -> None:
    """Somebody publishes between the agreement and the end of the session."""
    old = setting.train()
    setting.trainer.send_weights()
    setting.train()
    setting.client.before["finish_weight_update"] = lambda: setting.publisher.publish(9)
    with pytest.raises(KeepstepError, match=r"version 2 did not come .* version 9 is there"):
        setting.trainer.send_weights()
    assert all(same(weights_of(model), old) for model in setting.models)


def test_a_llama_of_vllm_takes_versions_as_from_a_checkpoint(tmp_path: Path) -> None:
    """With the fused tensors of vLLM's own class, against what it loads from disk."""
    command = [sys.executable, SCRIPTS / "vllm_llama.py", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("version ")]
    assert lines == [f"version {version}: 15 of 15 parameters, fused: True" for version in (1, 2)]
