"""Quantization arithmetic that several kernels share, on CPU tensors.

Rounding is to nearest, ties to even; what a dtype cannot hold saturates. Source: aclnnDynamicQuant
and aclnnDynamicMxQuant of the ops-nn documentation.
"""

from __future__ import annotations

import torch

__all__ = [
    "E8M0",
    "EIGHT_BIT_FLOATS",
    "by_scale",
    "exact_matmul",
    "largest",
    "mx_restore",
    "mx_rows",
    "powers_of_two",
    "quantize_rows",
    "saturate",
]

# Exponent of the largest normal number of each dtype.
EIGHT_BIT_FLOATS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)
"""Powers of two in a byte; torch has the dtype since 2.7."""
_BIAS = 127
_NOT_A_NUMBER = 255


def largest(dtype: torch.dtype) -> float:
    """Return the largest number of a dtype: 127 for int8, 448 for float8_e4m3fn."""
    if dtype in EIGHT_BIT_FLOATS:
        return float(torch.finfo(dtype).max)
    return float(torch.iinfo(dtype).max)


def saturate(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 values to an 8-bit dtype; what lies outside becomes its bound."""
    if dtype in EIGHT_BIT_FLOATS:
        bound = largest(dtype)
        return values.clamp(-bound, bound).to(dtype)
    info = torch.iinfo(dtype)
    return values.round().clamp(info.min, info.max).to(dtype)


def by_scale(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide by scales; a scale of zero belongs to zeros, which stay zero."""
    return values / torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_rows(
    values: torch.Tensor, dtype: torch.dtype = torch.int8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (..., K) with one scale a row: (values of ``dtype``, fp32 scales (..., 1))."""
    values = values.float()
    scale = values.abs().amax(-1, keepdim=True) / largest(dtype)
    return saturate(by_scale(values, scale), dtype), scale


def exact_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply 8-bit matrices with an accumulator that loses nothing; returns float64."""
    return a.float().double() @ b.float().double()


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Return e8m0 scales, or their bytes, as fp32 numbers."""
    codes = scale.view(torch.uint8).to(torch.int32)
    power = torch.ldexp(torch.ones(codes.shape), codes - _BIAS)
    return torch.where(codes == _NOT_A_NUMBER, torch.full_like(power, torch.nan), power)


def mx_rows(
    values: torch.Tensor, dtype: torch.dtype, block: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (..., K) in blocks that share a power of two.

    Returns:
        Values of ``dtype``, (..., K), and the e8m0 bytes as uint8, (..., ceil(K / block)). The
        exponent is floor(log2(largest of the block)) less that of the dtype's largest number,
        within -127..127; a block of zeros has the smallest.
    """
    length = values.shape[-1]
    blocks = -(-length // block)
    padded = torch.nn.functional.pad(values.float(), (0, blocks * block - length))
    grouped = padded.reshape(*values.shape[:-1], blocks, block)
    peak = grouped.abs().amax(-1, keepdim=True)
    # frexp gives [0.5, 1) times 2**e, so floor(log2(v)) is e - 1.
    exponent = torch.frexp(peak).exponent.to(torch.int32) - 1 - EIGHT_BIT_FLOATS[dtype]
    exponent = torch.where(peak == 0, torch.full_like(exponent, -_BIAS), exponent)
    exponent = exponent.clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(grouped.double(), -exponent).float()
    codes = (exponent.squeeze(-1) + _BIAS).to(torch.uint8)
    return saturate(scaled, dtype).flatten(-2)[..., :length], codes


def mx_restore(values: torch.Tensor, scale: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Return (..., K) in fp32 from values and their e8m0 scales (..., at least K / block)."""
    power = powers_of_two(scale).repeat_interleave(block, -1)[..., : values.shape[-1]]
    return values.float() * power
