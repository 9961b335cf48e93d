"""CPU tensors that alias simulated device memory, without a copy.

Simulated device memory is host memory, so a CPU tensor over the same bytes lets any CPU kernel
read and write it. Before a byte is touched the storage is checked: a tensor whose storage was
resized away raises, where a device would read freed memory.
"""

from __future__ import annotations

from typing import Any

import torch

from npu_backend.testing.sim.errors import StorageReleasedError

__all__ = ["alias", "from_cpu", "is_npu", "new_library", "span_bytes"]

DEVICE_TYPE = "npu"


def new_library(namespace: str, kind: str) -> Any:
    """Return a torch library to define or register ops in; its class is not typed."""
    library: Any = torch.library.Library
    return library(namespace, kind)


def is_npu(value: object) -> bool:
    """Whether a value is a tensor in simulated device memory."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of storage that a tensor needs, from the storage's start."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


def alias(tensor: torch.Tensor, op: str = "a kernel") -> torch.Tensor:
    """Return a CPU tensor over the same bytes, same shape, strides and dtype.

    Args:
        tensor: A tensor on the simulated device.
        op: Name of the op, for the error message.

    Raises:
        StorageReleasedError: The storage no longer holds the bytes that the tensor spans.
    """
    need = span_bytes(tensor)
    if need == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    have = storage.nbytes()
    if have < need:
        raise StorageReleasedError(op, tuple(tensor.shape), have, need)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), have
    )
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def from_cpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU result into newly allocated device memory, strides kept.

    The allocation is torch_npu's own, so that statistics and out-of-memory are, too.
    """
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(out).copy_(tensor)
    return out
