"""References of the ops around RMSNorm and RoPE.

The fused ops take interleaved components, rotate pairs (2i, 2i + 1) and hand back half layout: all
even components, then all odd. Source: descriptions of aclnnInterleaveRope and
aclnnKvRmsNormRopeCache in the CANN operator library.
"""

from __future__ import annotations

import torch

from npu_backend.runtime.reference.caches import write_rows
from npu_backend.runtime.reference.numerics import rms_scaled, rotate_pairs

__all__ = ["npu_interleave_rope", "npu_kv_rmsnorm_rope_cache", "npu_rms_norm"]

_CACHE_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ")


def npu_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm over the dimensions that ``gamma`` has. fp32 inside, rounded once at the end.

    Args:
        input: ``(..., *gamma.shape)``.
        gamma: Usually ``(width,)``.
        epsilon: Added to the mean square.

    Returns:
        The normed tensor of the input's dtype, and fp32 ``1 / sqrt(mean(x^2) + epsilon)`` with ones
        in the normed dimensions.
    """
    axes = tuple(range(input.dim() - gamma.dim(), input.dim()))
    values = input.float()
    rstd = (values.pow(2).mean(dim=axes, keepdim=True) + epsilon).rsqrt()
    return (values * rstd * gamma.float()).to(input.dtype), rstd


def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of interleaved components and return half layout. fp32 inside, rounded once.

    Args:
        x: ``(batch, heads, length, D)``.
        cos: ``(batch, 1 or heads, length or 1, D)``, each angle twice, in half layout.
        sin: As ``cos``.

    Returns:
        As ``x``, in half layout.

    Raises:
        ValueError: Ranks are not 4, or D differs.
    """
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if tensor.dim() != 4 or tensor.shape[-1] != x.shape[-1]:
            raise ValueError(
                f"npu_interleave_rope: {name} must be 4-D with last dimension {x.shape[-1]}, is "
                f"{tuple(tensor.shape)}"
            )
    return rotate_pairs(x, cos, sin).to(x.dtype)


def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm the latent, rotate the key's RoPE part, and write both into their caches, in place.

    fp32 inside; norm and rotation each round once, to the dtype of ``kv``.

    Args:
        kv: ``(batch, 1, length, latent + rope)``: the latent first, then interleaved RoPE parts.
        gamma: ``(latent,)``.
        cos: ``(batch, 1, length or 1, rope)``, each angle twice, in half layout.
        sin: As ``cos``.
        index: int64. Mode Norm: ``(batch, length)``, position inside the batch's own cache. Paged
            modes: ``(batch * length,)``, slot. -1 writes nothing; others must not repeat.
        k_cache: Mode Norm ``(batch, 1, cache_length, rope)``, paged ``(blocks, block_size, 1,
            rope)``; written, in half layout.
        ckv_cache: The same with ``latent``; written.
        k_rope_scale: Quantized caches are not modelled.
        c_kv_scale: As above.
        k_rope_offset: As above.
        c_kv_offset: As above.
        v: A separate v is not modelled.
        epsilon: Of the norm.
        cache_mode: ``Norm``, ``PA`` or ``PA_BNSD`` (the same), ``PA_NZ``.
        is_output_kv: Ask for the last two results.

    Returns:
        ``k_cache``, ``ckv_cache``, the rotated part ``(batch, 1, length, rope)`` and the normed
        latent ``(batch, 1, length, latent)``. Not asked for, the last two are NaN: the device
        leaves them undefined, and nobody should read them.

    Raises:
        ValueError: Shapes, index values or strides that the op does not take.
        NotImplementedError: Quantized caches, a separate v, or another cache mode.
    """
    op = "npu_kv_rmsnorm_rope_cache"
    absent = {
        "k_rope_scale": k_rope_scale,
        "c_kv_scale": c_kv_scale,
        "k_rope_offset": k_rope_offset,
        "c_kv_offset": c_kv_offset,
        "v": v,
    }
    for name, value in absent.items():
        if value is not None:
            raise NotImplementedError(f"{op}: the reference knows no {name}")
    if cache_mode not in _CACHE_MODES:
        known = ", ".join(_CACHE_MODES)
        raise NotImplementedError(f"{op}: the reference knows {known}, not {cache_mode}")
    latent, rope = gamma.shape[0], cos.shape[-1]
    if kv.dim() != 4 or kv.shape[1] != 1 or kv.shape[-1] != latent + rope:
        raise ValueError(
            f"{op}: kv must be (batch, 1, length, {latent + rope}), is {tuple(kv.shape)}"
        )
    if index.dtype != torch.int64:
        raise ValueError(f"{op}: index must be int64, is {index.dtype}")
    normed = rms_scaled(kv[..., :latent], gamma, epsilon).to(kv.dtype)
    turned = rotate_pairs(kv[..., latent:], cos, sin).to(kv.dtype)
    for cache, rows in ((k_cache, turned), (ckv_cache, normed)):
        if cache_mode == "Norm":
            _write_norm(op, cache, rows, index)
        else:
            flat = rows.reshape(-1, rows.shape[-1])
            write_rows(
                op, cache, flat, index, nz=cache_mode == "PA_NZ", skip_negative=True, unique=True
            )
    if not is_output_kv:
        turned, normed = torch.full_like(turned, torch.nan), torch.full_like(normed, torch.nan)
    return k_cache, ckv_cache, turned, normed


def _write_norm(op: str, cache: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
    """Write ``(batch, 1, length, width)`` into ``(batch, 1, cache_length, width)`` by position."""
    batch, _, length, width = cache.shape
    starts = torch.arange(batch).unsqueeze(-1) * length
    if index.shape != rows.shape[:1] + rows.shape[2:3] or (index >= length).any():
        raise ValueError(f"{op}: index {index.tolist()} does not fit {length} positions")
    slots = torch.where(index < 0, index, index + starts)
    write_rows(
        op,
        cache.view(1, batch * length, 1, width),
        rows.reshape(-1, width),
        slots,
        skip_negative=True,
        unique=True,
    )
