"""What keepstep reads of a Lightning trainer."""

from types import SimpleNamespace

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry

from keepstep.integrations.lightning import progress, strategy


def test_the_state_of_loops_is_lightnings_own() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(monitor="loss")])
    trainer.strategy.connect(LightningModule())
    loop = trainer.fit_loop
    loop.epoch_loop.batch_progress.increment_ready()
    assert progress._state_of(loop) == loop.state_dict()
    loop.load_state_dict(progress._state_of(loop))
    assert loop.epoch_loop.batch_progress.total.ready == 1


def test_a_configuration_that_is_there_is_overwritten_by_a_replacement() -> None:
    saved = []
    parser = SimpleNamespace(save=lambda *values, **options: saved.append((values, options)))
    callback = SaveConfigCallback.__new__(SaveConfigCallback)
    callback.parser = parser
    strategy._have_configuration_saved_again(SimpleNamespace(callbacks=[ModelCheckpoint(), callback]))
    parser.save("values", "config.yaml", skip_none=False, overwrite=False)
    assert saved == [(("values", "config.yaml"), {"skip_none": False, "overwrite": True})]


def test_the_strategy_has_a_name() -> None:
    assert StrategyRegistry["keepstep"]["strategy"] is strategy.KeepstepStrategy
