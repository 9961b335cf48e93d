"""Reference kernel of sgl-kernel-npu's ``mla_preprocess``.

Simulated: static per-tensor quantization (``per_tensor_quant_asymm``) with the cache modes
``krope_ctkv`` and ``nzcache``. Source of the formulas: the op's own description in that library.
"""

from __future__ import annotations

from typing import Any

import torch

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

__all__ = ["DEFINED", "FAKES", "KERNELS"]

_OP = "mla_preprocess"
# Fixed inside the op; it takes no epsilon.
_EPSILON = 1e-6


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """Return an int8 weight as (K, N): from (1, K/32, N, 32), or from (N, K)."""
    if weight.dim() == 4:
        return weight[0].permute(0, 2, 1).reshape(-1, weight.shape[2])
    return weight.t()


def _quantize(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    values = x.float() / scale.float() + offset.float()
    return values.round().clamp(-128, 127).to(torch.int8)


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

    The columns of the first product are in the order kv (512), k_rope (64), q (1536). RoPE
    components come in half layout, because callers permute the weights. gamma0 and beta0 are not
    used: the input is normed already.
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

    def at_host(tensor: torch.Tensor) -> torch.Tensor:
        return host(tensor, _OP)

    x, dtype = at_host(hidden_state), hidden_state.dtype
    heads, nope, kv_lora = wuk.shape
    rope = cos.shape[-1]
    turn, lift = at_host(sin), at_host(cos)
    first = _quantize(x, at_host(quant_scale0), at_host(quant_offset0))
    first = int8_matmul(first, _rows(at_host(wdqkv))) + at_host(bias0)
    first = (first * decode_scale(at_host(descale0))).to(dtype)
    latent, k_rope, q_low = torch.split(first, [kv_lora, rope, gamma1.shape[0]], -1)
    # Hosts without a bias pass a longer tensor of zeros; the op reads as much as gamma1 has.
    shift = at_host(beta1).float()[: gamma1.shape[0]]
    normed = rms_norm(q_low, at_host(gamma1), _EPSILON) + shift
    second = _quantize(normed.to(dtype), at_host(quant_scale1), at_host(quant_offset1))
    second = int8_matmul(second, _rows(at_host(wuq))) + at_host(bias1)
    q = (second * decode_scale(at_host(descale1))).to(dtype).view(x.shape[0], heads, nope + rope)
    absorbed = torch.einsum("thn,hnl->thl", q[..., :nope].float(), at_host(wuk).float())
    at_host(q_out0).copy_(absorbed.to(dtype))
    at_host(q_out1).copy_(half_rope(q[..., nope:], lift[:, None], turn[:, None]).to(dtype))
    slots = at_host(slotmapping).long()
    kv_rows = rms_norm(latent, at_host(gamma2), _EPSILON).to(dtype)
    for target, rows in (
        (kv_cache_out0, kv_rows),
        (kv_cache_out1, half_rope(k_rope, lift, turn).to(dtype)),
    ):
        memory, nz = at_host(target), cache == "nzcache"
        if nz:
            # (blocks, width / 16, block size, 16): the same bytes as a paged cache in NZ.
            memory = memory.view(memory.shape[0], memory.shape[2], 1, -1)
        write_slots(_OP, memory, rows, slots, nz=nz)
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
