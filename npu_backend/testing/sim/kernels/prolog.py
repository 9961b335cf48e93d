"""Reference kernels of the ``npu_mla_prolog`` family.

Simulated: weight modes 0 to 4 (16-bit, int8 q_b, int8 throughout, MXFP8, fp8) with every KV cache
that goes with them; not hif8, which torch has no dtype for.
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
    interleaved_rope,
    optional_spec,
    place,
    powers_of_two,
    rms_norm,
    spec,
    to_device,
    unsupported_unless,
    where,
)
from npu_backend.testing.sim.kernels.caches import write_slots, write_whole
from npu_backend.testing.sim.kernels.quant import (
    quantize_blocks,
    quantize_rows,
    to_eight_bits,
)

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
    latent: torch.Tensor
    key: torch.Tensor
    query_norm: torch.Tensor
    query_norm_scale: torch.Tensor | None


def _times(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply (T, K) by (K, N) of any dtype, each value times its own scale; fp32.

    Args:
        x: Values.
        weight: Values.
        x_scale: (T, blocks of K), or None.
        w_scale: (N, blocks of K), or None.
    """
    left, right = x.float(), weight.float()
    if w_scale is None:
        return left @ right
    assert x_scale is not None
    if w_scale.shape[1] == 1:
        return (left @ right) * decode_scale(x_scale) * decode_scale(w_scale).reshape(1, -1)
    size = x.shape[1] // w_scale.shape[1]
    left = left * powers_of_two(x_scale).float().repeat_interleave(size, 1)
    return left @ (right * powers_of_two(w_scale).float().t().repeat_interleave(size, 0))


