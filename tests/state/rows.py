"""The optimizers and modules of table.md: how each is made. What is wrong with one shows in a drill of job.py.

Rows take their packages in when they are made: those of a package that is not installed are skipped.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

WIDTH = 64
"""Of all inputs. bitsandbytes and torchao quantise the state of parameters from 4096 elements on."""
CLASSES = 8
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that every parameter takes part in."""
    result: torch.Tensor = (model(x) - x[:, :CLASSES]).pow(2).mean()
    return result


@dataclasses.dataclass
class Training:
    """What job.py trains.

    Attributes:
        model: trained under DDP.
        optimizer: of its parameters.
        others: protected as well.
        scaler: scales the loss, if there is one.
        loss: of a batch.
        after: runs in the step, after the update.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    scaler: Any = None
    loss: Loss = squares
    after: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: the package it needs, and what makes it.

    Attributes:
        package: as it is imported.
        make: makes model and optimizer.
    """

    package: str
    make: Callable[[], Training]


def network() -> nn.Module:
    """The model that optimizers train."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def named(path: str) -> Any:
    """What a dotted name stands for: the module is everything up to the last dot."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters with two dimensions, and no others are trained."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def by(path: str, of: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters, **options: Any) -> Row:
    """A row of an optimizer that is made in the usual way."""

    def make() -> Training:
        model = network()
        optimizer = named(path)(of(model), **options)
        if hasattr(optimizer, "train"):  # those without a schedule
            optimizer.train()
        return Training(model, optimizer)

    return Row(path.partition(".")[0], make)


def of_torch(name: str, **options: Any) -> Row:
    """A row of an optimizer of torch."""
    return by(f"torch.optim.{name}", **{"lr": 0.01, **options})


def of_timm(name: str) -> Row:
    """A row of an optimizer that timm has a short name for."""

    def make() -> Training:
        model = network()
        return Training(model, named("timm.optim.create_optimizer_v2")(model, opt=name, lr=0.01))

    return Row("timm", make)


def sparse() -> Training:
    """A table of vectors with sparse gradients, which DDP reduces as they are."""
    table = nn.EmbeddingBag(32, CLASSES, sparse=True)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model((x.abs() * 9).long().clamp(0, 31)).pow(2).mean()
        return result

    return Training(table, torch.optim.SparseAdam(table.parameters(), lr=0.01), loss=loss)


def rate_in_a_tensor() -> Training:
    """A learning rate in a tensor, which a scheduler writes to."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=20)
    return Training(model, optimizer, {"scheduler": scheduler}, after=scheduler.step)


def two_groups() -> Training:
    """Groups with values of their own, and a warm-up."""
    model = network()
    groups = [{"params": matrices(model), "lr": 0.02}, {"params": [p for p in model.parameters() if p.ndim == 1]}]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5),
        ],
        milestones=[4],
    )
    return Training(model, optimizer, {"scheduler": scheduler}, after=scheduler.step)


class Masters(torch.optim.Optimizer):
    """fp32 copies of bf16 parameters, with a momentum in fp32 for each."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self._masters = [parameter.detach().float() for parameter in self.param_groups[0]["params"]]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "masters": self._masters}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        for own, other in zip(self._masters, state["masters"], strict=True):
            own.copy_(other)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter, master in zip(self.param_groups[0]["params"], self._masters, strict=True):
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(master))
            momentum.mul_(0.9).add_(parameter.grad.float())
            master.sub_(momentum, alpha=self.param_groups[0]["lr"])
            parameter.copy_(master)


