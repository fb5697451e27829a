"""A Trainer of Hugging Face Transformers with a callback, evaluation and the best model, which resumes if it can."""

import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

WORDS, LENGTH = 32, 12
OUT = Path("out")


class Counting(Dataset):
    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.first + index
        words = (number + torch.arange(LENGTH) * (1 + number % 5)) % WORDS
        return {"input_ids": words, "labels": words.clone()}


class Lines(TrainerCallback):
    """Appends a line to a file each time the Trainer logs."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            known = {name: value for name, value in logs.items() if "runtime" not in name and "second" not in name}
            with (OUT / "lines.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step} | known) + "\n")


def main():
    OUT.mkdir(exist_ok=True)
    args = TrainingArguments(
        output_dir=str(OUT),
        seed=1,
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="steps",
        save_steps=6,
        save_total_limit=2,
        logging_steps=3,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Counting(64),
        eval_dataset=Counting(16, first=64),
        callbacks=[Lines()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT))
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), OUT / "best.pt")


if __name__ == "__main__":
    main()
