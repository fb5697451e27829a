"""Hugging Face Transformers: a ``Trainer`` that continues training after a rank is lost.

::

    keepstep.init(seed=0)                       # before TrainingArguments(...)
    trainer = KeepstepTrainer(...)              # in place of Trainer(...)
    trainer.train()

For a trainer that is derived from ``Trainer``, such as TRL's: ``protected(SFTTrainer)(...)``.

The Trainer's own loop runs, with its own callbacks, evaluation and checkpoints. If a step is interrupted, an exception
leaves the loop. The Trainer then enters it again in the middle of the epoch, as with ``resume_from_checkpoint``, but
from the protected state and not from a file. The protected state includes the Trainer's own state, such as its
``TrainerState``.
"""

from keepstep.integrations.transformers.trainer import KeepstepMixin, KeepstepTrainer, protected

__all__ = ["KeepstepMixin", "KeepstepTrainer", "protected"]
