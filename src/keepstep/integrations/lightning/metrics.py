"""The rank-local values of a Lightning training: logged results, metrics, and callback state that depends on them.

The functions convert them to plain values, which `Session.state` sends to a replacement, and back.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

from keepstep.errors import ConfigurationError

_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_MORE_META = ("dataloader_idx", "metric_attribute")
_VALUES = ("_forward_cache", "_computed", "has_reset", "_update_count")
_TENSOR_VALUES = ("value", "cumulated_batch_size")
_CONNECTOR = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
_CHECKPOINT = (
    *("best_k_models", "kth_best_model_path", "best_model_score", "best_model_path", "current_score", "kth_value"),
    *("last_model_path", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"),
)
"""Attributes of ``ModelCheckpoint``: its ``load_state_dict()`` leaves out some of them."""


_HERE = "."
"""Stands for the working directory, where values leave the process."""


def local_values(trainer: Trainer, metrics: dict[str, Metric]) -> dict[str, Any]:
    """The rank-local values of a trainer, as plain values and copies of tensors.

    Args:
        trainer: the trainer.
        metrics: the metrics of its module (`metrics_of`).
    """
    connector = trainer._logger_connector
    values: dict[str, Any] = copied(
        {
            "results": _results(trainer.fit_loop.epoch_loop._results),
            "metrics": {name: _metric(metric) for name, metric in metrics.items()},
            "connector": {name: getattr(connector, name) for name in _CONNECTOR},
            "callbacks": [_monitor(callback) for callback in monitors(trainer)],
        }
    )
    return values


def put_local_values(trainer: Trainer, values: dict[str, Any]) -> None:
    """Sets the values of a trainer that `local_values` returned in this or another process."""
    values = copied(values)
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    results.batch = results.batch_size = results.dataloader_idx = None
    modules = metrics_of(trainer.lightning_module)
    for name, content in values["metrics"].items():
        _put_metric(modules[name], content)
    for key, content in values["results"].items():
        results[key] = _result(trainer, content, modules)
    for name, value in values["connector"].items():
        setattr(trainer._logger_connector, name, value)
    for callback, content in zip(monitors(trainer), values["callbacks"], strict=True):
        if isinstance(callback, ModelCheckpoint):
            vars(callback).update(_with_paths(content, _HERE, os.getcwd()))
        else:
            callback.load_state_dict(content)


def monitors(trainer: Trainer) -> list[Callback]:
    """The callbacks that keep metrics, which may be each rank's own."""
    return [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint | EarlyStopping)]


def copied(value: Any) -> Any:
    """A copy without gradient graphs."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return copy.copy(value)


def _with_paths(value: Any, before: str, after: str) -> Any:
    """Replaces a folder prefix in all paths: the working directory can differ between runs and nodes."""
    if isinstance(value, str) and value.startswith(before + os.sep):
        return after + value[len(before) :]
    if isinstance(value, dict):
        return {_with_paths(key, before, after): _with_paths(each, before, after) for key, each in value.items()}
    return value


def _monitor(callback: Callback) -> dict[str, Any]:
    if isinstance(callback, ModelCheckpoint):
        kept = {name: getattr(callback, name) for name in _CHECKPOINT if hasattr(callback, name)}
        values: dict[str, Any] = _with_paths(kept, os.getcwd(), _HERE)
        return values
    return dict(callback.state_dict())


# ---- self.log() -----------------------------------------------------------------------------------------------------


def _results(results: _ResultCollection) -> dict[str, Any]:
    return {key: _content(result) for key, result in results.items()}


def _content(result: _ResultMetric) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    if sync.group is not None:
        raise ConfigurationError(
            f"self.log({meta.name!r}, sync_dist_group=...): a group cannot be carried to a replacement; reduce the "
            "value over the group yourself, and log the result"
        )
    names = [*_VALUES, *(_TENSOR_VALUES if result.is_tensor else ())]
    return {
        "meta": [getattr(meta, name) for name in (*_META, *_MORE_META)],
        "reduce": meta.reduce_fx.__name__,
        "sync": [sync.should, sync.rank_zero_only, sync.op],
        "is_tensor": result.is_tensor,
        "values": {name: getattr(result, name) for name in names if hasattr(result, name)},
    }


def _result(trainer: Trainer, content: dict[str, Any], modules: dict[str, Metric]) -> _ResultMetric:
    named = dict(zip((*_META, *_MORE_META), content["meta"], strict=True))
    meta = _Metadata(**named, reduce_fx=getattr(torch, content["reduce"]))
    should, rank_zero_only, op = content["sync"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only, _op=op)
    result = _ResultMetric(meta, content["is_tensor"])
    for name, value in content["values"].items():
        setattr(result, name, value)
    if not result.is_tensor:
        result.value = modules[named["metric_attribute"]]
    return result


# ---- torchmetrics ---------------------------------------------------------------------------------------------------


def metrics_of(module: LightningModule) -> dict[str, Metric]:
    """A module's metrics, by submodule name. A caller should keep the result: a large module has many submodules."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def _metric(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in (*metric._defaults, "_update_count", "_computed", "_forward_cache")}


def _put_metric(metric: Metric, content: dict[str, Any]) -> None:
    for name, value in content.items():
        setattr(metric, name, value)
