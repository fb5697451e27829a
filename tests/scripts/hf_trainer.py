"""A Trainer of Hugging Face Transformers with everything around its steps: dropout, random masking, accumulation,
evaluation, checkpoints, early stopping, a best model, callbacks, logs.

Usage: keepstep run --nproc-per-node 2 tests/scripts/hf_trainer.py [--out DIR] [--epochs N] [--accumulate N] [...]
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import keepstep
from keepstep.integrations.transformers import KeepstepTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--strategy", default="steps", choices=("steps", "epoch"))
parser.add_argument("--resume", action="store_true")
parser.add_argument("--die-at", type=int, help="ranks that have started together die in this step")
parser.add_argument("--dying", type=int, nargs="*", default=range(99), help="which of them, instead of all")
parser.add_argument("--eval-on-start", action="store_true")
parser.add_argument("--fsdp", action="store_true", help="FSDP2, which Accelerate leaves aside on CPUs by itself")
parser.add_argument("--snapshot-every", type=int)
parser.add_argument("--own-logs", action="store_true", help="log what each rank alone has, and after updates")
parser.add_argument("--counting", action="store_true", help="a callback and the trainer count, each rank for itself")
parser.add_argument("--telling", action="store_true", help="a callback writes that it has heard of work behind a step")
arguments = parser.parse_args()

torch.set_num_threads(1)
keepstep.init(seed=1)


class Sentences(torch.utils.data.Dataset):
    """Made from their index, with a word that is another one each time."""

    def __init__(self, first, size):
        self.first, self.size = first, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        words = (torch.arange(12) * (index + self.first + 1)) % 50
        words[int(torch.randint(12, ()))] = 50
        return {"input_ids": words, "labels": words.clone()}


def without_times(logs):
    return {name: value for name, value in logs.items() if "runtime" not in name and "per_second" not in name}


class Lines(TrainerCallback):
    """Writes what a user's own callback would."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with (arguments.out / "lines.txt").open("a") as file:
                file.write(json.dumps({"step": state.global_step, **without_times(logs)}) + "\n")


class OwnLogs(KeepstepTrainer):
    def compute_loss(self, *arguments, **keywords):
        loss = super().compute_loss(*arguments, **keywords)
        if self.model.training:
            self.log({"own": loss.item()})
        return loss


class Counts(TrainerCallback):
    """Counts what it hears of in a training that has begun, without a state() or state_dict()."""

    def __init__(self):
        self.seen = {}
        self.steps = []
        self.best = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.told = 0

    def hear(self, event):
        self.seen[event] = self.seen.get(event, 0) + 1

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.hear("epoch begin")

    def on_epoch_end(self, args, state, control, **kwargs):
        self.hear("epoch end")

    def on_step_begin(self, args, state, control, **kwargs):
        self.hear("step begin")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.hear("before update")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.hear("update")

    def on_step_end(self, args, state, control, **kwargs):
        self.hear("step end")
        self.steps.append((state.global_step, args.process_index))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told += 1
        self.steps.append(("log", state.global_step, sorted(without_times(logs))))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.hear("evaluation")
        self.best = metrics["eval_loss"] if self.best is None else min(self.best, metrics["eval_loss"])

    def on_save(self, args, state, control, **kwargs):
        self.hear("save")

    def on_train_end(self, args, state, control, **kwargs):
        counts = {**vars(self), "losses": trainer.losses, "num_losses": trainer.num_losses}
        (arguments.out / f"counts-of-{args.process_index}.json").write_text(json.dumps(counts))


class Tells(TrainerCallback):
    """Writes each rank's lines, and changes the weight decay with what it has heard."""

    def __init__(self):
        self.worst = 0.0

    def tell(self, args, state, what):
        with (arguments.out / f"told-{args.process_index}.txt").open("a") as file:
            file.write(f"{state.global_step} {what}\n")

    def on_evaluate(self, args, state, control, metrics, optimizer, **kwargs):
        self.tell(args, state, {name: round(value, 6) for name, value in without_times(metrics).items()})
        self.worst = max(self.worst, metrics["eval_loss"])
        control.should_save = True
        optimizer.param_groups[0]["weight_decay"] += 0.01

    def on_save(self, args, state, control, **kwargs):
        total = torch.tensor(self.worst)
        torch.distributed.all_reduce(total)
        self.tell(args, state, f"saved, with {total.item():.6f}")


class Counting(KeepstepTrainer):
    """Keeps each loss of its rank."""

    num_losses = 0

    def __init__(self, *values, **keywords):
        super().__init__(*values, **keywords)
        self.losses = []

    def compute_loss(self, *values, **keywords):
        loss = super().compute_loss(*values, **keywords)
        if self.model.training:
            self.losses.append(loss.item())
        self.num_losses += 1
        return loss


class Dying(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if trainer.session.generation == 1 and state.global_step == arguments.die_at:
            torch.distributed.barrier()
            if args.process_index in arguments.dying:
                os.kill(os.getpid(), signal.SIGKILL)


class Loads(KeepstepTrainer):
    def _load_from_checkpoint(self, path, *arguments, **keywords):
        print(f"rank {self.args.process_index} loads {path}", flush=True)
        super()._load_from_checkpoint(path, *arguments, **keywords)


class Late(TrainerCallback):
    """Logs when the parameters of a step have been updated."""

    def on_step_end(self, args, state, control, **kwargs):
        if arguments.own_logs:
            trainer.log({"late": state.global_step})


arguments.out.mkdir(exist_ok=True)
tokens = {"bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=51, n_positions=12, n_embd=16, n_layer=2, n_head=2, **tokens))
trainer = (OwnLogs if arguments.own_logs else Counting if arguments.counting else Loads)(
    model=model,
    args=TrainingArguments(
        output_dir=str(arguments.out),
        use_cpu=True,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=arguments.accumulate,
        dataloader_num_workers=arguments.workers,
        learning_rate=1e-2,
        warmup_steps=3,
        eval_strategy=arguments.strategy,
        eval_on_start=arguments.eval_on_start,
        save_strategy=arguments.strategy,
        logging_strategy=arguments.strategy,
        eval_steps=4,
        save_steps=4,
        logging_steps=2,
        save_total_limit=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    ),
    train_dataset=Sentences(0, 50),
    eval_dataset=Sentences(50, 10),
    callbacks=[
        *([Counts()] if arguments.counting else ()),
        *([Tells()] if arguments.telling else ()),
        Dying(),
        Lines(),
        Late(),
        EarlyStoppingCallback(early_stopping_patience=20),
    ],
)
if arguments.fsdp:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    state, trainer.is_fsdp_enabled = trainer.accelerator.state, True
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
if arguments.snapshot_every:
    trainer.keepstep_options["snapshot_every"] = arguments.snapshot_every
print(f"built, with rank {os.environ.get('RANK', 'none')}", flush=True)
result = trainer.train(resume_from_checkpoint=arguments.resume or None)
if arguments.own_logs:
    history = json.dumps(list(map(without_times, trainer.state.log_history)))
    (arguments.out / f"history-of-{trainer.args.process_index}.json").write_text(history)
if trainer.is_world_process_zero():
    for saved in arguments.out.glob("checkpoint-*/trainer_state.json"):
        state = json.loads(saved.read_text())
        saved.write_text(json.dumps(state | {"log_history": list(map(without_times, state["log_history"]))}))
    (arguments.out / "history.json").write_text(json.dumps(list(map(without_times, trainer.state.log_history))))
    torch.save(trainer.model.state_dict(), arguments.out / "best.pt")
    print("train loss", result.training_loss, "best", trainer.state.best_model_checkpoint, flush=True)
