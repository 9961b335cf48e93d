"""Reference kernels of the ``npu_mla_prolog`` family.

Simulated: weight modes 0 to 4 (16-bit, int8 q_b, int8, MXFP8, fp8), KV cache modes 0 to 3 and query
modes 0 and 1. Mode 5 is hifloat8, which torch has no dtype for.

Source of the formulas: the op-plugin documentation of the op and its own test of it
(test_mla_prolog_v3.py: a quantized query scales its rotated part, too), and the README of
kv_quant_sparse_flash_attention for the order of a packed row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from attrs import frozen

from npu_backend.catalog.versions import cann_key
from npu_backend.testing.sim import validators
from npu_backend.testing.sim.kernels.base import (
    host,
    interleaved_rope,
    optional_spec,
    place,
    rms_norm,
    spec,
    to_device,
    unsupported_unless,
    where,
)
from npu_backend.testing.sim.kernels.caches import page_slots, write_slots, write_whole
from npu_backend.testing.sim.kernels.quantize import (
    by_scale,
    exact_matmul,
    largest,
    mx_restore,
    mx_rows,
    quantize_rows,
    saturate,
)

__all__ = ["KERNELS"]

_BF16 = torch.bfloat16


@frozen
class _Modes:
    """The three quantization modes of a call, and the tile of KV cache mode 3."""

    weight: int
    kv: int = 0
    query: int = 0
    tile: int = 128


@frozen
class _Outputs:
    """Results as (tokens, ...) CPU tensors; ``kr_rows`` is None where the cache rows hold it."""

    query: torch.Tensor
    query_rope: torch.Tensor
    query_scale: torch.Tensor | None
    kv_rows: torch.Tensor
    kr_rows: torch.Tensor | None
    query_norm: torch.Tensor
    query_norm_scale: torch.Tensor | None


def _scaled_product(
    weight_mode: int,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply (T, K) by (K, N) and scale; bf16 weights give a product rounded to bf16.

    A quantized product stays in fp32: one scale a token and one a channel, or in mode 3 one power
    of two for each 32 of K on both sides, (T, K/32) and (N, K/32).
    """
    if weight_scale is None:
        return (x.float() @ weight.float()).to(_BF16).float()
    assert x_scale is not None
    if weight_mode == 3:
        return mx_restore(x, x_scale) @ mx_restore(weight.t(), weight_scale).t()
    scaled = exact_matmul(x, weight) * x_scale.double().reshape(-1, 1)
    return (scaled * weight_scale.double().reshape(1, -1)).float()