class InnerMasters(torch.optim.Optimizer):
    """As apex's O2: fp32 copies of bf16 parameters, which another optimizer updates."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.masters = nn.ParameterList(parameter.detach().float() for parameter in self.param_groups[0]["params"])
        self.inner = torch.optim.AdamW(self.masters, lr=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            master.grad = parameter.grad.float()
        self.inner.step()
        for parameter, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            parameter.copy_(master)
            master.grad = None


def in_bfloat16(optimizer: Callable[[Any], Any]) -> Training:
    """A bf16 model with fp32 copies of its parameters."""
    model = network().bfloat16()
    made: torch.optim.Optimizer = optimizer(model.parameters())
    return Training(model, made, loss=lambda model, x: squares(model, x.bfloat16()))


def with_inner() -> Training:
    """The copies are protected as a module, and the optimizer that updates them as well."""
    training = in_bfloat16(InnerMasters)
    training.others = {"masters": training.optimizer.masters, "inner": training.optimizer.inner}
    return training


def stochastic() -> Training:
    """A bf16 model whose updates are rounded at random."""
    model = network().bfloat16()
    optimizer = named("torchao.optim._AdamW")(model.parameters(), lr=0.01, bf16_stochastic_round=True)
    return Training(model, optimizer, loss=lambda model, x: squares(model, x.bfloat16()))


def without_schedule(*, protected: bool) -> Training:
    """Another optimizer in the wrapper of schedulefree."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = named("schedulefree.ScheduleFreeWrapper")(inner)
    optimizer.train()
    return Training(model, optimizer, {"inner": inner} if protected else {})


def around(wrapper: str, *, protected: bool = True) -> Row:
    """A row of a wrapper around AdamW, which is protected as well or not."""

    def make() -> Training:
        model = network()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Training(model, named(wrapper)(inner), {"inner": inner} if protected else {})

    return Row(wrapper.partition(".")[0], make)


def projected() -> Training:
    """GaLore with projected gradients."""
    model = network()
    wide = {"params": matrices(model), "rank": 4, "update_proj_gap": 4, "scale": 0.25, "projection_type": "std"}
    return Training(model, named("pytorch_optimizer.GaLore")([wide], lr=0.01))


def of_package(package: str, module: str, names: str, **options: Any) -> dict[str, Row]:
    """Rows of several optimizers of one module, with the same options."""
    return {f"{package} {name}": by(f"{module}.{name}", **{"lr": 0.01, **options}) for name in names.split()}


OPTIMIZERS: dict[str, Row] = {
    **of_package("torch", "torch.optim", "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS NAdam RAdam RMSprop"),
    **of_package("torch", "torch.optim", "Rprop SGD"),
    "torch Muon": of_torch("Muon", of=matrices),
    "torch SparseAdam": Row("torch", sparse),
    "torch Adam, amsgrad": of_torch("Adam", amsgrad=True),
    "torch AdamW, foreach": of_torch("AdamW", foreach=True),
    "torch AdamW, fused": of_torch("AdamW", fused=True),
    "torch AdamW, lr in a tensor": Row("torch", rate_in_a_tensor),
    "torch Adagrad, fused": of_torch("Adagrad", fused=True),
    "torch RMSprop, centered": of_torch("RMSprop", momentum=0.9, centered=True),
    "torch SGD, momentum, fused": of_torch("SGD", momentum=0.9, fused=True),
    "torch SGD, two groups, warm-up": Row("torch", two_groups),
    "torch fp32 copies of bf16": Row("torch", lambda: in_bfloat16(Masters)),
    "torch fp32 copies of bf16, inner AdamW": Row("torch", lambda: in_bfloat16(InnerMasters)),
    "torch fp32 copies of bf16, inner AdamW protected": Row("torch", with_inner),
    **of_package("torchao", "torchao.optim", "Adam4bit Adam8bit AdamFp8 AdamW8bit"),
    "torchao _AdamW, bf16, rounded at random": Row("torchao", stochastic),
    **of_package("bitsandbytes", "bitsandbytes.optim", "AdEMAMix8bit Adam8bit AdamW AdamW8bit LAMB8bit Lion8bit"),
    **of_package("bitsandbytes", "bitsandbytes.optim", "PagedAdamW"),
    **of_package("bitsandbytes", "bitsandbytes.optim", "SGD8bit", momentum=0.9),
    **of_package("schedulefree", "schedulefree", "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree"),
    "schedulefree ScheduleFreeWrapper": Row("schedulefree", lambda: without_schedule(protected=False)),
    "schedulefree ScheduleFreeWrapper, inner SGD protected": Row(
        "schedulefree", lambda: without_schedule(protected=True)
    ),
    "prodigyopt Prodigy": by("prodigyopt.Prodigy", slice_p=11, safeguard_warmup=True),
    "lion_pytorch Lion": by("lion_pytorch.Lion"),
    "transformers Adafactor": by("transformers.optimization.Adafactor"),
    **{f"timm {name}": of_timm(name) for name in ("adafactorbv", "adopt", "kron", "lamb", "madgradw")},
    **{f"timm {name}": of_timm(name) for name in ("mars", "nadamw", "novograd", "rmsproptf")},
    "timm Lookahead": around("timm.optim.Lookahead", protected=False),
    "timm Lookahead, inner AdamW protected": around("timm.optim.Lookahead"),
    **of_package("pytorch_optimizer", "pytorch_optimizer", "ADOPT AdEMAMix AdaShift Adan ApolloDQN BCOS CAME Conda"),
    **of_package("pytorch_optimizer", "pytorch_optimizer", "DAdaptAdam FOCUS Grams Kron LaProp MADGRAD QHAdam"),
    **of_package("pytorch_optimizer", "pytorch_optimizer", "SCION SM3 SPAM SWATS ScalableShampoo Shampoo Tiger VSGD"),
    **of_package("pytorch_optimizer", "pytorch_optimizer", "SOAP", precondition_frequency=4),
    "pytorch_optimizer GaLore": Row("pytorch_optimizer", projected),
    "pytorch_optimizer Lookahead": around("pytorch_optimizer.Lookahead", protected=False),
    "pytorch_optimizer Lookahead, inner AdamW protected": around("pytorch_optimizer.Lookahead"),
    "pytorch_optimizer Magma, inner AdamW protected": around("pytorch_optimizer.Magma"),
}

