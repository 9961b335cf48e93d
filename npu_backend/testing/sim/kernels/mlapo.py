"""Reference kernel of sgl-kernel-npu's ``mla_preprocess``.

Simulated: static per-tensor quantization (``per_tensor_quant_asymm``) with the cache modes
``krope_ctkv`` and ``nzcache``. Source of the formulas: the op's own description in that library.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from npu_backend.testing.sim import validators
from npu_backend.testing.sim.kernels.base import (
    decode_scale,
    half_rope,
    host,
    int8_matmul,
    rms_norm,
    spec,
    unsupported_unless,
    where,
)
from npu_backend.testing.sim.kernels.caches import write_slots

__all__ = ["DEFINED", "FAKES", "KERNELS", "Results", "Stage", "compute", "store"]

_OP = "mla_preprocess"
# Fixed inside the op; it takes no epsilon.
_EPSILON = 1e-6


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """Return an int8 weight as (K, N): from (1, K/32, N, 32), or from (N, K)."""
    if weight.dim() == 4:
        return weight[0].permute(0, 2, 1).reshape(-1, weight.shape[2])
    return weight.t()


@frozen
class Stage:
    """One statically quantized projection: device tensors as the op takes them."""

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    bias: torch.Tensor
    descale: torch.Tensor

    def __call__(self, op: str, x: torch.Tensor) -> torch.Tensor:
        """Return (tokens, N) of x's dtype: quantized, multiplied, shifted by the bias, scaled."""
        values = x.float() / host(self.scale, op).float() + host(self.offset, op).float()
        values = values.round().clamp(-128, 127).to(torch.int8)
        product = int8_matmul(values, _rows(host(self.weight, op))) + host(self.bias, op)
        return (product * decode_scale(host(self.descale, op))).to(x.dtype)


@frozen
class Results:
    """CPU tensors: queries (tokens, heads, ...), rows for both caches, the normed query latent."""

    query: torch.Tensor
    query_rope: torch.Tensor
    kv_rows: torch.Tensor
    kr_rows: torch.Tensor
    query_norm: torch.Tensor


def compute(
    op: str,
    hidden_state: torch.Tensor,
    stages: tuple[Stage, Stage],
    gamma1: torch.Tensor,
    beta1: torch.Tensor,
    gamma2: torch.Tensor,
    wuk: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    rope_dim: int,
) -> Results:
    """Compute the op; ``rope`` is (cos, sin), or None for components that are not rotated.

    The columns of the first product are in the order kv (512), k_rope (64), q (1536). RoPE
    components come in half layout, because callers permute the weights.
    """
    x, dtype = host(hidden_state, op), hidden_state.dtype
    heads, nope, kv_lora = wuk.shape
    q_lora = gamma1.shape[0]

    def turned(components: torch.Tensor) -> torch.Tensor:
        if rope is None:
            return components.to(dtype)
        cos, sin = (host(r, op).view(-1, *[1] * (components.dim() - 2), rope_dim) for r in rope)
        return half_rope(components, cos, sin).to(dtype)

    latent, k_rope, q_low = torch.split(stages[0](op, x), [kv_lora, rope_dim, q_lora], -1)
    # Hosts without a bias pass a longer tensor of zeros; the op reads as much as gamma1 has.
    shift = host(beta1, op).float()[:q_lora]
    normed = (rms_norm(q_low, host(gamma1, op), _EPSILON) + shift).to(dtype)
    q = stages[1](op, normed).view(x.shape[0], heads, nope + rope_dim)
    absorbed = torch.einsum("thn,hnl->thl", q[..., :nope].float(), host(wuk, op).float())
    return Results(
        absorbed.to(dtype),
        turned(q[..., nope:]),
        rms_norm(latent, host(gamma2, op), _EPSILON).to(dtype),
        turned(k_rope),
        normed,
    )


