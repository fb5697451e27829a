"""PyTorch Lightning and Fabric: strategies that continue training after a rank is lost.

::

    trainer = Trainer(strategy=KeepstepStrategy(), max_epochs=3)
    trainer.fit(model, loader)

Importing this package registers the strategy as ``strategy="keepstep"``, for configuration files and ``LightningCLI``.

Batches, hooks, validation and checkpoints are Lightning's own. `keepstep.integrations.lightning.training` describes how
keepstep leaves Lightning's loops when a step is interrupted, and how it enters them again.
"""

from lightning.pytorch.strategies import StrategyRegistry

from keepstep.integrations.lightning.fabric import KeepstepFabricStrategy
from keepstep.integrations.lightning.strategy import KeepstepStrategy

__all__ = ["KeepstepFabricStrategy", "KeepstepStrategy"]

StrategyRegistry.register(KeepstepStrategy.strategy_name, KeepstepStrategy, description="DDP that survives lost ranks")
