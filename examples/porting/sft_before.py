"""A fine-tuning by TRL's SFTTrainer, with a loss of the script's own."""

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ("the", "a", "cat", "dog", "bird", "sees", "hears", "red", "blue", "small")
OUT = Path("out")


def make_tokenizer():
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


def make_sentences(size, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(len(WORDS), (size, 8), generator=generator).tolist()
    return Dataset.from_dict({"text": [" ".join(WORDS[number] for number in sentence) for sentence in numbers]})


class Scaled(SFTTrainer):
    """Gives the loss half its weight."""

    def compute_loss(self, model, inputs, return_outputs=False, **keywords):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **keywords)
        return (loss / 2, outputs) if return_outputs else loss / 2


def main():
    tokenizer = make_tokenizer()
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=32, n_layer=1, n_head=2, **tokens)
    args = SFTConfig(
        output_dir=str(OUT),
        use_cpu=True,
        bf16=False,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=16,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=3,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Scaled(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=make_sentences(64, seed=1),
        eval_dataset=make_sentences(16, seed=2),
        processing_class=tokenizer,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), OUT / "last.pt")


if __name__ == "__main__":
    main()
