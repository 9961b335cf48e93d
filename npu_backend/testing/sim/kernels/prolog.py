"""Reference kernels of the ``npu_mla_prolog`` family.

Simulated: weight modes 0, 1 and 2 (16-bit, int8 q_b, int8 throughout) with a 16-bit KV cache.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from npu_backend.catalog.versions import cann_key
from npu_backend.testing.sim import validators
from npu_backend.testing.sim.kernels.base import (
    decode_scale,
    host,
    int8_matmul,
    interleaved_rope,
    optional_spec,
    place,
    rms_norm,
    spec,
    to_device,
    unsupported_unless,
    where,
)
from npu_backend.testing.sim.kernels.caches import write_slots, write_whole
from npu_backend.testing.sim.kernels.quant import quantize_rows

__all__ = ["KERNELS"]

_BF16 = torch.bfloat16
_SCALES = (
    "dequant_scale_x",
    "dequant_scale_w_dq",
    "dequant_scale_w_uq_qr",
    "dequant_scale_w_dkv_kr",
    "quant_scale_ckv",
    "quant_scale_ckr",
    "smooth_scales_cq",
)


@frozen
class _Outputs:
    query: torch.Tensor
    query_rope: torch.Tensor
    kv_rows: torch.Tensor
    kr_rows: torch.Tensor
    query_norm: torch.Tensor
    query_norm_scale: torch.Tensor | None


def _compute(
    op: str,
    mode: int,
    token_x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    gammas: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    scales: dict[str, torch.Tensor | None],
    epsilons: tuple[float, float],
    factors: tuple[float, float] = (1.0, 1.0),
) -> _Outputs:
    """Compute all outputs as (tokens, ...) CPU tensors.

    Source of the formulas: the op-plugin documentation of the op. A matrix product rounds to bf16;
    a quantized one multiplies its scales in first. RMS norm and RoPE are computed in fp32.
    """
    dq, uq_qr, uk, dkv_kr = (host(w, op) for w in weights)
    gamma_cq, gamma_ckv = (host(g, op) for g in gammas)
    sin, cos = (host(r, op).reshape(-1, r.shape[-1]) for r in rope)
    given = {name: decode_scale(host(s, op)) for name, s in scales.items() if s is not None}
    x = host(token_x, op).reshape(-1, token_x.shape[-1])
    heads, nope, kv_lora = uk.shape

    def down(weight: torch.Tensor, name: str) -> torch.Tensor:
        if mode != 2:
            return (x.float() @ weight.float()).to(_BF16)
        per_token = given["dequant_scale_x"].reshape(-1, 1)
        per_channel = given[f"dequant_scale_{name}"].reshape(1, -1)
        return (int8_matmul(x, weight) * per_token * per_channel).to(_BF16)

    normed = rms_norm(down(dq, "w_dq"), gamma_cq, epsilons[0], scale=factors[0])
    norm_scale: torch.Tensor | None = None
    if mode == 0:
        query_norm = normed.to(_BF16)
        q = (query_norm.float() @ uq_qr.float()).to(_BF16)
    else:
        smooth = given.get("smooth_scales_cq")
        if smooth is not None:
            normed = normed * smooth.reshape(1, -1)
        query_norm, norm_scale = quantize_rows(normed)
        per_channel = given["dequant_scale_w_uq_qr"].reshape(1, -1)
        q = (int8_matmul(query_norm, uq_qr) * norm_scale * per_channel).to(_BF16)
    q = q.view(x.shape[0], heads, -1)
    query = torch.einsum("thn,hnl->thl", q[..., :nope].float(), uk.float()).to(_BF16)
    query_rope = interleaved_rope(q[..., nope:], cos[:, None], sin[:, None]).to(_BF16)
    kv = down(dkv_kr, "w_dkv_kr")
    kv_rows = rms_norm(kv[:, :kv_lora], gamma_ckv, epsilons[1], scale=factors[1]).to(_BF16)
    kr_rows = interleaved_rope(kv[:, kv_lora:], cos, sin).to(_BF16)
    return _Outputs(query, query_rope, kv_rows, kr_rows, query_norm, norm_scale)


def _store(
    op: str,
    mode: str,
    out: _Outputs,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    index: torch.Tensor | None,
) -> None:
    for cache, rows in ((kv_cache, out.kv_rows), (kr_cache, out.kr_rows)):
        if mode in ("BSND", "TND"):
            write_whole(host(cache, op), rows)
        else:
            assert index is not None
            slots = host(index, op).reshape(-1)
            write_slots(op, host(cache, op), rows, slots, nz=mode == "PA_NZ")


def _shaped(rows: torch.Tensor, token_x: torch.Tensor) -> torch.Tensor:
    result = rows.reshape(*token_x.shape[:-1], *rows.shape[1:])
    return to_device(result, token_x)


def npu_mla_prolog_v3(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """See ``_v3``; the schema's own name."""
    return _v3("npu_mla_prolog_v3", *args, **kwargs)


