"""The backend in vLLM's own worker methods, factories and layerwise reload, on a CPU.

``make test-engines`` runs it, in an environment of its own. vLLM's wheel has no kernels for a CPU, so its scheduler and
model runner do not run here: the worker under test is vLLM's class without the parts that hold devices.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

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
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.v1.worker.gpu_worker import Worker

from keepstep.errors import ConfigurationError, LoadError
from keepstep.integrations.vllm import BACKEND, KeepstepTrainerInfo
from keepstep.integrations.vllm.reload import ModelReload
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
            KeepstepTrainerInfo(self.publisher, str(folder), contextlib.nullcontext, rank=0),
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


def test_a_worker_that_does_not_get_the_version_leaves_all_at_the_old_one(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two has it, the other has not: neither loads it, and the next session works."""
    monkeypatch.setattr("keepstep.engines.vllm.RECEIVE_S", PATIENCE_S)
    old = setting.train()
    setting.trainer.send_weights()
    lost = setting.client.workers[1].weight_transfer_engine
    setting.train()
    lost._subscriber.close()
    with pytest.raises(LoadError, match="version 2 did not come"):
        setting.trainer.send_weights()
    assert all(same(weights_of(model), old) for model in setting.models)
    assert setting.client.version == "1"
    assert not any(worker._weight_update_active for worker in setting.client.workers)

    folder = str(setting.publisher._settings.folder)
    again = KeepstepTrainerInfo(setting.publisher, folder, contextlib.nullcontext, rank=0)
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
    with pytest.raises(LoadError, match=r"out\.weight.*; then: .* out of service until a whole one is loaded"):
        setting.trainer.send_weights()
    assert not any(worker._weight_update_active for worker in setting.client.workers)
    setting.models[0].refuses = None
    new = setting.train()
    setting.trainer.send_weights()
    assert all(same(weights_of(model), new) for model in setting.models)


def test_a_version_that_all_workers_have_is_not_overwritten_before_it_is_loaded(setting: Setting) -> None:
    """Somebody publishes between the agreement and the end of the session: the workers get that version later."""
    setting.train()
    setting.trainer.send_weights()
    new = setting.train()
    failures = []
    setting.client.before["finish_weight_update"] = lambda: failures.append(setting.publisher.publish(9).failures)
    setting.trainer.send_weights()
    assert all(same(weights_of(model), new) for model in setting.models)
    assert failures == [ANY]
    assert failures[0]


class Tied(Model):
    """Its head shares the embedding's weight, and computes with a packed copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Packed(4, 4, bias=False)
        self.head.weight = self.out.weight


class Packed(torch.nn.Linear):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.quant_method = Packing()
        self.quant_method.process_weights_after_loading(self)


class Packing(QuantizeMethodBase):
    def create_weights(self, layer: torch.nn.Module, *_: Any, **__: Any) -> None:
        """Nothing: the layer has made them."""

    def apply(self, layer: torch.nn.Module, *_: Any, **__: Any) -> None:
        """Nothing: no request is computed here."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = layer.weight.detach().clone()


def reload_of(model: Model, tensors: dict[str, torch.Tensor], *, is_part: bool = False) -> ModelReload:
    record_metadata_for_reloading(model)
    config = SimpleNamespace(dtype=torch.float32)
    return ModelReload(model, config, tensors, is_part=is_part, is_split=False)


def test_a_layer_that_shares_a_weight_is_processed_again() -> None:
    """It has made something else of the weight, so that its own parameter is up to date, and its results are not."""
    model = Tied()
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    reload = reload_of(model, tensors)
    for number in (1.0, 2.0):
        for tensor in tensors.values():
            tensor.fill_(number)
        reload.load()
        assert bool((model.head.packed == number).all())
        assert model.head.weight is model.out.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out.weight": None, "out.bias": None}, r"layer 'out' gets no weights, and shares none"),
        ({"out.bias": None}, r"a layer would get a part of its weights: without 'out\.bias'"),
        ({"out.weight": torch.zeros(4, 5)}, r"the model cannot load 'out\.weight'"),
        ({"out.weight": torch.zeros(4, 4, dtype=torch.int32)}, r"'out\.weight' is of dtype torch\.int32"),
        ({"other.weight": torch.zeros(1)}, r"the model cannot load 'other\.weight'"),
    ],
)
def test_tensors_that_the_model_cannot_load_are_refused_by_name(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    """When the workers attach. The model does not change."""
    model = Model()
    before = weights_of(model)
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | change
    with pytest.raises(ConfigurationError, match=message):
        reload_of(model, {name: tensor for name, tensor in given.items() if tensor is not None})
    assert same(weights_of(model), before)


def test_a_part_of_a_model_is_loaded_if_it_is_said_to_be_one() -> None:
    model = Model()
    before = weights_of(model)
    reload_of(model, {"qkv.weight": torch.ones(12, 4), "qkv.bias": torch.ones(12)}, is_part=True).load()
    assert bool((model.qkv.weight == 1).all())
    assert torch.equal(model.out.weight, before["out.weight"])


def test_a_client_that_cannot_drain_is_refused(tmp_path: Path) -> None:
    with Publisher(tmp_path, Model(), copies=True) as publisher:
        info = KeepstepTrainerInfo(publisher, str(tmp_path), rank=0)
        with pytest.raises(ConfigurationError, match=r"cannot complete running requests and discard caches"):
            WeightTransferTrainerFactory.trainer_init(info, client=Client(), source=ModuleSource(Model()))


def test_a_llama_of_vllm_takes_versions_as_from_a_checkpoint(tmp_path: Path) -> None:
    """With the fused tensors of vLLM's own class, against what it loads from disk."""
    command = [sys.executable, SCRIPTS / "vllm_llama.py", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("version ")]
    assert lines == [f"version {version}: 15 of 15 parameters, fused: True" for version in (1, 2)]
