"""What keepstep reads of a Lightning trainer."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from keepstep.integrations.lightning import progress


def test_the_state_of_loops_is_lightnings_own() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(monitor="loss")])
    trainer.strategy.connect(LightningModule())
    loop = trainer.fit_loop
    loop.epoch_loop.batch_progress.increment_ready()
    assert progress._state_of(loop) == loop.state_dict()
    loop.load_state_dict(progress._state_of(loop))
    assert loop.epoch_loop.batch_progress.total.ready == 1
