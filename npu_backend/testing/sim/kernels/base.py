"""What the reference kernels share: the place they run at, and arithmetic helpers.

Kernels take device tensors, describe them for the validator, compute on CPU aliases in fp32 and
round where the op rounds. They are references for shapes, memory and meaning, not for the last bit
of a device's numerics.
"""

from __future__ import annotations

from typing import Any

import torch

from npu_backend.testing.sim.alias import alias, from_cpu, is_npu
from npu_backend.testing.sim.errors import NotSimulatedError
from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import TensorSpec

__all__ = [
    "decode_scale",
    "dtype_of",
    "half_rope",
    "host",
    "int8_matmul",
    "interleaved_rope",
    "optional_spec",
    "place",
    "rms_norm",
    "set_place",
    "spec",
    "to_device",
    "unsupported_unless",
    "where",
]

_place: Place | None = None

# torch's own numbers of its dtypes, which some lines pass instead of the dtype.
_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    12: torch.int8,
    13: torch.uint8,
    14: torch.int32,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    291: torch.float8_e5m2,
    292: torch.float8_e4m3fn,
}
_PLAIN = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def set_place(value: Place) -> None:
    """Fix chip, CANN and line for all kernels of this process."""
    global _place
    _place = value


def place() -> Place:
    """Return the simulated place; the kernels exist only while there is one."""
    assert _place is not None
    return _place


def where() -> dict[str, Any]:
    """Return the place as keyword arguments of a validator."""
    here = place()
    return {"soc": here.family, "cann": here.cann, "line": here.line}


def spec(tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor for a validator."""
    return TensorSpec.of(tensor)


def optional_spec(tensor: torch.Tensor | None) -> TensorSpec | None:
    """Describe an optional tensor for a validator."""
    return None if tensor is None else TensorSpec.of(tensor)


def host(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return a CPU alias of a device tensor.

    Raises:
        RuntimeError: The tensor is not on the device.
        StorageReleasedError: Its memory was released.
    """
    if not is_npu(tensor):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"npu and {tensor.device}! ({op})"
        )
    return alias(tensor, op)


def to_device(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy a CPU result into new device memory on the device of ``like``."""
    return from_cpu(result.contiguous(), like.device)


def unsupported_unless(holds: bool, op: str, what: str) -> None:
    """Raise NotSimulatedError naming what is not simulated, unless a condition holds."""
    if not holds:
        raise NotSimulatedError(op, what)


def dtype_of(value: Any, default: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype that an op's dtype argument means, on any line."""
    if value is None:
        return default
    if isinstance(value, torch.dtype):
        return _PLAIN.get(value, value)
    if value not in _DTYPES:
        raise NotSimulatedError(op, f"dtype number {value}")
    return _DTYPES[value]


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float, *, scale: float = 1.0
) -> torch.Tensor:
    """RMS norm over the last dimension in fp32, not rounded."""
    x = x.float()
    rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return x * rms * gamma.float() * scale


def interleaved_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (even, odd) and return them in half layout: all evens, then all odds."""
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    straight, turned = torch.cat((even, odd), -1), torch.cat((-odd, even), -1)
    return straight * cos.float() + turned * sin.float()


def half_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (first half, second half) pairs of components that are in half layout already."""
    first, second = x.float().chunk(2, -1)
    return x.float() * cos.float() + torch.cat((-second, first), -1) * sin.float()


def int8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply int8 matrices exactly, as an int32 accumulator would; returns float64."""
    return a.double() @ b.double()


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return a dequantisation scale as fp32; an int64 one carries fp32 bits in its low half."""
    if scale.dtype == torch.int64:
        return scale.to(torch.int32).view(torch.float32)
    return scale.float()
