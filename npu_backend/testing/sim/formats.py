"""Device formats of tensors, as torch_npu itself remembers them.

A tensor that was allocated in an internal format keeps it in torch_npu's storage description, and
so do its views. Only the layout of the bytes is not simulated: they stay in row order.
"""

from __future__ import annotations

import torch

from npu_backend.testing.sim.alias import DEVICE_TYPE, alias, is_npu
from npu_backend.testing.sim.spec import FORMAT_ND

__all__ = ["copy_in_format", "format_of"]


def format_of(tensor: torch.Tensor) -> int:
    """Return the device's format number of a tensor; host tensors are ND, and so are those of a
    class that dispatches by itself, such as fake ones, for they need have no memory."""
    own = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if not is_npu(tensor) or own:
        return FORMAT_ND
    return int(torch.ops.npu.get_npu_format(tensor))


def copy_in_format(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return a copy of a device tensor, allocated by torch_npu in another format."""
    out: torch.Tensor = torch.ops.npu.empty_with_format(
        list(tensor.shape),
        dtype=tensor.dtype,
        device=torch.device(DEVICE_TYPE, tensor.device.index),
        acl_format=number,
    )
    alias(out, "npu_format_cast").copy_(alias(tensor, "npu_format_cast"))
    return out
