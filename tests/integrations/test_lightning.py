"""What keepstep reads of a Lightning trainer."""

from types import SimpleNamespace

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry

from keepstep.integrations.lightning import attributes, progress, strategy


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


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.best, self.name, self.outputs, self.labels = 0.5, "first", [1], {"a": 1}


class Losses(Callback):
    def __init__(self) -> None:
        self.losses = []


class Declared(Losses):
    def state_dict(self) -> dict[str, object]:
        return {"losses": self.losses}


def trainer_of(module: LightningModule, *callbacks: Callback) -> Trainer:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=list(callbacks))
    trainer.strategy.connect(module)
    return trainer


def test_attributes_are_what_they_were_where_a_unit_comes_again() -> None:
    module, losses, declared = Module(), Losses(), Declared()
    kept = attributes.own_attributes(trainer_of(module, losses, declared))
    outputs = module.outputs
    outputs.append(2)
    kept.take()
    outputs.append(3)
    outputs[0] = 7
    module.outputs, module.best, module.more, module.late = [], 0.9, [4], "late"
    del module.name
    module.labels["b"] = 2
    losses.losses.append(1.0)
    declared.losses.append(1.0)
    kept.put_back()
    assert module.outputs is outputs
    assert outputs == [1, 2]
    assert (module.best, module.name, module.labels) == (0.5, "first", {"a": 1})
    assert not hasattr(module, "more")
    assert not hasattr(module, "late")
    assert losses.losses == []
    assert declared.losses == [1.0], "its callback's state is protected"


def test_numbers_that_training_has_changed_come_back_on_a_replacement() -> None:
    """What a process sets for itself, such as the number of a device, stays its own."""
    module, other = Module(), Module()
    kept = attributes.own_attributes(trainer_of(module))
    module.best, module.count = 0.9, 3
    module.outputs.append(2)
    assert kept.changed() == [{"best": 0.9, "count": 3}]
    other.name = "second"
    attributes.own_attributes(trainer_of(other)).put_changed(kept.changed())
    assert (other.best, other.count, other.name, other.outputs) == (0.9, 3, "second", [1])
