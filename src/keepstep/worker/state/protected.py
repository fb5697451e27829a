"""The protected objects as named live tensors and a small tree of host values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from keepstep.errors import ConfigurationError, StateMismatch, UsageError
from keepstep.typenames import is_named
from keepstep.weights.memory.blocks import NamedBlock, is_dtensor, local_of
from keepstep.weights.memory.bytes_of import digest_of, is_dense
from keepstep.worker.groups.group import alone
from keepstep.worker.parallel.ddp import refuse_hooks, refuse_wrapped
from keepstep.worker.parallel.layout import ParallelLayout, Replicated, shard_of
from keepstep.worker.parallel.pipeline import is_schedule
from keepstep.worker.parallel.zero import is_zero, local_optimizer
from keepstep.worker.state import tree
from keepstep.worker.state.own import OwnModuleState, OwnOptimizerState, own_states_of
from keepstep.worker.state.rng import Generator, check_generator

Named = list[tuple[str, torch.Tensor]]


class Modes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The modes of a model by name: ``train()``, ``requires_grad``, kinds of buffers, and which parameters the script
    writes to.

    Ranks may differ in their modes for a while, such as when one rank evaluates alone. So replicas do not compare them.
    """

    evaluating: frozenset[str]
    """Modules with ``training=False``."""
    frozen: frozenset[str]
    """Parameters with ``requires_grad=False``."""
    written: frozenset[str] | None
    """See `ProtectedState.written`; None if not all are known yet."""
    without_tensor: frozenset[str]
    """Buffers that are registered and None."""
    transient: frozenset[str]
    """Buffers that are not persistent."""