def store(op: str, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, nz: bool) -> None:
    """Write rows into a paged cache, (blocks, block size, 1, width) or its NZ shape.

    In NZ a cache may also have the shape of its bytes, (blocks, width / 16, block size, 16).
    """
    memory = host(cache, op)
    if nz and memory.shape[2] != 1:
        memory = memory.view(memory.shape[0], memory.shape[2], 1, -1)
    write_slots(op, memory, rows, slots, nz=nz)


def mla_preprocess(
    hidden_state: torch.Tensor,
    gamma0: torch.Tensor,
    beta0: torch.Tensor,
    wdqkv: torch.Tensor,
    descale0: torch.Tensor,
    gamma1: torch.Tensor,
    beta1: torch.Tensor,
    wuq: torch.Tensor,
    descale1: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    wuk: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_rope: torch.Tensor,
    slotmapping: torch.Tensor,
    quant_scale0: torch.Tensor,
    quant_offset0: torch.Tensor,
    bias0: torch.Tensor,
    quant_scale1: torch.Tensor,
    quant_offset1: torch.Tensor,
    bias1: torch.Tensor,
    *,
    ctkv_scale: torch.Tensor | None = None,
    q_nope_scale: torch.Tensor | None = None,
    cache_mode: str | None = None,
    quant_mode: str | None = None,
    q_out0: torch.Tensor,
    kv_cache_out0: torch.Tensor,
    q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write q_out0 (tokens, heads, 512), q_out1 (tokens, heads, 64) and both caches.

    gamma0 and beta0 are not used: the input is normed already.
    """
    validators.mla_preprocess(
        *(spec(t) for t in (hidden_state, wdqkv, descale0, gamma1, wuq, descale1, gamma2)),
        *(spec(t) for t in (cos, sin, wuk, kv_cache, kv_cache_rope, slotmapping)),
        cache_mode=cache_mode,
        quant_mode=quant_mode,
        **where(),
    )
    quant, cache = quant_mode or "per_token_quant_symm", cache_mode or "krope_ctkv"
    unsupported_unless(quant == "per_tensor_quant_asymm", _OP, f"quant_mode {quant}")
    unsupported_unless(cache in ("krope_ctkv", "nzcache"), _OP, f"cache_mode {cache}")

    out = compute(
        _OP,
        hidden_state,
        (
            Stage(wdqkv, quant_scale0, quant_offset0, bias0, descale0),
            Stage(wuq, quant_scale1, quant_offset1, bias1, descale1),
        ),
        gamma1,
        beta1,
        gamma2,
        wuk,
        (cos, sin),
        cos.shape[-1],
    )
    host(q_out0, _OP).copy_(out.query)
    host(q_out1, _OP).copy_(out.query_rope)
    slots, nz = host(slotmapping, _OP).long(), cache == "nzcache"
    store(_OP, kv_cache_out0, out.kv_rows, slots, nz)
    store(_OP, kv_cache_out1, out.kr_rows, slots, nz)
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1


def _fake(
    *args: Any,
    q_out0: torch.Tensor,
    kv_cache_out0: torch.Tensor,
    q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1


KERNELS = {_OP: mla_preprocess}
DEFINED = {
    _OP: (
        "mla_preprocess(Tensor hiddenState, Tensor gamma0, Tensor beta0, Tensor wdqkv, "
        "Tensor descale0, Tensor gamma1, Tensor beta1, Tensor wuq, Tensor descale1, Tensor gamma2, "
        "Tensor cos, Tensor sin, Tensor wuk, Tensor kv_cache, Tensor kv_cache_rope, "
        "Tensor slotmapping, Tensor quant_scale0, Tensor quant_offset0, Tensor bias0, "
        "Tensor quant_scale1, Tensor quant_offset1, Tensor bias1, *, Tensor? ctkv_scale=None, "
        "Tensor? q_nope_scale=None, str? cache_mode=None, str? quant_mode=None, "
        "Tensor(a!) q_out0, Tensor(b!) kv_cache_out0, Tensor(c!) q_out1, Tensor(d!) kv_cache_out1) "
        "-> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!))"
    ),
}
FAKES = {_OP: _fake}
