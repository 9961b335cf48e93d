"""Arithmetic that the reference ops share among themselves, and with nobody else.

Everything is computed in fp32 from whatever dtype comes in; the callers round where their op does.
"""

from __future__ import annotations

import torch

__all__ = [
    "as_scale",
    "int8_product",
    "product",
    "rms_scaled",
    "rotate_halves",
    "rotate_pairs",
    "row_quantized",
    "saturated",
]

_PIECE = 1 << 20
"""Elements of a 16-bit matrix that are widened to fp32 at a time."""
_EXACT_DEPTH = 1024
"""Longest dot product of int8 values that fp32 holds exactly: 1024 * 128 * 128 is 2**24."""


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply ``(..., M, K)`` by ``(..., K, N)`` with fp32 accumulation; returns fp32.

    A large 16-bit ``b`` is widened piece by piece: the whole of it in fp32 would not fit the
    processor's caches, and costs more than the product.
    """
    if b.dtype == torch.float32 or b.numel() <= _PIECE:
        return torch.matmul(a.float(), b.float())
    out = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float32)
    if b.dim() == 3:
        step = max(1, _PIECE * b.shape[0] // b.numel())
        for start in range(0, b.shape[0], step):
            part = slice(start, start + step)
            torch.matmul(a[part].float(), b[part].float(), out=out[part])
        return out
    wide, step = a.float(), max(1, _PIECE * b.shape[0] // b.numel())
    for start in range(0, b.shape[0], step):
        part = slice(start, start + step)
        out += torch.matmul(wide[..., part], b[part].float())
    return out


def int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply int8 matrices without rounding, as an int32 accumulator does; returns float64."""
    out = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    for start in range(0, a.shape[-1], _EXACT_DEPTH):
        part = slice(start, start + _EXACT_DEPTH)
        out += torch.matmul(a[..., part].float(), b[..., part, :].float())
    return out


def as_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return a dequantization scale as fp32; an int64 one holds fp32 bits in its low 32 bits."""
    if scale.dtype == torch.int64:
        return scale.to(torch.int32).view(torch.float32)
    return scale.float()


def rms_scaled(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``gamma * x / sqrt(mean(x^2) + epsilon)`` over the last dimension, in fp32."""
    values = x.float()
    rms = torch.sqrt(values.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return values / rms * gamma.float()


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate component i with component i + D/2 of ``(..., D)``; fp32, the order stays."""
    values = x.float()
    half = values.shape[-1] // 2
    first, second = values[..., :half], values[..., half:]
    return values * cos.float() + torch.cat([-second, first], dim=-1) * sin.float()


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate component 2i with component 2i + 1 of ``(..., D)``; fp32.

    The result is in half layout: all even components, then all odd. ``cos`` and ``sin`` hold each
    angle twice, in half layout.
    """
    gathered = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    return rotate_halves(gathered, cos, sin)


def saturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round half to even and clip to what an integer dtype holds."""
    info = torch.iinfo(dtype)
    return values.round().clamp(info.min, info.max).to(dtype)


def row_quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``(..., K)`` to int8 by the largest magnitude of each row.

    Returns:
        The int8 values, and fp32 scales ``(..., 1)``: ``max(abs(row)) / 127``. A row of zeros has
        scale 0 and stays 0.
    """
    rows = values.float()
    scale = rows.abs().amax(dim=-1, keepdim=True) / 127.0
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return saturated(rows / divisor, torch.int8), scale
