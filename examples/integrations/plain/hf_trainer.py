"""A small language model, trained by the Trainer of Hugging Face Transformers.

    torchrun --nproc-per-node 2 hf_trainer.py

The text counts: each sentence is a sequence of numbers with a constant difference.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

NUM_WORDS, LENGTH = 64, 16


class Counting(Dataset):
    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.first + index
        words = (number + torch.arange(LENGTH) * (1 + number % 7)) % NUM_WORDS
        return {"input_ids": words, "labels": words.clone()}


class Lines(TrainerCallback):
    """Writes a line of JSON to a file each time the Trainer logs."""

    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            known = {name: value for name, value in logs.items() if "runtime" not in name and "second" not in name}
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step} | known) + "\n")


def main(args):
    args.output_dir.mkdir(exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(args.output_dir),
        use_cpu=True,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        save_total_limit=2,
        logging_steps=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    tokens = {"vocab_size": NUM_WORDS, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **tokens)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Counting(96),
        eval_dataset=Counting(24, first=96),
        callbacks=[Lines(args.output_dir / "lines.jsonl"), EarlyStoppingCallback(early_stopping_patience=5)],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), args.output_dir / "best.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args())