# ---- Modules --------------------------------------------------------------------------------------------------------


def usual(model: nn.Module) -> Training:
    """A module trained by SGD with momentum."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Training(model, torch.optim.SGD(trained, lr=0.05, momentum=0.9))


def of_module(make: Callable[[], nn.Module], package: str = "torch") -> Row:
    """A row of a module that is trained in the usual way."""
    return Row(package, lambda: usual(make()))


def convolutions(*norm: nn.Module) -> nn.Module:
    """A small network for images of one channel, with another layer after the first."""
    head = nn.Linear(4 * WIDTH, CLASSES)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), *norm, nn.ReLU(), nn.Flatten(), head
    )


def layers(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Two layers, of which the first is changed."""
    return nn.Sequential(change(nn.Linear(WIDTH, 32)), nn.ReLU(), nn.Linear(32, CLASSES))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.other(self.one(x).tanh()).tanh())
        return result


class Stubs(nn.Module):
    """What torch's quantisation of eager modules prepares."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao import quantization

        self.quantized, self.inner = quantization.QuantStub(), convolutions(nn.BatchNorm2d(4))
        self.back = quantization.DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.back(self.inner(self.quantized(x)))
        return result


def quantized_later(*, fused: bool) -> nn.Module:
    """Quantisation-aware training."""
    from torch.ao import quantization

    model = Stubs()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    if fused:
        quantization.fuse_modules_qat(model.inner, [["1", "2", "3"]], inplace=True)
    prepared: nn.Module = quantization.prepare_qat(model)
    return prepared


def observed(observer: str) -> nn.Module:
    """Observers of activations, which do not change them."""
    from torch.ao import quantization

    model = Stubs()
    weights = quantization.default_per_channel_weight_observer
    model.qconfig = quantization.QConfig(activation=getattr(quantization, observer), weight=weights)
    prepared: nn.Module = quantization.prepare(model.eval())
    return prepared.train()


def lazy() -> nn.Module:
    """Layers that have learnt their sizes from an input."""
    model = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(CLASSES))
    model(torch.zeros(2, WIDTH))
    return model


class Vectors(nn.Module):
    """A table whose rows a forward shortens."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.table((x.abs() * 9).long().clamp(0, 31)).mean(1))
        return result