def _quantized_norm(
    weight_mode: int, normed: torch.Tensor, smooth: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize the normed query latent as the second product needs it: (values, scale)."""
    if weight_mode == 0:
        return normed.to(_BF16), None
    if weight_mode == 3:
        return mx_rows(normed.to(_BF16), dtype)
    if smooth is not None:
        normed = normed * smooth.reshape(1, -1)
    return quantize_rows(normed, dtype)


def _packed_rows(
    latent: torch.Tensor,
    rotated: torch.Tensor,
    alpha: torch.Tensor | None,
    dtype: torch.dtype,
    tile: int,
) -> torch.Tensor:
    """Return rows of 656 bytes: 512 values, 64 rotated components in bf16, 4 fp32 scales.

    A tile's scale is its largest magnitude, times ``alpha`` where given, over the dtype's largest
    number; ``alpha`` below one clips.
    """
    tiles = latent.reshape(latent.shape[0], -1, tile)
    bound = tiles.abs().amax(-1, keepdim=True)
    if alpha is not None:
        bound = bound * alpha
    scale = bound / largest(dtype)
    values = saturate(by_scale(tiles.clamp(-bound, bound), scale), dtype)
    parts = (values.reshape(latent.shape), rotated.to(_BF16), scale.squeeze(-1))
    row = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    return row.view(dtype)


def _cache_rows(
    modes: _Modes,
    latent: torch.Tensor,
    rotated: torch.Tensor,
    given: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows of both caches from the normed latent and the rotated key, in fp32."""
    if modes.kv == 0:
        return latent.to(_BF16), rotated.to(_BF16)
    if modes.kv == 3:
        alpha = given.get("k_nope_clip_alpha")
        return _packed_rows(latent, rotated, alpha, dtype, modes.tile), None
    rows = saturate(latent * given["quant_scale_ckv"].reshape(1, -1), dtype)
    if modes.kv == 1:
        return rows, rotated.to(_BF16)
    return rows, saturate(rotated * given["quant_scale_ckr"].reshape(1, -1), dtype)


def _compute(
    op: str,
    modes: _Modes,
    token_x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    gammas: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    kv_dtype: torch.dtype,
    scales: dict[str, torch.Tensor | None],
    epsilons: tuple[float, float],
    factors: tuple[float, float] = (1.0, 1.0),
) -> _Outputs:
    """Compute all outputs as (tokens, ...) CPU tensors; RMS norm and RoPE are in fp32."""
    dq, uq_qr, uk, dkv_kr = (host(w, op) for w in weights)
    gamma_cq, gamma_ckv = (host(g, op) for g in gammas)
    sin, cos = (host(r, op).reshape(-1, r.shape[-1]) for r in rope)
    given = {name: host(s, op) for name, s in scales.items() if s is not None}
    x = host(token_x, op).reshape(-1, token_x.shape[-1])
    heads, nope, kv_lora = uk.shape

    def down(weight: torch.Tensor, name: str) -> torch.Tensor:
        scale = given.get(f"dequant_scale_{name}")
        return _scaled_product(modes.weight, x, given.get("dequant_scale_x"), weight, scale)

    normed = rms_norm(down(dq, "w_dq"), gamma_cq, epsilons[0], scale=factors[0])
    query_norm, norm_scale = _quantized_norm(
        modes.weight, normed, given.get("smooth_scales_cq"), uq_qr.dtype
    )
    q = _scaled_product(
        modes.weight, query_norm, norm_scale, uq_qr, given.get("dequant_scale_w_uq_qr")
    )
    q = q.view(x.shape[0], heads, -1)
    q_nope = q[..., :nope].to(_BF16)
    query = torch.einsum("thn,hnl->thl", q_nope.float(), uk.float()).to(_BF16)
    query_rope = interleaved_rope(q[..., nope:], cos[:, None], sin[:, None])
    query_scale: torch.Tensor | None = None
    if modes.query:
        query, query_scale = quantize_rows(query, kv_dtype)
        # The attention kernel multiplies both parts of a score by one scale, query times latent's.
        query_rope = query_rope.to(_BF16).float() * given["quant_scale_ckv"]
        query_rope = by_scale(query_rope, query_scale)
    kv = down(dkv_kr, "w_dkv_kr")
    latent = rms_norm(kv[:, :kv_lora], gamma_ckv, epsilons[1], scale=factors[1])
    rotated = interleaved_rope(kv[:, kv_lora:], cos, sin)
    kv_rows, kr_rows = _cache_rows(modes, latent, rotated, given, kv_dtype)
    return _Outputs(
        query, query_rope.to(_BF16), query_scale, kv_rows, kr_rows, query_norm, norm_scale
    )


def _slots(
    op: str,
    mode: str,
    token_x: torch.Tensor,
    size: int,
    index: torch.Tensor | None,
    ends: torch.Tensor | None,
) -> torch.Tensor:
    """Return each token's slot in a paged cache."""
    assert index is not None
    slots = host(index, op).reshape(-1)
    if "BLK" not in mode:
        return slots
    if token_x.dim() == 3:
        return page_slots(slots, [token_x.shape[1]] * token_x.shape[0], size)
    assert ends is not None
    bounds = [0, *host(ends, op).tolist()]
    return page_slots(slots, [b - a for a, b in pairwise(bounds)], size)


def _store(
    op: str,
    mode: str,
    out: _Outputs,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    slots: torch.Tensor | None,
) -> None:
    for cache, rows in ((kv_cache, out.kv_rows), (kr_cache, out.kr_rows)):
        if rows is None:
            continue
        if slots is None:
            write_whole(host(cache, op), rows)
        else:
            write_slots(op, host(cache, op), rows, slots, nz=mode.endswith("_NZ"))


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
    """(query, query_rope, dequant_scale_q_nope, query_norm, dequant_scale_q_norm).

    Shapes for a (tokens, hidden) input: (tokens, heads, kv_lora_rank), (tokens, heads, rope),
    (tokens, heads, 1), (tokens, q_lora_rank), (tokens, 1) or in weight mode 3 (tokens,
    q_lora_rank / 32). The third is empty without query mode 1, the last two without
    ``query_norm_flag``.
    """
    scales["k_nope_clip_alpha"] = k_nope_clip_alpha
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
        actual_seq_len=optional_spec(actual_seq_len),
        scales={name: optional_spec(s) for name, s in scales.items()},
        dtypes={
            "token_x_dtype": token_x_dtype,
            "weight_dq_dtype": weight_dq_dtype,
            "weight_uq_qr_dtype": weight_uq_qr_dtype,
            "weight_dkv_kr_dtype": weight_dkv_kr_dtype,
            "kv_cache_dtype": kv_cache_dtype,
        },
        op=op,
        **where(),
    )
    unsupported_unless(weight_quant_mode != 5, op, "weight_quant_mode 5 (hifloat8)")
    out = _compute(
        op,
        _Modes(weight_quant_mode, kv_cache_quant_mode, query_quant_mode, tile_size),
        token_x,
        weights,
        gammas,
        rope,
        kv_cache.dtype,
        scales,
        (rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
        (qc_qr_scale, kc_scale),
    )
    slots = None
    if cache_mode.startswith("PA_"):
        slots = _slots(op, cache_mode, token_x, kv_cache.shape[1], cache_index, actual_seq_len)
    _store(op, cache_mode, out, kv_cache, kr_cache, slots)
    # Outputs that are not asked for hold no element from CANN 8.5, and one before.
    nothing = 0 if cann_key(place().cann) >= (8, 5) else 1
    empty = torch.zeros(nothing, dtype=torch.float32)
    norm = torch.zeros(nothing, dtype=weight_uq_qr.dtype)
    norm_scale = empty
    if weight_quant_mode == 3:
        # The op gives its e8m0 output the dtype of its e8m0 input.
        e8m0 = scales["dequant_scale_x"]
        assert e8m0 is not None
        norm_scale = torch.zeros(nothing, dtype=torch.uint8).view(e8m0.dtype)
        if query_norm_flag and out.query_norm_scale is not None:
            norm_scale = out.query_norm_scale.view(e8m0.dtype)
    elif query_norm_flag and out.query_norm_scale is not None:
        norm_scale = out.query_norm_scale
    if query_norm_flag:
        norm = out.query_norm.reshape(*token_x.shape[:-1], -1)
    return (
        _shaped(out.query, token_x),
        _shaped(out.query_rope, token_x),
        to_device(empty if out.query_scale is None else out.query_scale, token_x),
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
        _Modes(mode),
        token_x,
        weights,
        (rmsnorm_gamma_cq, rmsnorm_gamma_ckv),
        (rope_sin, rope_cos),
        kv_cache.dtype,
        scales,
        (rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
    )
    slots = _slots(op, cache_mode, token_x, kv_cache.shape[1], cache_index, None)
    _store(op, cache_mode, out, kv_cache, kr_cache, slots)
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
