"""Reference kernels of the RoPE and RMSNorm ops."""

from __future__ import annotations

from typing import Any

import torch

from npu_backend.testing.sim import validators
from npu_backend.testing.sim.kernels.base import (
    host,
    interleaved_rope,
    rms_norm,
    spec,
    to_device,
    unsupported_unless,
    where,
)
from npu_backend.testing.sim.kernels.caches import write_blocks, write_slots

__all__ = ["KERNELS"]


def npu_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, rstd): rstd is fp32 with ones in the normed dimensions."""
    op = "npu_rms_norm"
    validators.npu_rms_norm(spec(x), spec(gamma), **where())
    values, weight = host(x, op).float(), host(gamma, op).float()
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(values.square().mean(dims, keepdim=True) + epsilon)
    return to_device((values * rstd * weight).to(x.dtype), x), to_device(rstd, x)


def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(B, N, S, 64) rotated, in half layout."""
    op = "npu_interleave_rope"
    validators.npu_interleave_rope(spec(x), spec(cos), spec(sin), **where())
    return to_device(interleaved_rope(host(x, op), host(cos, op), host(sin, op)).to(x.dtype), x)


def _norm_rope(
    op: str,
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    v: torch.Tensor | None = None,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
    is_output_kv: bool = False,
    **scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write both caches; return the rotated (B, 1, S, 64) and the normed (B, 1, S, 512)."""
    quantized = any(s is not None for s in scales.values())
    validators.npu_kv_rmsnorm_rope_cache(
        *(spec(t) for t in (kv, gamma, cos, sin, index, k_cache, ckv_cache)),
        cache_mode=cache_mode,
        quantized=quantized,
        op=op,
        **where(),
    )
    unsupported_unless(not quantized, op, "a quantized cache")
    unsupported_unless(v is None, op, "a separate v")
    unsupported_unless(
        k_cache_dtype is None and ckv_cache_dtype is None, op, "a cache dtype argument"
    )
    values, width = host(kv, op), gamma.shape[0]
    normed = rms_norm(values[..., :width], host(gamma, op), epsilon).to(kv.dtype)
    turned = interleaved_rope(values[..., width:], host(cos, op), host(sin, op)).to(kv.dtype)
    slots, batch = host(index, op), kv.shape[0]
    for cache, rows in ((k_cache, turned), (ckv_cache, normed)):
        target, flat = host(cache, op), rows.reshape(-1, rows.shape[-1])
        if cache_mode == "Norm":
            for row in range(batch):
                target[row, 0, slots[row]] = rows[row, 0]
        elif "BLK" in cache_mode:
            write_blocks(op, target, flat, slots.reshape(-1), batch, nz=cache_mode == "PA_BLK_NZ")
        else:
            write_slots(op, target, flat, slots.reshape(-1), nz=cache_mode == "PA_NZ")
    # torch_npu allocates both results whether asked for or not.
    return to_device(turned, kv), to_device(normed, kv)


def npu_kv_rmsnorm_rope_cache(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """(k_cache, ckv_cache, rotated, normed); the caches are written though the schema is silent."""
    turned, normed = _norm_rope("npu_kv_rmsnorm_rope_cache", *args, **kwargs)
    return args[5], args[6], turned, normed


def npu_kv_rmsnorm_rope_cache_v2(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """(rotated, normed); the caches are marked as written."""
    return _norm_rope("npu_kv_rmsnorm_rope_cache_v2", *args, **kwargs)


def npu_kv_rmsnorm_rope_cache_v2_functional(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """As v2 on copies of the caches, which follow its two results."""
    op = "npu_kv_rmsnorm_rope_cache_v2_functional"
    caches = tuple(to_device(host(cache, op), cache) for cache in args[5:7])
    return (*_norm_rope(op, *args[:5], *caches, **kwargs), *caches)


KERNELS = {
    "npu_rms_norm": npu_rms_norm,
    "npu_interleave_rope": npu_interleave_rope,
    "npu_kv_rmsnorm_rope_cache": npu_kv_rmsnorm_rope_cache,
    "npu_kv_rmsnorm_rope_cache_v2": npu_kv_rmsnorm_rope_cache_v2,
    "npu_kv_rmsnorm_rope_cache_v2_functional": npu_kv_rmsnorm_rope_cache_v2_functional,
}