def _requantize(mode: int, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the compressed query as the second product takes it."""
    if mode == 3:
        values, codes = quantize_blocks(normed, 32, torch.float8_e4m3fn)
        return values, codes.view(torch.float8_e8m0fnu)
    return quantize_rows(normed, torch.int8 if mode in (1, 2) else torch.float8_e4m3fn)


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
    """Compute all outputs as (tokens, ...) CPU tensors, the caches' rows in bf16.

    Source of the formulas: the documentation of the op in op-plugin and ops-transformer. A matrix
    product rounds to bf16; a quantized one multiplies its scales in first. RMS norm and RoPE are
    computed in fp32.
    """
    dq, uq_qr, uk, dkv_kr = (host(w, op) for w in weights)
    gamma_cq, gamma_ckv = (host(g, op) for g in gammas)
    sin, cos = (host(r, op).reshape(-1, r.shape[-1]) for r in rope)
    given = {name: host(s, op) for name, s in scales.items() if s is not None}
    x = host(token_x, op).reshape(-1, token_x.shape[-1])
    heads, nope, kv_lora = uk.shape

    def of_weight(name: str, columns: int) -> torch.Tensor | None:
        # One scale a channel is given as (1, N), MX scales as (N, K / 32).
        scale = given.get(f"dequant_scale_{name}")
        return None if scale is None else scale.reshape(columns, -1)

    x_scale = given.get("dequant_scale_x")
    if x_scale is not None:
        x_scale = x_scale.reshape(x.shape[0], -1)
    low = _times(x, dq, x_scale, of_weight("w_dq", dq.shape[1])).to(_BF16)
    kv = _times(x, dkv_kr, x_scale, of_weight("w_dkv_kr", dkv_kr.shape[1])).to(_BF16)
    normed = rms_norm(low, gamma_cq, epsilons[0], scale=factors[0])
    query_norm, norm_scale = normed.to(_BF16), None
    if mode != 0:
        if (smooth := given.get("smooth_scales_cq")) is not None:
            normed = normed * smooth.float().reshape(1, -1)
        query_norm, norm_scale = _requantize(mode, normed)
    q = _times(query_norm, uq_qr, norm_scale, of_weight("w_uq_qr", uq_qr.shape[1])).to(_BF16)
    q = q.view(x.shape[0], heads, -1)
    query = torch.einsum("thn,hnl->thl", q[..., :nope].float(), uk.float()).to(_BF16)
    query_rope = interleaved_rope(q[..., nope:], cos[:, None], sin[:, None]).to(_BF16)
    latent = rms_norm(kv[:, :kv_lora], gamma_ckv, epsilons[1], scale=factors[1]).to(_BF16)
    key = interleaved_rope(kv[:, kv_lora:], cos, sin).to(_BF16)
    return _Outputs(query, query_rope, latent, key, query_norm, norm_scale)


def _cache_rows(
    op: str,
    kv_mode: int,
    tile: int,
    out: _Outputs,
    dtype: torch.dtype,
    scales: dict[str, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows that go into kv_cache and kr_cache; None where they are packed into one."""
    if kv_mode == 0:
        return out.latent, out.key
    if kv_mode == 3:
        tokens = out.latent.shape[0]
        values, tile_scales = quantize_rows(out.latent.view(tokens, -1, tile), dtype)
        row = torch.empty(tokens, values[0].numel() + 2 * out.key.shape[1] + 4 * values.shape[1],
                          dtype=torch.uint8)  # fmt: skip
        at = 0
        for part in (values.reshape(tokens, -1), out.key, tile_scales.reshape(tokens, -1)):
            raw = part.contiguous().view(torch.uint8)
            row[:, at : at + raw.shape[1]] = raw
            at += raw.shape[1]
        return row.view(dtype), None
    found = []
    for rows, name in ((out.latent, "quant_scale_ckv"), (out.key, "quant_scale_ckr")):
        scale = scales.get(name)
        factor = None if scale is None else host(scale, op).reshape(-1)
        found.append(rows if factor is None else to_eight_bits(rows.float() * factor, dtype))
    return found[0], found[1]


def _store(
    op: str,
    mode: str,
    rows: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    index: torch.Tensor | None,
) -> None:
    for cache, row in zip((kv_cache, kr_cache), rows, strict=True):
        if row is None:
            continue
        target = host(cache, op)
        if target.element_size() == 1:
            # Few ops of the host take every 8-bit dtype; bytes are bytes.
            target, row = target.view(torch.uint8), row.view(torch.uint8)
        if mode in ("BSND", "TND"):
            write_whole(target, row)
        else:
            assert index is not None
            slots = host(index, op).reshape(-1)
            write_slots(op, target, row, slots, nz=mode == "PA_NZ")


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
        ckvkr_repo_mode=ckvkr_repo_mode,
        quant_scale_repo_mode=quant_scale_repo_mode,
        tile_size=tile_size,
        scales={name: optional_spec(s) for name, s in scales.items()},
        op=op,
        **where(),
    )
    unsupported_unless(weight_quant_mode != 5, op, f"weight_quant_mode {weight_quant_mode} (hif8)")
    unsupported_unless(k_nope_clip_alpha is None, op, "k_nope_clip_alpha")
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
    rows = _cache_rows(op, kv_cache_quant_mode, tile_size, out, kv_cache.dtype, scales)
    _store(op, cache_mode, rows, kv_cache, kr_cache, cache_index)
    query, query_scale = out.query, None
    if query_quant_mode:
        query, query_scale = quantize_rows(out.query, kv_cache.dtype)
    # Outputs that are not asked for hold no element from CANN 8.5, and one before.
    nothing = 0 if cann_key(place().cann) >= (8, 5) else 1
    empty = torch.zeros(nothing, dtype=torch.float32)
    norm = (
        torch.zeros(nothing, dtype=torch.uint8).view(out.query_norm.dtype)
        if (out.query_norm.element_size() == 1)
        else torch.zeros(nothing, dtype=out.query_norm.dtype)
    )
    norm_scale = empty
    if query_norm_flag:
        norm = out.query_norm.reshape(*token_x.shape[:-1], -1)
        norm_scale = empty if out.query_norm_scale is None else out.query_norm_scale
    return (
        _shaped(query, token_x),
        _shaped(out.query_rope, token_x),
        to_device(empty if query_scale is None else query_scale, token_x),
        to_device(norm, token_x),
        to_device(norm_scale, token_x),
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
    _store(op, cache_mode, (out.latent, out.key), kv_cache, kr_cache, cache_index)
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
