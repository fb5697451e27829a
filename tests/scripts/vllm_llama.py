"""A Llama of vLLM's own takes versions: ``vllm_llama.py FOLDER``. Prints, for each version, what it was compared with.

vLLM takes this machine for one without any device, so it is told that it is a CPU before anything else is imported.
What is compared with is vLLM's own loading of the same weights from a checkpoint on disk.
"""

# ruff: noqa: E402  # the platform is set before those modules are imported that ask for it

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm.platforms
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.platforms.cpu import CpuPlatform

vllm.platforms.current_platform = vllm.platforms._current_platform = CpuPlatform()
torch.accelerator.empty_cache = lambda: None  # there is no accelerator

from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins
from vllm.v1.worker.gpu_worker import Worker

from keepstep.integrations.vllm import KeepstepTrainerInfo
from keepstep.weights.publisher import Publisher

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class EngineWorker(Worker):
    """vLLM's worker, as far as its weights go."""

    def __init__(self, config: VllmConfig, model: torch.nn.Module) -> None:
        self.vllm_config, self.rank = config, 0
        self._weight_update_active = self._weight_update_is_draft = False
        self.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, torch.device("cpu"), model
        )


class Client:
    """Calls the worker; the version is the server's affair."""

    def __init__(self, worker: EngineWorker) -> None:
        self.init_weight_transfer_engine = worker.init_weight_transfer_engine
        self.start_weight_update = worker.start_weight_update
        self.update_weights = worker.update_weights
        self.finish_weight_update = lambda weight_version=None: worker.finish_weight_update()


def config_of(folder: Path) -> VllmConfig:
    model = ModelConfig(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="float32")
    return VllmConfig(
        model_config=model,
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(device="cpu"),
        weight_transfer_config=WeightTransferConfig(backend="keepstep"),
    )


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def main(folder: Path) -> None:
    load_general_plugins()
    trained = LlamaForCausalLM(LlamaConfig(**SHAPE))
    trained.save_pretrained(folder)
    config = config_of(folder)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=config)
    worker = EngineWorker(config, model)
    with Publisher(folder / "w", trained, copies=True) as publisher:
        info = KeepstepTrainerInfo(publisher, str(folder / "w"), contextlib.nullcontext, rank=0)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(worker), source=ModuleSource(trained))
        publisher.wait_for_consumers(1, 60)
        for version in (1, 2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(torch.randn_like(parameter))
            trainer.send_weights(version)
            on_disk = folder / f"version-{version}"
            trained.save_pretrained(on_disk)
            with set_current_vllm_config(read := config_of(on_disk)):
                expected = parameters_of(get_model(vllm_config=read))
            given = parameters_of(model)
            assert given.keys() == expected.keys()
            same = [torch.equal(given[name], expected[name]) for name in given]
            is_fused = any("qkv_proj" in name for name in given)
            print(f"version {version}: {sum(same)} of {len(same)} parameters, fused: {is_fused}", flush=True)
        worker.weight_transfer_engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
