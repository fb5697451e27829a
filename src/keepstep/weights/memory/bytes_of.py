"""Tensors as runs of bytes, in place, and runs of bytes copied."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
import xxhash
from torch.nn.parameter import is_lazy

from keepstep.errors import ConfigurationError

RELEASED_BYTES = 1 << 15
"""From this size on other threads may run during a copy; handing over costs more than a smaller copy takes."""
_PROTOTYPE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_released = ctypes.CFUNCTYPE(*_PROTOTYPE)(("memmove", ctypes.CDLL(None)))
_copy_held = ctypes.PYFUNCTYPE(*_PROTOTYPE)(("memmove", ctypes.PyDLL(None)))


def copy_bytes(to: int, source: int, num_bytes: int) -> None:
    """Copies between two addresses of this process."""
    (_copy_released if num_bytes >= RELEASED_BYTES else _copy_held)(to, source, num_bytes)


def copy_flat(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the bytes of one flat tensor to another of the same size, uint8 [n].

    Between host memory and a GPU the copy is asynchronous, on the current stream. The caller must not free or write to
    ``source`` before an event recorded after the copy has completed. With unpinned memory, CUDA returns only after it
    has completed the copy or has read the source.
    """
    if to.device.type == source.device.type == "cpu":
        copy_bytes(to.data_ptr(), source.data_ptr(), source.numel())
    else:
        to.copy_(source, non_blocking=True)


def address_of(memory: memoryview) -> int:
    """The address of a memoryview, writable or not."""
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])


def other_than_memory(tensor: torch.Tensor) -> str | None:
    """Says why a tensor's content is not simply bytes at an address; None if it is.

    Args:
        tensor: the local tensor of a DTensor, or another one.

    Returns:
        a description of the tensor, with its type, for a message: "a <type>, which ...".
    """
    kind = type(tensor)
    if is_lazy(tensor):
        return f"a {_named(kind)}: its module has not seen an input yet"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {_named(kind)}, whose content lies in other tensors or nowhere"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return f"a {_named(kind)} inside of a transformation of torch.func"
    if tensor.is_quantized or tensor.is_nested:
        form = "quantized" if tensor.is_quantized else "nested"
        return f"a {form} {_named(kind)}, whose content is not only its elements"
    if not (tensor.is_cpu or tensor.is_cuda):
        return f"a {_named(kind)} on {tensor.device}, which is neither the CPU nor a CUDA GPU"
    if tensor.layout is not torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} {_named(kind)}, whose content lies in several tensors"
    if num_elements := tensor.numel():
        last = num_elements - 1
        if not tensor.is_contiguous():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if (tensor.storage_offset() + last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
            return f"a {_named(kind)} whose storage has been freed"
    return None


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one run of memory, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous() or not tensor.numel():
        return True  # torch gives a tensor without elements strides as if it had some
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its elements fill one run of memory; else a contiguous copy.

    The order of dimensions counts: some kernels compute other bits from a tensor with other strides.
    """
    return tensor if is_dense(tensor) else tensor.contiguous()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as a flat uint8 tensor, shape [bytes]; writing to it writes the tensor.

    Raises:
        ConfigurationError: the tensor does not fill one run of memory (sparse, expanded, or a strided slice).
    """
    if not is_dense(tensor):
        raise ConfigurationError(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} does not fill one run of memory: "
            "protect a contiguous one"
        )
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor: its own memory if it is on the CPU, else a copy.

    ``Tensor.numpy()`` would do as well, but torch never resizes a tensor after it, and some modules resize their
    buffers.

    Raises:
        ConfigurationError: see `byte_view`.
    """
    return np.from_dlpack(byte_view(tensor.cpu())).data


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]], extra: bytes) -> str:
    """A 128-bit digest (xxh3) of names, dtypes, shapes, strides and bytes, and of ``extra``."""
    state = xxhash.xxh3_128()
    for name, tensor in tensors:
        state.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{tensor.stride()};".encode())
        state.update(host_bytes(tensor))
    state.update(extra)
    return state.hexdigest()
