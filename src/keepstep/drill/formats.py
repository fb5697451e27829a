"""Reads checkpoints and event files whose equal values do not always give equal bytes.

A reader gets the path that `keepstep.drill.files` compares. It returns nested dicts, lists, tensors and plain values.
If it cannot read the path, it raises what its library raises.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch

DCP_METADATA = ".metadata"
DCP_SUFFIX = ".distcp"
EVENTS = "events.out.tfevents.*"
"""The event files of a folder: their names contain the time, the host and the process."""
SAFETENSORS = ".safetensors"
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_saved(path: Path) -> Any:
    """Reads a file of ``torch.save``. It only loads weights and plain values: other pickles could run code."""
    with warnings.catch_warnings():
        # torch 2.15 warns that it checks the indices of sparse tensors, which is what we want.
        warnings.filterwarnings("ignore", message="Validating sparse tensor invariants")
        return torch.load(path, map_location="cpu", weights_only=True)


def read_dcp(folder: Path) -> Any:
    """Reads a folder of ``torch.distributed.checkpoint``, all of it into memory, by the names in its metadata."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    state: dict[str, Any] = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        if isinstance(stored, TensorStorageMetadata)
        else None
        for name, stored in reader.read_metadata().state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # it is no Exception
            failure, _traceback = next(iter(error.failures.values()))
            raise OSError(f"{type(failure).__name__}: {failure}") from error
    return state


def read_safetensors(path: Path) -> Any:
    """Reads a safetensors file: the length of a JSON header, the header, and the bytes of the tensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {name: each if name == "__metadata__" else _tensor(each, data[start:]) for name, each in header.items()}


def _tensor(stored: dict[str, Any], data: bytes) -> Any:
    begin, end = stored["data_offsets"]
    shape, dtype = stored["shape"], _DTYPES.get(stored["dtype"])
    raw = bytearray(data[begin:end])
    if len(raw) != end - begin:
        raise ValueError("the file is cut off")
    if dtype is None:
        return {"dtype": stored["dtype"], "shape": shape, "bytes": torch.frombuffer(raw, dtype=torch.uint8)}
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def read_events(pattern: Path) -> Any:
    """Reads all event files of a folder as one: by tag and step, the different values in the order of writing.

    A replacement opens a file of its own, in which it may repeat steps.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    series: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(pattern.parent.glob(pattern.name)):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found = make_ndarray(value.tensor).tolist()
                series.setdefault(value.tag, {}).setdefault(event.step, {})[repr(found)] = found
    return {tag: {step: _only(values) for step, values in steps.items()} for tag, steps in series.items()}


def _only(values: dict[str, Any]) -> Any:
    found = list(values.values())
    return found[0] if len(found) == 1 else found
