"""Hugging Face Transformers: a ``Trainer`` whose training goes on where a rank is lost.

::

    keepstep.init(seed=0)                       # before TrainingArguments(...)
    trainer = KeepstepTrainer(...)              # in place of Trainer(...)
    trainer.train()

For a trainer that is derived from ``Trainer``, such as TRL's: ``protected(SFTTrainer)(...)``.

The Trainer's own loop runs, with its own callbacks, evaluation and checkpoints. It is left by an exception where a step
is interrupted, and entered again in the middle of the epoch as the Trainer does with ``resume_from_checkpoint``; but
what it continues from is the protected state and not a file. What a Trainer keeps in itself, such as its
``TrainerState``, is part of that.
"""

from keepstep.integrations.transformers.trainer import KeepstepMixin, KeepstepTrainer, protected

__all__ = ["KeepstepMixin", "KeepstepTrainer", "protected"]
