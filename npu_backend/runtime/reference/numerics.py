"""Arithmetic that the reference ops share among themselves, and with nobody else.

Everything is computed in fp32 from whatever dtype comes in; the callers round where their op does.
"""

from __future__ import annotations

import torch

__all__ = [
    "E4M3_MAX",
    "E8M0",
    "MX_BLOCK",
    "as_scale",
    "eight_bit",
    "int8_product",
    "mx_product",
    "mx_quantized",
    "mx_scales",
    "product",
    "rms_scaled",
    "rotate_halves",
    "rotate_pairs",
    "row_quantized",
    "saturated",
]

_PIECE = 1 << 20
"""Elements of a 16-bit matrix that are widened to fp32 at a time."""
E4M3_MAX = 448.0
"""Largest value of float8_e4m3fn, 1.75 * 2**8."""
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
"""Dtype of MX scales; torch has it since 2.7, before that its bytes stand for it."""
MX_BLOCK = 32
"""Values along K that share one e8m0 scale in MXFP8."""
_E4M3_EXPONENT = 8
"""Exponent of the largest value of float8_e4m3fn."""
_E8M0_BIAS = 127
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


def eight_bit(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to int8 or float8_e4m3fn, half to even, and clip to what it holds."""
    if dtype == torch.int8:
        return saturated(values, dtype)
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(dtype)


def row_quantized(
    values: torch.Tensor, dtype: torch.dtype = torch.int8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``(..., K)`` to int8 or float8_e4m3fn by the largest magnitude of each row.

    Returns:
        The values, and fp32 scales ``(..., 1)``: ``max(abs(row)) / 127``, of e4m3 ``/ 448``. A row
        of zeros has scale 0 and stays 0.
    """
    rows = values.float()
    scale = rows.abs().amax(dim=-1, keepdim=True) / (127.0 if dtype == torch.int8 else E4M3_MAX)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return eight_bit(rows / divisor, dtype), scale


def mx_quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``(..., K)`` to MXFP8, blocks of 32 along K; K is a multiple of 32.

    The shared exponent of a block is ``floor(log2(max(abs(block)))) - 8``.

    Returns:
        float8_e4m3fn ``(..., K)``, and float8_e8m0fnu ``(..., K / 32)``.
    """
    blocks = values.float().reshape(*values.shape[:-1], -1, MX_BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    # frexp gives a fraction in [1/2, 1): one more than the exponent that is meant.
    exponent = torch.frexp(largest).exponent - 1 - _E4M3_EXPONENT
    exponent = torch.where(largest > 0, exponent, -_E8M0_BIAS).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    scaled = blocks * torch.exp2(-exponent.float())
    coded = (exponent.squeeze(-1) + _E8M0_BIAS).to(torch.uint8)
    return eight_bit(scaled.flatten(-2), torch.float8_e4m3fn), coded.view(E8M0)


def mx_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return e8m0 scales as fp32 powers of two."""
    exponent = scales.contiguous().view(torch.uint8).to(torch.int32) - _E8M0_BIAS
    return torch.exp2(exponent.float())


def mx_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> torch.Tensor:
    """Multiply MXFP8 matrices: scaled values are exact in fp32, sums are fp32.

    Args:
        a: ``(M, K)``.
        a_scales: ``(M, K / 32)`` e8m0.
        b: ``(K, N)``.
        b_scales: ``(N, K / 32)`` e8m0.
    """
    wide = a.float() * mx_scales(a_scales).repeat_interleave(MX_BLOCK, -1)
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    step = max(MX_BLOCK, _PIECE // b.shape[1] // MX_BLOCK * MX_BLOCK)
    for start in range(0, b.shape[0], step):
        part, blocks = slice(start, start + step), slice(start // MX_BLOCK, None)
        scale = mx_scales(b_scales[:, blocks][:, : step // MX_BLOCK]).t()
        rows = b[part].float()
        out += wide[:, part] @ (rows * scale.repeat_interleave(MX_BLOCK, 0)[: len(rows)])
    return out