class Measured(nn.Module):
    """A metric in a model, which the output depends on. It sees the same on every rank."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.inner, self.metric = nn.Linear(WIDTH, CLASSES), metric

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.metric.update(self.inner.weight.detach().norm())
        result: torch.Tensor = self.inner(x) * (1 + self.metric.compute().mean() / 100)
        return result


def measured(path: str, *, persistent: bool) -> nn.Module:
    """A metric of torchmetrics: what it counts is in its state_dict() if it is persistent."""
    metric = named(path)()
    metric.persistent(persistent)
    return Measured(metric)


def adapted(config: str, **options: Any) -> nn.Module:
    """Adapters of PEFT on the first layer."""
    import peft

    model: nn.Module = peft.get_peft_model(
        layers(lambda first: first), getattr(peft, config)(target_modules=["0"], **options)
    )
    return model


class Followed(nn.Module):
    """A module and an average of it, which the forward updates and uses."""

    def __init__(self, average: Callable[[nn.Module], Any], update: str = "update") -> None:
        super().__init__()
        self.inner = convolutions(nn.BatchNorm2d(4))
        self.average, self._update = average(self.inner).requires_grad_(False), update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        getattr(self.average, self._update)(self.inner)
        result: torch.Tensor = self.inner(x) + self.average.module(x) / 10
        return result


def averaged(**options: Any) -> Training:
    """An average beside the model, updated after each update."""
    training = usual(convolutions(nn.BatchNorm2d(4)))
    average = torch.optim.swa_utils.AveragedModel(training.model, **options)
    training.others["average"] = average
    training.after = lambda: average.update_parameters(training.model)
    return training


def averaged_weights() -> Training:
    """Stochastic weight averaging, with its scheduler."""
    training = averaged()
    scheduler = torch.optim.swa_utils.SWALR(training.optimizer, swa_lr=0.01, anneal_epochs=5)
    training.others["scheduler"] = scheduler
    update = training.after

    def after() -> None:
        update()
        scheduler.step()

    training.after = after
    return training


def scaled() -> Training:
    """A scaler that finds infinities at first, and grows afterwards."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Training(model, optimizer, {"scaler": scaler}, scaler)


def prepared_by_torchao() -> nn.Module:
    """Quantisation-aware training by torchao."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = layers(lambda first: first)
    config = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantize_(model, QATConfig(weight_config=config, step="prepare"))
    return model


def trained_in_float8() -> nn.Module:
    """Layers that torchao computes in float8."""
    from torchao.float8 import convert_to_float8_training

    model: nn.Module = convert_to_float8_training(layers(lambda first: first))
    return model


def few_bits(name: str) -> nn.Module:
    """A frozen layer of bitsandbytes, and one that is trained."""
    frozen = named(f"bitsandbytes.nn.{name}")(WIDTH, 32)
    model = nn.Sequential(frozen, nn.ReLU(), nn.Linear(32, CLASSES)).to("cpu")  # quantises it
    frozen.requires_grad_(False)
    return model


def pruned() -> nn.Module:
    """A layer with a mask."""
    from torch.nn.utils import prune

    return layers(lambda first: prune.l1_unstructured(first, "weight", 0.5))


def enlarged(model: nn.Module, size: int, channels: int) -> nn.Module:
    """A model for images of some size."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Upsample(size), nn.Conv2d(1, channels, 1), model)


def vision(size: int, name: str, **options: Any) -> Row:
    """A row of a model of timm."""
    options |= {"num_classes": CLASSES}
    return of_module(lambda: enlarged(named("timm.create_model")(name, **options), size, 3), "timm")


def _parametrized(name: str, **options: Any) -> Row:
    return of_module(lambda: layers(lambda first: named(f"torch.nn.utils.{name}")(first, **options)))


