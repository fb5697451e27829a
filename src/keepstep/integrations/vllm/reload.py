"""Loads published tensors into a model of vLLM, by vLLM's layerwise reload, and accounts for every layer.

vLLM's reload gives a layer that got no weights its former ones back. That is wrong for a layer that has made something
else of a weight that it shares: a head with tied embeddings whose weight is packed or quantized. Such a layer is loaded
too, with the tensors of the layer that it shares the weight with.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from keepstep.errors import ConfigurationError, LoadError

MAX_NAMED = 5
"""How many tensors or layers a message names."""

Loaded = tuple[str, inspect.BoundArguments]
"""Name of a layer's parameter, and the arguments with which its loader was called."""


class ModelReload:
    """How one model loads the published tensors."""

    def __init__(
        self, model: Any, model_config: Any, tensors: dict[str, torch.Tensor], *, is_part: bool, is_split: bool
    ) -> None:
        """Rehearses the load, which does not change the model.

        Args:
            model: the model of a worker.
            tensors: the tensors of each version, by the names in a checkpoint. Their values may change, and
                the objects stay.
            is_part: whether the model keeps the weights of layers that get none.
            is_split: whether other workers have other parts of the model, so that this one may need only some tensors.

        Raises:
            ConfigurationError: the model cannot load the tensors, or would not be complete with them; with names.
        """
        self._model, self._model_config, self._tensors = model, model_config, tensors
        self._shared: list[tuple[torch.nn.Module, Loaded]] = []
        """Layers that share the weight of another one, and how that one was loaded."""
        self._kept: set[torch.nn.Module] = set()
        """Layers that keep their weights."""
        rehearsal = _Rehearsal(model, tensors)
        try:
            with rehearsal:
                rehearsal.run()
                for layer, name in rehearsal.without_weights():
                    self._share_or_keep(rehearsal, layer, name, is_part)
                rehearsal.check_complete(is_split)
        finally:
            finalize_layerwise_reload(model, model_config)

    def _share_or_keep(self, rehearsal: _Rehearsal, layer: torch.nn.Module, name: str, is_part: bool) -> None:
        found = rehearsal.loads_of_shared(layer)
        if found:
            self._shared += [(layer, each) for each in found]
        elif is_part:
            self._kept.add(layer)
        else:
            raise ConfigurationError(
                f"layer '{name}' gets no weights, and shares none that are published: publish the whole model, or say "
                "that it is a part of it (part=True, --part); the layer then keeps its weights"
            )

    def load(self) -> None:
        """Loads the tensors' present values.

        Raises:
            LoadError: a layer got no weights.
            Exception: any exception that the model's ``load_weights`` raises.
        """
        initialize_layerwise_reload(self._model)
        try:
            self._model.load_weights(iter(self._tensors.items()))
            for layer, (name, arguments) in self._shared:
                parameter = getattr(layer, name)
                again = copy.copy(arguments)
                again.arguments = arguments.arguments | {"param": parameter}
                parameter.weight_loader(*again.args, **again.kwargs)
            missing = [name for layer, name in _without_weights(self._model) if layer not in self._kept]
        finally:  # gives the model its tensors back, also where loading has failed
            finalize_layerwise_reload(self._model, self._model_config)
        if missing:
            raise LoadError(f"layers got no weights: {_listed(missing)}")