class ProtectedState:
    """All objects passed to `Session.protect`. It holds references to the live tensors and owns none of them."""

    def __init__(self, objects: dict[str, Any], layout: ParallelLayout | None = None, shard: str = "") -> None:
        """Args:
            objects: the protected objects, by the user's names.
            layout: determines the part of each tensor that this rank holds; None for `Replicated`.
            shard: the user's label that distinguishes ranks with different parts under equal names and shapes.

        Raises:
            ConfigurationError: an object cannot be protected; the message says what to do.
        """
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.others: dict[str, Any] = {}
        self.generators: dict[str, Generator] = {}
        """Generators of the script's own: seeded for each step, as the global ones are, so no state is carried."""
        self.layout = layout or Replicated()
        self.label = shard
        """See `Session.protect`."""
        self.has_stages = False
        """Whether each rank holds only some of the layers (pipelining)."""
        self.written: frozenset[str] = frozenset()
        """Parameters that the script itself writes to in a step before the update, as far as known."""
        self.knows_written = False
        """Whether ``written`` is complete."""
        for name, thing in objects.items():
            self._sort(name, thing)
        self._num_parameters = {name: len(parameters_of(optimizer)) for name, optimizer in self.optimizers.items()}
        if not self.modules:
            raise ConfigurationError("protect() was given no torch.nn.Module: pass at least model=...")
        self._parameters: Named = []
        """The parameters at the first step. While an FSDP module computes, it exposes other tensors."""
        self.first_buffers: frozenset[str] = frozenset()
        """The buffers at the first step."""
        self._own_modules: list[OwnModuleState] = []
        self._own_optimizers = {
            name: OwnOptimizerState(name, local_optimizer(optimizer)) for name, optimizer in self.optimizers.items()
        }
        self.check()
        for name, tensor in self.live_tensors():
            if not is_dense(tensor):
                raise ConfigurationError(f"protect(): {name} does not fill one run of memory; make it contiguous")
        self.host_bytes()

    def _sort(self, name: str, thing: Any) -> None:
        if isinstance(thing, torch.nn.Module):
            self.modules[name] = thing
        elif isinstance(thing, torch.optim.Optimizer) and isinstance(local_optimizer(thing), torch.optim.LBFGS):
            raise ConfigurationError(
                f"protect({name}=LBFGS): an optimizer that calls a closure computes gradients in mid-update, "
                "so there is no point at which an update is whole; use an optimizer without a closure"
            )
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers[name] = thing
        elif isinstance(thing, Generator):
            check_generator(name, thing)
            self.generators[name] = thing
        elif is_schedule(thing):
            self.has_stages = True  # no state between two steps; its adapter knows what a step leaves in it
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self.others[name] = thing
        else:
            raise ConfigurationError(
                f"protect({name}={type(thing).__name__}): it has no state_dict() and load_state_dict(), so its state "
                "cannot be carried to another process; give it both, or leave it out if it has no state"
            )

    def check(self) -> None:
        """Checks the current modules and optimizers. Call it at the first step: until then a script may change them.

        Raises:
            ConfigurationError: one of them has state that a replacement would not get; the message says what to do.
        """
        self.layout.at_rest()
        named = ((f"{m}.{n}", p) for m, module in self.modules.items() for n, p in module.named_parameters())
        found = list(self._unique(named))
        self._refuse_late_shards(found)
        self._parameters = found
        self._refuse_flattened()
        self._refuse_others_parameters()
        refuse_wrapped(self.modules)
        refuse_hooks(self.modules, self.others.values())
        self.first_buffers = frozenset(name for name, _buffer in self.buffers())
        self._own_modules = own_states_of(self.parts())
        for own in self._own_modules:
            _alone(own.path, own.check)
        for name, optimizer in self._own_optimizers.items():
            _alone(name, optimizer.check)

    def refuse_added_parameters(self) -> None:
        """Refuses parameters that the script added to an optimizer after `protect`: a replacement would lack them.

        Raises:
            UsageError: an optimizer has more parameters; the message names the optimizer and says what to do.
        """
        for name, optimizer in self.optimizers.items():
            known, found = self._num_parameters[name], sum(len(group["params"]) for group in optimizer.param_groups)
            if found != known:
                raise UsageError(
                    f"optimizer '{name}' has {found} parameters, and had {known} at protect(): the optimizer of a "
                    "replacement would not have what add_param_group() has added. Give it all parameters before "
                    "protect(); those that are to be trained later may have requires_grad_(False) until then"
                )

    def refuse_other_than_memory(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses state of an optimizer that is no plain memory, or has no name. Call it after its first update, which
        creates it.

        Raises:
            ConfigurationError: names the state, and says what it is.
        """
        own = next(name for name, known in self.optimizers.items() if optimizer in (known, local_optimizer(known)))
        for parameter in parameters_of(optimizer):
            for key, value in local_optimizer(optimizer).state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and not isinstance(key, str):
                    raise ConfigurationError(
                        f"optimizer '{own}' has a tensor under {key!r} in the state of a parameter: keepstep finds a "
                        "tensor there by a text; name it by one"
                    )
        named = [each for each in self.optimizer_tensors() if each[0].partition("/")[0] == own]
        for block in self.layout.blocks(named):
            held = block.held.tensor
            if not is_dense(held) or held.is_conj() or held.is_neg():
                raise ConfigurationError(
                    f"{block.names[0]} is a view that does not fill one run of memory, or changes what it shows: "
                    "keep a contiguous tensor in optimizer.state, as clone() makes it"
                )
        tree.pack(self.optimizer_values()[own], [], own)

    def _refuse_others_parameters(self) -> None:
        """Refuses optimizer parameters outside of protected modules: a replacement would get untrained values."""
        known = {id(parameter) for _name, parameter in self.parameters()}
        for name, optimizer in self.optimizers.items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                if id(parameter) not in known:
                    raise ConfigurationError(
                        f"protect(): parameter {index} of {name}, {list(parameter.shape)}, is in no module that is "
                        "protected, and would not be restored: pass every module that the optimizer trains to "
                        "protect(), and a parameter without a module in a torch.nn.ParameterList"
                    )

    def _refuse_late_shards(self, found: Named) -> None:
        """Refuses a model that was sharded after `protect`: sharding replaces the parameters that it registered."""
        whole = {name for name, parameter in self._parameters if not is_dtensor(parameter)}
        for name, parameter in found:
            if name in whole and is_dtensor(parameter):
                raise ConfigurationError(
                    f"{name} was sharded after protect(): call fully_shard() or parallelize_module() first, then make "
                    "the optimizer, then call protect()"
                )

    def _refuse_flattened(self) -> None:
        """Refuses FSDP1, whose ranks hold ranges of a flattened tensor and not blocks of each tensor.

        It checks modules as well as tensors: with ``use_orig_params=True`` the parameters look like plain ones, and the
        type of a FlatParameter is ``nn.Parameter``. It compares type names, because importing FSDP is slow and warns.
        """
        for name, module in self.modules.items():
            for path, part in module.named_modules():
                if is_named(part, "FullyShardedDataParallel"):
                    raise ConfigurationError(_flattened(f"{name}.{path}" if path else name, "FullyShardedDataParallel"))
        for name, tensor in self._parameters:
            if getattr(tensor, "_fsdp_flattened", False):  # a FlatParameter, or a view into one
                raise ConfigurationError(_flattened(name, "flattened parameter of FullyShardedDataParallel"))

    # ---- live tensors ---------------------------------------------------------------------------------------------

    def parameters(self) -> Named:
        """Parameters of all modules, each once (tied ones under their first name)."""
        return self._parameters

    def buffers(self) -> Named:
        """Buffers of all modules, each once, non-persistent ones included: a forward may change them."""
        return list(self._unique((f"{m}.{n}", b) for m, mod in self.modules.items() for n, b in mod.named_buffers()))

    def optimizer_tensors(self) -> Named:
        """Optimizer state tensors, named by optimizer, parameter index and key."""
        found: Named = []
        for name, optimizer in self.optimizers.items():
            state = local_optimizer(optimizer).state
            for index, parameter in enumerate(parameters_of(optimizer)):
                values = state.get(parameter, {})
                for key in sorted(values):
                    if isinstance(value := values[key], torch.Tensor):
                        found.append((f"{name}/{index}/{key}", value))
        return found

    @property
    def device(self) -> torch.device:
        """The GPU that holds parameters, or the CPU if no GPU does."""
        own = (parameter.device for _name, parameter in self.parameters() if parameter.device.type != "cpu")
        return next(own, torch.device("cpu"))

    def blocks(self) -> list[NamedBlock]:
        """This rank's blocks of parameters, buffers and optimizer state, in the same order on every replica."""
        return self.layout.blocks([*self.parameters(), *self.buffers(), *self.optimizer_tensors()])

    def live_tensors(self) -> Named:
        """The local tensors of `blocks`. Operations on them never communicate."""
        return [(block.names[0], block.held.tensor) for block in self.blocks()]

    @property
    def is_sharded(self) -> bool:
        """Whether different ranks may hold different parts of the state."""
        return self.layout.is_sharded or bool(self.label)

    def shard(self) -> str:
        """The id of this rank's shard. Ranks with equal ids are replicas of each other."""
        owned = [
            (f"{name}/{index}", parameter)
            for name, optimizer in self.optimizers.items()
            if is_zero(optimizer)
            for index, parameter in parameters_here(optimizer)
        ]
        return shard_of(self.layout.blocks([*self.parameters(), *owned]), self.label)

    @staticmethod
    def _unique(named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for name, tensor in named:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def place_optimizer_tensor(self, name: str, value: torch.Tensor, *, as_dtensor: bool = False) -> None:
        """Sets one optimizer state tensor by its name; the optimizer keeps ``value`` itself.

        Args:
            name: as in `optimizer_tensors`.
            value: this rank's part of the tensor.
            as_dtensor: whether to wrap ``value`` in a DTensor with the mesh and placements of the parameter.

        Raises:
            StateMismatch: the optimizer here has fewer parameters, or the parameter is no such DTensor.
        """
        optimizer, index, key = name.split("/", 2)
        parameters = parameters_of(self.optimizers[optimizer])
        if int(index) >= len(parameters):
            raise StateMismatch(
                f"optimizer '{optimizer}' has {len(parameters)} parameters here, and '{name}' elsewhere"
            )
        parameter = parameters[int(index)]
        placed = tree.placed_as(value, parameter, name) if as_dtensor else value
        local_optimizer(self.optimizers[optimizer]).state[parameter][key] = placed

    def drop_optimizer_state(self) -> None:
        """Deletes all optimizer state. Call it before a restore, because the state may be partially updated."""
        for optimizer in self.optimizers.values():
            local_optimizer(optimizer).state.clear()

    def state_dicts(self) -> dict[str, Any]:
        """What ``state_dict()`` of each protected object gives, by name; of DTensors the local part.

        Nothing is added and nothing left out: this is for a judge who does not trust the rest of this class.
        """
        optimizers = {name: local_optimizer(optimizer) for name, optimizer in self.optimizers.items()}
        found = {name: thing.state_dict() for name, thing in (self.modules | optimizers | self.others).items()}
        return {name: tree.changed(value, lambda leaf, _its: local_of(leaf)) for name, value in found.items()}

    def scalers(self) -> list[torch.amp.GradScaler]:
        """The protected gradient scalers: they may skip an update."""
        return [thing for thing in self.others.values() if isinstance(thing, torch.amp.GradScaler)]

    @property
    def trains(self) -> bool:
        """Whether a protected optimizer has parameters on this rank."""
        return any(group["params"] for optimizer in self.optimizers.values() for group in optimizer.param_groups)

    def parts(self) -> list[tuple[str, torch.nn.Module]]:
        """All modules and submodules, each once, under its first name."""
        seen: set[torch.nn.Module] = set()
        named = ((f"{m}.{n}", part) for m, module in self.modules.items() for n, part in module.named_modules(seen))
        return list(named)

    def modes(self) -> Modes:
        """The current modes."""
        evaluating = frozenset(name for name, part in self.parts() if not part.training)
        frozen = frozenset(name for name, p in self.parameters() if not p.requires_grad)
        without_tensor, transient = set[str](), set[str]()
        for path, part in self.parts():
            if not part._buffers:
                continue
            place = path.removesuffix(".")
            without_tensor.update(f"{place}.{key}" for key, buffer in part._buffers.items() if buffer is None)
            own = [key for key, _buffer in part._buffers.items()]  # a ScriptModule's are no dict, and not iterable
            transient.update(f"{place}.{key}" for key in own if key in part._non_persistent_buffers_set)
        written = self.written if self.knows_written else None
        return Modes(evaluating, frozen, written, frozenset(without_tensor), frozenset(transient))

    def may_write(self, name: str) -> bool:
        """Whether the script may write to a parameter in a step, before its update."""
        return name in self.written or not self.knows_written

    def place_buffers(self, names: Collection[str], new: Mapping[str, torch.Tensor], modes: Modes) -> None:
        """Registers the buffers that another process has, because a forward there has created or resized some.

        Args:
            names: names of all buffers with a tensor there.
            new: tensors in place of those that differ here in form, or that are not here.
            modes: of the other process.

        Raises:
            StateMismatch: the module of a buffer is not here.
        """
        before = dict(self.buffers())
        replaced = {id(before[name]): tensor for name, tensor in new.items() if name in before}
        kept = {id(before[name]) for name in names if name in before}
        parts = {path.removesuffix("."): part for path, part in self.parts()}
        for path, part in parts.items():
            for key, buffer in list(part._buffers.items()):
                name = f"{path}.{key}"
                if name in modes.without_tensor:
                    part._buffers[key] = None
                elif id(buffer) in replaced:
                    part._buffers[key] = replaced[id(buffer)]
                elif name not in new and id(buffer) not in kept:
                    del part._buffers[key]
        for name in (*new, *modes.without_tensor):
            path, _, key = name.rpartition(".")
            if path not in parts:
                raise StateMismatch(f"the buffer '{name}' is in a module that this rank's model lacks")
            parts[path]._buffers[key] = new.get(name)
        for path, part in parts.items():
            for key, _buffer in list(part._buffers.items()):
                change = set.add if f"{path}.{key}" in modes.transient else set.discard
                change(part._non_persistent_buffers_set, key)

    def place_modes(self, modes: Modes) -> None:
        """Sets the modes: modules not in ``modes`` to train(), parameters not in it to requires_grad.

        If ``modes.written`` is known, it is added to ``written``, which then counts as complete.
        """
        for name, part in self.parts():
            part.training = name not in modes.evaluating
        for name, parameter in self.parameters():
            parameter.requires_grad_(name not in modes.frozen)
        if modes.written is not None:
            self.written, self.knows_written = self.written | modes.written, True

    def gradient_marks(self) -> tuple[int, ...]:
        """Indices of the parameters that have a gradient. Between steps only its presence matters, not its content."""
        return tuple(index for index, (_name, p) in enumerate(self.parameters()) if p.grad is not None)

    def place_gradients(self, marks: tuple[int, ...]) -> None:
        """Sets the gradient of the marked parameters to zeros, and that of all others to None."""
        kept = set(marks)
        for index, (_name, parameter) in enumerate(self.parameters()):
            parameter.grad = torch.zeros_like(parameter) if index in kept else None

    # ---- host state -----------------------------------------------------------------------------------------------

    def step_state(self) -> dict[str, Any]:
        """The host-side values that a step may change before its update: hyperparameters, all other objects, and what
        modules say of themselves.

        Nothing in it is shared with the live objects.

        Raises:
            UsageError: a ``state_dict()`` communicates with other ranks.
        """
        return self._host_values([own for own in self._own_modules if not own.is_idle])

    def _host_values(self, modules: Iterable[OwnModuleState]) -> dict[str, Any]:
        return {
            "groups": {name: _hyperparameters(optimizer) for name, optimizer in self.optimizers.items()},
            "others": {name: tree.copied(_alone(name, thing.state_dict)) for name, thing in self.others.items()},
            "modules": {own.path: tree.copied(_alone(own.path, own.read)) for own in modules},
        }

    def shared_values(self) -> dict[str, Any]:
        """`host_state` without the optimizer state of single parameters."""
        known = self._known()
        optimizers = {
            name: tree.copied(_alone(name, functools.partial(own.read, known)))
            for name, own in self._own_optimizers.items()
        }
        return {**self._host_values(self._own_modules), "optimizers": optimizers}

    def host_state(self) -> dict[str, Any]:
        """All host values: `step_state`, what optimizers say of themselves, and optimizer state that is not in tensors.

        Raises:
            UsageError: a ``state_dict()`` communicates with other ranks.
        """
        return {**self.shared_values(), "scalars": self.optimizer_values()}

    def _known(self) -> Named:
        """The tensors that are carried under a name of their own."""
        return [*self.parameters(), *self.buffers(), *self.optimizer_tensors()]

    def optimizer_values(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Optimizer state that is not in tensors, by optimizer and parameter index."""
        return {name: _scalar_state(optimizer) for name, optimizer in self.optimizers.items()}

    def load_host_state(self, state: dict[str, Any]) -> None:
        """Restores values that `step_state` or `host_state` returned on this or another rank.

        Call it after all tensors have been restored.

        Raises:
            StateMismatch: an object refuses its state.
        """
        self._load_optimizers(state)
        if "optimizers" in state:
            known = dict(self._known())
            loaded = [own.load(state["optimizers"].get(name, {}), known) for name, own in self._own_optimizers.items()]
            if any(loaded):
                self._load_optimizers(state)
        for own in self._own_modules:
            if own.path in state["modules"]:
                own.load(state["modules"][own.path])
        for name, value in state["others"].items():
            thing = self.others[name]
            if self.layout.is_sharded:
                value = tree.placed(value, _alone(name, thing.state_dict))
            _load_other(thing, tree.copied(value))

    def _load_optimizers(self, state: dict[str, Any]) -> None:
        """Restores the groups of the optimizers, and their state that is in no tensor."""
        for name, groups in state["groups"].items():
            for group, values in zip(self.optimizers[name].param_groups, groups, strict=True):
                for key in set(group) - set(values) - {"params"}:
                    del group[key]
                group.update(tree.copied(values))
        for name, scalars in state.get("scalars", {}).items():
            own = local_optimizer(self.optimizers[name]).state
            for index, parameter in enumerate(parameters_of(self.optimizers[name])):
                values = scalars.get(index, {})
                if parameter not in own and not values:
                    continue
                live = own[parameter]
                for key in [key for key, value in live.items() if not isinstance(value, torch.Tensor)]:
                    if key not in values:
                        del live[key]
                for key, value in values.items():
                    its = tree.placed_all(value, parameter)
                    live[key] = tree.put_into(live.get(key), its)
                if not live:
                    del own[parameter]

    def host_bytes(self) -> tuple[bytes, list[torch.Tensor]]:
        """The host state as msgpack, and the tensors in it, those that fill one run of memory by reference.

        Raises:
            ConfigurationError: a value cannot be serialized; the message names it.
        """
        return tree.encoded(self.host_state())

    def digest(self) -> str:
        """A digest of all protected state, to compare two ranks bit for bit."""
        host, tensors = self.host_bytes()
        named = [*self.live_tensors(), *((f"host/{index}", tensor) for index, tensor in enumerate(tensors))]
        return digest_of(named, host)


def _flattened(name: str, kind: str) -> str:
    return (
        f"protect(): {name} is a {kind} (FSDP1), whose ranks hold runs of flattened tensors and not parts of each one: "
        "use FSDP2, torch.distributed.fsdp.fully_shard(), or DistributedDataParallel"
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups, in their order; the index in a state tensor's name counts these."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameters_here(optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
    """The parameters of which this rank holds the optimizer state, with their index among all."""
    here = {id(parameter) for parameter in parameters_of(local_optimizer(optimizer))}
    return [(index, each) for index, each in enumerate(parameters_of(optimizer)) if id(each) in here]


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: tree.copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _scalar_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    found = {}
    state = local_optimizer(optimizer).state
    for index, parameter in enumerate(parameters_of(optimizer)):
        values = state.get(parameter, {})
        scalars = {key: tree.copied(value) for key, value in values.items() if not isinstance(value, torch.Tensor)}
        if scalars:
            found[index] = scalars
    return found


def _alone(name: str, read: Callable[[], Any]) -> Any:
    """Calls a function that asks an object for its ``state_dict()``; a collective in it raises."""
    with alone(f"{name}.state_dict()"):
        return read()


def _load_other(thing: Any, state: Any) -> None:
    if isinstance(thing, torch.amp.GradScaler):
        if not state:
            return  # a disabled scaler has no state, and its load_state_dict() raises
        if thing._scale is not None:
            thing.update(float(state["scale"]))  # the only public way to reset the record of unscale_() calls
    thing.load_state_dict(state)
