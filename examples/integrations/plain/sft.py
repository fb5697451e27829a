"""Supervised fine-tuning with TRL's SFTTrainer: a small model, and a tokenizer that the script makes.

torchrun --nproc-per-node 2 sft.py
"""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ("the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "red", "blue", "small", "big")


def make_tokenizer():
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


def make_sentences(size, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (size,), generator=generator).tolist()
    numbers = [torch.randint(len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"text": [" ".join(WORDS[number] for number in sentence) for sentence in numbers]})


def main(args):
    tokenizer = make_tokenizer()
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=2, n_head=2, **tokens)
    arguments = SFTConfig(
        output_dir=args.output_dir,
        use_cpu=True,
        bf16=False,
        num_train_epochs=args.epochs,
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
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=make_sentences(96, seed=1),
        eval_dataset=make_sentences(24, seed=2),
        processing_class=tokenizer,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), f"{args.output_dir}/last.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args())
