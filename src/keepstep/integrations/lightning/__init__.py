"""PyTorch Lightning and Fabric: strategies with which a training goes on where a rank is lost.

::

    trainer = Trainer(strategy=KeepstepStrategy(), max_epochs=3)
    trainer.fit(model, loader)

Where a configuration file or ``LightningCLI`` names the strategy, ``strategy="keepstep"`` is the same, from the import
of this package on.

The batches, hooks, validation and checkpoints are Lightning's own. `keepstep.integrations.lightning.training` says how
its loops are left where a step is interrupted, and entered again.
"""

from lightning.pytorch.strategies import StrategyRegistry

from keepstep.integrations.lightning.fabric import KeepstepFabricStrategy
from keepstep.integrations.lightning.strategy import KeepstepStrategy

__all__ = ["KeepstepFabricStrategy", "KeepstepStrategy"]

StrategyRegistry.register(KeepstepStrategy.strategy_name, KeepstepStrategy, description="DDP that survives lost ranks")