def _v3(
    op: str,
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    cache_index: torch.Tensor | None = None,
    actual_seq_len: torch.Tensor | None = None,
    k_nope_clip_alpha: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    token_x_dtype: int | None = None,
    weight_dq_dtype: int | None = None,
    weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None,
    **scales: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """(query, query_rope, dequant_scale_q_nope, query_norm, dequant_scale_q_norm)."""
    weights = (weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr)
    gammas, rope = (rmsnorm_gamma_cq, rmsnorm_gamma_ckv), (rope_sin, rope_cos)
    validators.npu_mla_prolog_v3(
        *(spec(t) for t in (token_x, *weights, *gammas, *rope, kv_cache, kr_cache)),
        cache_index=optional_spec(cache_index),
        cache_mode=cache_mode,
        weight_quant_mode=weight_quant_mode,
        kv_cache_quant_mode=kv_cache_quant_mode,
        query_quant_mode=query_quant_mode,
        scales={name: optional_spec(s) for name, s in scales.items()},
        op=op,
        **where(),
    )
    unsupported_unless(weight_quant_mode in (0, 1, 2), op, f"weight_quant_mode {weight_quant_mode}")
    unsupported_unless(kv_cache_quant_mode == 0, op, f"kv_cache_quant_mode {kv_cache_quant_mode}")
    unsupported_unless(
        (ckvkr_repo_mode, quant_scale_repo_mode) == (0, 0), op, "a combined KV cache"
    )
    unsupported_unless(not cache_mode.startswith("PA_BLK"), op, f"cache_mode {cache_mode}")
    out = _compute(
        op,
        weight_quant_mode,
        token_x,
        weights,
        gammas,
        rope,
        scales,
        (rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
        (qc_qr_scale, kc_scale),
    )
    _store(op, cache_mode, out, kv_cache, kr_cache, cache_index)
    # Outputs that are not asked for hold no element from CANN 8.5, and one before.
    nothing = 0 if cann_key(place().cann) >= (8, 5) else 1
    empty = torch.zeros(nothing, dtype=torch.float32)
    norm = torch.zeros(nothing, dtype=weight_uq_qr.dtype)
    norm_scale = empty
    if query_norm_flag:
        norm = out.query_norm.reshape(*token_x.shape[:-1], -1)
        norm_scale = empty if out.query_norm_scale is None else out.query_norm_scale
    return (
        _shaped(out.query, token_x),
        _shaped(out.query_rope, token_x),
        to_device(empty, token_x),
        to_device(norm, token_x),
        to_device(norm_scale.float(), token_x),
    )


def npu_mla_prolog_v3_functional(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """As v3 on copies of the caches, which follow its five results."""
    op = "npu_mla_prolog_v3_functional"
    caches = [to_device(host(cache, op), cache) for cache in args[9:11]]
    return (*_v3(op, *args[:9], *caches, **kwargs), *caches)


def _older(
    op: str,
    validate: Any,
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    cache_index: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    **scales: torch.Tensor | None,
) -> _Outputs:
    weights = (weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr)
    validate(*(spec(t) for t in (token_x, *weights, cache_index)), **where())
    unsupported_unless(cache_mode in ("PA_BSND", "PA_NZ"), op, f"cache_mode {cache_mode}")
    unsupported_unless(kv_cache.dtype == _BF16, op, f"a KV cache of {kv_cache.dtype}")
    # These versions have no mode argument: the dtypes of the weights say it.
    mode = 2 if token_x.dtype == torch.int8 else int(weight_uq_qr.dtype == torch.int8)
    out = _compute(
        op,
        mode,
        token_x,
        weights,
        (rmsnorm_gamma_cq, rmsnorm_gamma_ckv),
        (rope_sin, rope_cos),
        scales,
        (rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
    )
    _store(op, cache_mode, out, kv_cache, kr_cache, cache_index)
    return out


def npu_mla_prolog(token_x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """(query, query_rope, kv_cache, kr_cache); the caches are written in place."""
    out = _older("npu_mla_prolog", validators.npu_mla_prolog, token_x, *args, **kwargs)
    query, query_rope = _shaped(out.query, token_x), _shaped(out.query_rope, token_x)
    return query, query_rope, args[9], args[10]


def npu_mla_prolog_v2(token_x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """As the first version, with dequant_scale_q_nope as fifth result."""
    out = _older("npu_mla_prolog_v2", validators.npu_mla_prolog_v2, token_x, *args, **kwargs)
    query, query_rope = _shaped(out.query, token_x), _shaped(out.query_rope, token_x)
    scale = to_device(torch.ones(1, dtype=torch.float32), token_x)
    return query, query_rope, args[9], args[10], scale


KERNELS = {
    "npu_mla_prolog": npu_mla_prolog,
    "npu_mla_prolog_v2": npu_mla_prolog_v2,
    "npu_mla_prolog_v3": npu_mla_prolog_v3,
    "npu_mla_prolog_v3_functional": npu_mla_prolog_v3_functional,
}