EMA = torch.optim.swa_utils.get_ema_multi_avg_fn
MODULES: dict[str, Row] = {
    "torch BatchNorm2d": of_module(lambda: convolutions(nn.BatchNorm2d(4))),
    "torch BatchNorm2d, cumulative": of_module(lambda: convolutions(nn.BatchNorm2d(4, momentum=None))),
    "torch BatchNorm2d, channels last": of_module(
        lambda: convolutions(nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    ),
    "torch InstanceNorm2d, running": of_module(
        lambda: convolutions(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    ),
    "torch weight_norm": _parametrized("parametrizations.weight_norm"),
    "torch weight_norm, the old one": _parametrized("weight_norm"),
    "torch spectral_norm": _parametrized("parametrizations.spectral_norm"),
    "torch spectral_norm, the old one": _parametrized("spectral_norm"),
    "torch orthogonal": _parametrized("parametrizations.orthogonal"),
    "torch tied weights": of_module(Tied),
    "torch prune": of_module(pruned),
    "torch Embedding, max_norm": of_module(lambda: Vectors(nn.Embedding(32, 8, max_norm=1.0))),
    "torch prepare_qat": of_module(lambda: quantized_later(fused=False)),
    "torch prepare_qat, fused": of_module(lambda: quantized_later(fused=True)),
    "torch HistogramObserver": of_module(lambda: observed("HistogramObserver")),
    "torch MovingAverageMinMaxObserver": of_module(lambda: observed("MovingAverageMinMaxObserver")),
    "torch lazy layers after an input": of_module(lazy),
    "torch jit.script": of_module(lambda: torch.jit.script(convolutions(nn.BatchNorm2d(4)))),
    "torch compile": of_module(lambda: torch.compile(convolutions(nn.BatchNorm2d(4)), backend="eager")),
    "torch GradScaler": Row("torch", scaled),
    "torch AveragedModel with SWALR": Row("torch", averaged_weights),
    "torch AveragedModel, EMA with buffers": Row("torch", lambda: averaged(multi_avg_fn=EMA(0.9), use_buffers=True)),
    "torch AveragedModel in the model": of_module(
        lambda: Followed(torch.optim.swa_utils.AveragedModel, "update_parameters")
    ),
    "timm ModelEmaV2": of_module(lambda: Followed(named("timm.utils.ModelEmaV2")), "timm"),
    "timm ModelEmaV3, warm-up": of_module(
        lambda: Followed(lambda inner: named("timm.utils.ModelEmaV3")(inner, use_warmup=True)), "timm"
    ),
    "timm resnet10t": vision(32, "resnet10t"),
    "timm vit, drop path": vision(32, "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, drop_path_rate=0.2),
    "timm nf_resnet26": vision(32, "nf_resnet26"),
    "torchvision mobilenet_v3_small": of_module(
        lambda: enlarged(named("torchvision.models.mobilenet_v3_small")(num_classes=CLASSES), 32, 3), "torchvision"
    ),
    "torchmetrics CatMetric, persistent": of_module(
        lambda: measured("torchmetrics.CatMetric", persistent=True), "torchmetrics"
    ),
    "torchmetrics MeanMetric, persistent": of_module(
        lambda: measured("torchmetrics.MeanMetric", persistent=True), "torchmetrics"
    ),
    "torchmetrics MeanMetric, not persistent": of_module(
        lambda: measured("torchmetrics.MeanMetric", persistent=False), "torchmetrics"
    ),
    "peft LoRA": of_module(lambda: adapted("LoraConfig", r=4, lora_dropout=0.1), "peft"),
    "peft LoRA, DoRA": of_module(lambda: adapted("LoraConfig", r=4, use_dora=True, modules_to_save=["2"]), "peft"),
    "peft AdaLoRA": of_module(
        lambda: adapted("AdaLoraConfig", total_step=50, tinit=1, tfinal=5, deltaT=1, init_r=6, target_r=2), "peft"
    ),
    "peft IA3": of_module(lambda: adapted("IA3Config", feedforward_modules=["0"]), "peft"),
    "peft OFT": of_module(lambda: adapted("OFTConfig", oft_block_size=16, r=0), "peft"),
    "peft VeRA": of_module(lambda: adapted("VeraConfig", r=4), "peft"),
    "torchao QAT": of_module(prepared_by_torchao, "torchao"),
    "torchao float8": of_module(trained_in_float8, "torchao"),
    "bitsandbytes Linear4bit, frozen": of_module(lambda: few_bits("Linear4bit"), "bitsandbytes"),
    "bitsandbytes Linear8bitLt, frozen": of_module(lambda: few_bits("Linear8bitLt"), "bitsandbytes"),
    "bitsandbytes StableEmbedding": of_module(
        lambda: Vectors(named("bitsandbytes.nn.StableEmbedding")(32, 8)), "bitsandbytes"
    ),
}
ROWS = {**OPTIMIZERS, **MODULES}
