"""Compares two checkpoints or logs value by value, because equal values do not always give equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from keepstep.drill.formats import read_saved

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
"""Common file name suffixes of files from ``torch.save``."""


def describe_difference(
    first: Path,
    second: Path,
    folders: Sequence[str] = ("", ""),
    read: Callable[[Path], Any] = read_saved,
    by: str = "torch.load(weights_only=True)",
) -> str | None:
    """Describes the first value in which two files differ. Returns None if all values are equal bit for bit.

    Args:
        first: one of the files.
        second: the other.
        folders: folder of the first run and of the second one. Strings with these paths are compared relative to them.
        read: returns the values in a file.
        by: what reads them, as the user knows it.
    """
    try:
        loaded = [read(path) for path in (first, second)]
    except Exception as error:  # the file may be broken in any way; the bytes differ in any case
        reason = str(error).strip().partition("\n")[0]
        return f"its bytes differ, and {by} does not read it: {reason:.120}"
    return _compare("", *(_without(folder, value) for folder, value in zip(folders, loaded, strict=True)))


def _without(folder: str, value: Any) -> Any:
    """Returns a value with paths relative to a folder. Lightning's checkpoints contain absolute paths."""
    if isinstance(value, str):
        return value.replace(folder, ".") if folder else value
    if isinstance(value, Mapping):
        return {_without(folder, key): _without(folder, each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without(folder, each) for each in value)
    return value


def _compare(path: str, first: Any, second: Any) -> str | None:
    """Describes the first difference below ``path``, a Python expression for the position of the values."""
    where = path or "its value"
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _compare_tensors(where, first.detach(), second.detach())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if one_sided := [key for key in [*first, *second] if (key in first) != (key in second)]:
            return f"{path}[{one_sided[0]!r}] is there in only one of the runs"
        pairs = [(f"{path}[{key!r}]", first[key], second[key]) for key in first]
        return next((found for pair in pairs if (found := _compare(*pair))), None)
    if type(first) is type(second) and isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return f"{where} has {len(first)} and {len(second)} items"
        items = [(f"{path}[{index}]", *pair) for index, pair in enumerate(zip(first, second, strict=True))]
        return next((found for item in items if (found := _compare(*item))), None)
    is_same = type(first) is type(second) and (first == second or repr(first) == repr(second))  # repr: for nan
    return None if is_same else f"{where} is {first!r:.60} and {second!r:.60}"


def _compare_tensors(where: str, first: torch.Tensor, second: torch.Tensor) -> str | None:
    forms = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in (first, second)]
    if forms[0] != forms[1] or first.layout != second.layout:
        return f"{where} is {forms[0]} and {forms[1]}"
    if first.layout is not torch.strided:
        first, second = first.to_dense(), second.to_dense()
    different = (_bytes_of(first) != _bytes_of(second)).any(dim=1)
    if not bool(different.any()):
        return None
    text = f"{where}: {int(different.sum())} of {first.numel()} values differ"
    if first.dtype.is_floating_point:
        text += f", by up to {float((first.double() - second.double()).abs().max()):.3g}"
    return text


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes, in shape [elements, bytes per element]."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