class _Rehearsal:
    """A load in which each call of a loader is only noted. It reads vLLM's internals by name, and fails if they differ.

    The model's parameters are without memory meanwhile. `finalize_layerwise_reload` must be called after it.
    """

    def __init__(self, model: Any, tensors: dict[str, torch.Tensor]) -> None:
        self._model, self._tensors = model, tensors
        self._current = ""
        self._num_loaded = dict.fromkeys(tensors, 0)
        self._process = layerwise._layerwise_process
        self._count: Callable[..., tuple[int, object]] = layerwise.get_numel_loaded
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that vLLM's reload does not replace, such as biases, and copies of them: they are loaded in place."""

    def __enter__(self) -> _Rehearsal:
        initialize_layerwise_reload(self._model)
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        self._kept = [(each.data, each.data.clone()) for each in tensors if not each.is_meta]
        layerwise._layerwise_process = lambda layer, info: None
        layerwise.get_numel_loaded = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        layerwise._layerwise_process, layerwise.get_numel_loaded = self._process, self._count
        for tensor, copied in self._kept:
            tensor.copy_(copied)
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():  # vLLM then gives the layer its tensors back, and does not warn
                info.load_numel = info.load_numel_total = 0
                info.loaded_weights = []

    def run(self) -> None:
        """Raises:
        ConfigurationError: the model cannot load a tensor; with its name and the model's own reason.
        """
        try:
            self._model.load_weights(self._named())
        except ConfigurationError:
            raise
        except Exception as error:  # a model's own loader may raise anything
            raise ConfigurationError(f"the model cannot load '{self._current}': {error!r}") from error

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            self._current = name
            yield name, tensor

    def _counted(self, loader: Callable[..., object], arguments: inspect.BoundArguments) -> tuple[int, object]:
        parameter = arguments.arguments.get("param")
        for each in arguments.arguments.values():
            if (
                isinstance(each, torch.Tensor)
                and isinstance(parameter, torch.Tensor)
                and each.is_floating_point() != parameter.is_floating_point()
            ):
                raise ConfigurationError(
                    f"'{self._current}' is of dtype {each.dtype}, and the model's parameter of {parameter.dtype}"
                )
        numel, returned = self._count(loader, arguments)
        self._num_loaded[self._current] += numel
        return numel, returned

    def without_weights(self) -> list[tuple[torch.nn.Module, str]]:
        """Returns the layers with parameters of which none was loaded, and their names."""
        return _without_weights(self._model)

    def loads_of_shared(self, layer: torch.nn.Module) -> list[Loaded]:
        """Returns how the layer was loaded that has the same parameter; empty if there is none that was loaded."""
        found: list[Loaded] = []
        for name, parameter in _parameters_of(layer).items():
            owner, other = self._owner(layer, name, parameter)
            loads = [] if owner is None else layerwise.get_layerwise_info(owner).loaded_weights
            found += [(name, arguments) for given, arguments in loads if given == other]
        storages = {tensor.untyped_storage().data_ptr() for tensor in self._tensors.values()}
        for name, arguments in found:
            for each in arguments.arguments.values():
                is_own = isinstance(each, torch.Tensor) and not each.is_meta
                if is_own and each.untyped_storage().data_ptr() not in storages:
                    raise ConfigurationError(
                        f"'{name}' of a {type(layer).__name__} is shared, and computed from published tensors: this is "
                        "not supported"
                    )
        return found

    def _owner(
        self, layer: torch.nn.Module, name: str, parameter: torch.Tensor
    ) -> tuple[torch.nn.Module | None, str | None]:
        """Returns the other layer of which a layer has a parameter, and its name there.

        A tied layer has the parameter object of the other one, and so its loader, which is a method of the other one.
        """
        loader = layerwise._get_original_loader(parameter)
        owner = getattr(loader, "__self__", None)
        if isinstance(owner, torch.nn.Module) and owner is not layer:
            return owner, name
        mine = layerwise.get_layerwise_info(layer).kernel_tensors
        if mine is None or name not in mine[0] or not mine[0][name].numel():
            return None, None
        storage = mine[0][name].untyped_storage().data_ptr()
        for other in self._model.modules():
            info = layerwise.get_layerwise_info(other)
            if other is layer or info.kernel_tensors is None or not info.load_numel:
                continue
            for theirs, tensor in info.kernel_tensors[0].items():
                if tensor.numel() and tensor.untyped_storage().data_ptr() == storage:
                    return other, theirs
        return None, None

    def check_complete(self, is_split: bool) -> None:
        """Raises:
        ConfigurationError: a layer would get some of its weights only, or a tensor would be loaded nowhere.
        """
        for name, layer in self._model.named_modules():
            info = layerwise.get_layerwise_info(layer)
            if not info.load_numel or layerwise.is_deferred_attention_layer(layer):
                continue
            if hasattr(layer, "num_embeddings_padded"):  # a padded vocabulary is not loaded whole
                continue
            given = {parameter for parameter, _arguments in info.loaded_weights}
            missing = [f"{name}.{each}" for each in _parameters_of(layer) if each not in given]
            if missing or info.load_numel < _numel(layer):
                what = _listed(missing) if missing else f"{info.load_numel:,} of {_numel(layer):,} numbers of '{name}'"
                raise ConfigurationError(
                    f"a layer would get a part of its weights: {'without ' if missing else ''}{what}"
                )
        unused = [name for name, numel in self._num_loaded.items() if not numel and self._tensors[name].numel()]
        if unused and not is_split and len(unused) < len(self._tensors) - 1:  # else the model reads them all at once
            tied = getattr(getattr(self._model, "config", None), "tie_word_embeddings", False)
            unused = [name for name in unused if not (tied and name.startswith("lm_head."))]
            if unused:
                raise ConfigurationError(f"the model loads nothing of {_listed(unused)}")


def _without_weights(model: Any) -> list[tuple[torch.nn.Module, str]]:
    """Returns the layers with parameters of which none was loaded, and their names, between the reload's two calls."""
    found = []
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or info.load_numel or layerwise.is_deferred_attention_layer(layer):
            continue  # an attention layer has scales of its cache at most, which a checkpoint may lack
        if any(each.numel() for each in _parameters_of(layer).values()):
            found.append((layer, name))
    return found


def _parameters_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters, _buffers = layerwise.get_layer_params_buffers(layer)
    return {name: each for name, each in parameters.items() if name not in layerwise.SKIP_LOAD_TENSORS}


def _numel(layer: torch.nn.Module) -> int:
    return sum(get_tensor_load_numel(each) for each in _parameters_of(layer).values())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:MAX_NAMED]) + more
