"""torchtitan's Trainer with its llama debug model, under FSDP2, HSDP, tensor or pipeline parallelism.

    torchrun --nproc-per-node 2 torchtitan_llama.py

It trains on the bytes of sums, also without an accelerator, and resumes from the last checkpoint in --out.
"""

import argparse
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

if not torch.cuda.is_available():  # torchtitan takes an accelerator for granted, and looks for it when it is imported
    memory = {"memory_stats": lambda *_: {}, "reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda *_: None}
    device = {"get_device_name": lambda *_: "CPU", "get_device_properties": lambda *_: SimpleNamespace(total_memory=1)}
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(**vars(torch.cpu) | memory | device | {"current_device": lambda: 0})

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, text, add_bos=True, add_eos=True):
        return [256] * add_bos + list(text.encode()) + [257] * add_eos

    def decode(self, tokens):
        return bytes(token for token in tokens if token < 256).decode()

    def get_vocab_size(self):
        return 258


def sums(_path):
    return Dataset.from_dict({"text": [f"{n} and {n % 7} are {n + n % 7}. " * (n % 5 + 1) for n in range(400)]})


def parallelize(model, **options):
    parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def main(args):
    init_logger()
    DATASETS["sums"] = DatasetConfig(path="", loader=sums, sample_processor=lambda sample: sample["text"])
    data = HuggingFaceTextDataLoader.Config(dataset="sums", num_workers=args.workers)
    config = llama3_debugmodel()
    config.dump_folder = args.out
    config.tokenizer, config.dataloader = Bytes.Config(), data
    config.training.steps, config.training.seq_len, config.training.local_batch_size = args.steps, 32, 2
    config.training.global_batch_size = args.global_batch
    config.training.mixed_precision_param = "float32"
    config.debug.seed = 7
    config.parallelism.data_parallel_replicate_degree = args.replicas
    config.parallelism.tensor_parallel_degree = args.tensor
    config.parallelism.pipeline_parallel_degree = args.pipeline
    config.training.disable_cuda_graphs = args.pipeline > 1  # torchtitan asks for it, without a GPU too
    config.checkpoint = CheckpointManager.Config(enable=True, interval=10, last_save_in_hf=True)
    config.metrics = MetricsProcessor.Config(log_freq=2, enable_tensorboard=True, disable_color_printing=True)
    config.validator = Validator.Config(enable=True, freq=5, steps=2, dataloader=data)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.model_spec.parallelize_fn = parallelize
    for _name, _attention, owner, name in list(config.model_spec.traverse(FlexAttention.Config)):
        setattr(owner, name, ScaledDotProductAttention.Config())  # FlexAttention is compiled for GPUs
    trainer = Trainer(config)
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=-1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--out", default="out")
    main(parser.parse_args())
