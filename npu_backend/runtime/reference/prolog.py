"""References of ``npu_mla_prolog_v3`` and its functional form.

There: weight_quant_mode 0 (float), 1 (int8 weight_uq_qr) and 2 (int8 throughout), caches in the
activations' dtype, cache modes PA_BSND and PA_NZ. Source of the formulas: the op's description in
the op-plugin documentation (torch_npu.npu_mla_prolog_v3).
"""

from __future__ import annotations

import torch

from npu_backend.runtime.reference.caches import write_rows
from npu_backend.runtime.reference.numerics import (
    as_scale,
    int8_product,
    product,
    rms_scaled,
    rotate_pairs,
    row_quantized,
)

__all__ = ["npu_mla_prolog_v3", "npu_mla_prolog_v3_functional"]

_OP = "npu_mla_prolog_v3"
_CACHE_MODES = ("PA_BSND", "PA_NZ")

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _needed(name: str, tensor: torch.Tensor | None, mode: int) -> torch.Tensor:
    if tensor is None:
        raise ValueError(f"{_OP}: {name} is needed in weight_quant_mode {mode}")
    return as_scale(tensor)


def npu_mla_prolog_v3(
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
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    quant_scale_ckv: torch.Tensor | None = None,
    quant_scale_ckr: torch.Tensor | None = None,
    smooth_scales_cq: torch.Tensor | None = None,
    actual_seq_len: torch.Tensor | None = None,
    k_nope_clip_alpha: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
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
) -> Results:
    """Compute absorbed and rotated queries, and write latent and rotated key into their caches.

    RoPE takes interleaved components and gives half layout. Every matrix product accumulates in
    fp32 (int8: exactly, then times its scales) and rounds to the dtype of ``weight_uk``, which the
    device fixes to bf16; norms and rotations are fp32 inside and round once. A quantized
    ``c^Q`` is rounded once only, to int8, with one scale a token.

    Args:
        token_x: ``(tokens, hidden)`` or ``(batch, length, hidden)``; int8 in mode 2.
        weight_dq: ``(hidden, q_lora_rank)``; int8 in mode 2.
        weight_uq_qr: ``(q_lora_rank, heads * (nope + rope))``, per head nope then rope; int8 in
            modes 1 and 2.
        weight_uk: ``(heads, nope, kv_lora_rank)``, float.
        weight_dkv_kr: ``(hidden, kv_lora_rank + rope)``; int8 in mode 2.
        rmsnorm_gamma_cq: ``(q_lora_rank,)``.
        rmsnorm_gamma_ckv: ``(kv_lora_rank,)``.
        rope_sin: ``(tokens, rope)`` or ``(batch, length, rope)``, each angle twice, half layout.
        rope_cos: As ``rope_sin``.
        kv_cache: ``(blocks, block_size, 1, kv_lora_rank)``; written.
        kr_cache: ``(blocks, block_size, 1, rope)``; written, in half layout.
        cache_index: int64, slot of each token. Repeated slots: the last writer is undefined.
        dequant_scale_x: Mode 2: ``(tokens,)`` or ``(tokens, 1)``.
        dequant_scale_w_dq: Mode 2: ``(1, q_lora_rank)``.
        dequant_scale_w_uq_qr: Modes 1 and 2: ``(1, heads * (nope + rope))``.
        dequant_scale_w_dkv_kr: Mode 2: ``(1, kv_lora_rank + rope)``.
        quant_scale_ckv: Quantized caches are not modelled.
        quant_scale_ckr: As above.
        smooth_scales_cq: Modes 1 and 2: ``(1, q_lora_rank)`` or ``(1,)``.
        actual_seq_len: Belongs to cache modes that are not modelled.
        k_nope_clip_alpha: Belongs to quantized caches.
        rmsnorm_epsilon_cq: Epsilon of the query's norm.
        rmsnorm_epsilon_ckv: Epsilon of the latent's norm.
        cache_mode: ``PA_BSND`` or ``PA_NZ``.
        query_norm_flag: Ask for the last two results.
        weight_quant_mode: 0, 1 or 2.
        kv_cache_quant_mode: 0.
        query_quant_mode: 0.
        ckvkr_repo_mode: 0.
        quant_scale_repo_mode: 0.
        tile_size: Without meaning in these modes.
        qc_qr_scale: Factor on the normed query.
        kc_scale: Factor on the normed latent.
        token_x_dtype: Not modelled.
        weight_dq_dtype: Not modelled.
        weight_uq_qr_dtype: Not modelled.
        weight_dkv_kr_dtype: Not modelled.
        kv_cache_dtype: Not modelled.

    Returns:
        ``query`` (tokens, heads, kv_lora_rank), ``query_rope`` (tokens, heads, rope),
        ``dequant_scale_q_nope`` (0,), ``query_norm`` (tokens, q_lora_rank), float in mode 0 and
        int8 else, and ``dequant_scale_q_norm`` (tokens, 1) in modes 1 and 2. Without
        ``query_norm_flag`` the last two are of shape (0,). A 3-D ``token_x`` gives (batch, length)
        for tokens, except in the scale, which is (batch * length, 1).

    Raises:
        ValueError: Dtypes, missing scales, slots outside the cache, or a tensor that is not
            contiguous (the op takes none).
        NotImplementedError: What is not there, by name.
    """
    wanted = {
        "weight_quant_mode": (weight_quant_mode, (0, 1, 2)),
        "kv_cache_quant_mode": (kv_cache_quant_mode, (0,)),
        "query_quant_mode": (query_quant_mode, (0,)),
        "ckvkr_repo_mode": (ckvkr_repo_mode, (0,)),
        "quant_scale_repo_mode": (quant_scale_repo_mode, (0,)),
        "cache_mode": (cache_mode, _CACHE_MODES),
        "quant_scale_ckv": (quant_scale_ckv is not None, (False,)),
        "quant_scale_ckr": (quant_scale_ckr is not None, (False,)),
        "actual_seq_len": (actual_seq_len is not None, (False,)),
        "k_nope_clip_alpha": (k_nope_clip_alpha is not None, (False,)),
        "token_x_dtype": (token_x_dtype, (None,)),
        "weight_dq_dtype": (weight_dq_dtype, (None,)),
        "weight_uq_qr_dtype": (weight_uq_qr_dtype, (None,)),
        "weight_dkv_kr_dtype": (weight_dkv_kr_dtype, (None,)),
        "kv_cache_dtype": (kv_cache_dtype, (None,)),
    }
    for name, (value, known) in wanted.items():
        if value not in known:
            raise NotImplementedError(f"{_OP}: the reference knows {name} {known}, not {value}")
    _check(weight_quant_mode, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr)
    _contiguous(
        token_x=token_x,
        weight_dq=weight_dq,
        weight_uq_qr=weight_uq_qr,
        weight_uk=weight_uk,
        weight_dkv_kr=weight_dkv_kr,
        rope_sin=rope_sin,
        rope_cos=rope_cos,
    )
    if cache_index is None or cache_index.dtype != torch.int64:
        raise ValueError(f"{_OP}: cache_index (int64) is needed in cache_mode {cache_mode}")

    rounded = weight_uk.dtype
    leading = token_x.shape[:-1]
    x = token_x.reshape(-1, token_x.shape[-1])
    cos, sin = rope_cos.reshape(x.shape[0], -1), rope_sin.reshape(x.shape[0], -1)
    heads, nope, latent = weight_uk.shape

    if weight_quant_mode == 2:
        by_token = _needed("dequant_scale_x", dequant_scale_x, 2).reshape(-1, 1)
        scale_dq = _needed("dequant_scale_w_dq", dequant_scale_w_dq, 2).reshape(1, -1)
        scale_kv = _needed("dequant_scale_w_dkv_kr", dequant_scale_w_dkv_kr, 2).reshape(1, -1)
        down_q = int8_product(x, weight_dq).float() * by_token * scale_dq
        down_kv = int8_product(x, weight_dkv_kr).float() * by_token * scale_kv
    else:
        down_q, down_kv = product(x, weight_dq), product(x, weight_dkv_kr)
    down_q, down_kv = down_q.to(rounded), down_kv.to(rounded)

    normed_q = rms_scaled(down_q, rmsnorm_gamma_cq, rmsnorm_epsilon_cq) * qc_qr_scale
    if weight_quant_mode == 0:
        query_norm = normed_q.to(rounded)
        norm_scale = torch.empty(0)
        up_q = product(query_norm, weight_uq_qr)
    else:
        if smooth_scales_cq is not None:
            normed_q = normed_q * smooth_scales_cq.float().reshape(1, -1)
        query_norm, norm_scale = row_quantized(normed_q)
        scale_uq = _needed("dequant_scale_w_uq_qr", dequant_scale_w_uq_qr, weight_quant_mode)
        up_q = int8_product(query_norm, weight_uq_qr).float() * norm_scale * scale_uq.reshape(1, -1)
    q = up_q.to(rounded).reshape(x.shape[0], heads, -1)
    absorbed = product(q[..., :nope].transpose(0, 1), weight_uk).transpose(0, 1)
    turned_q = rotate_pairs(q[..., nope:], cos.unsqueeze(1), sin.unsqueeze(1))

    kc = rms_scaled(down_kv[:, :latent], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv) * kc_scale
    kr = rotate_pairs(down_kv[:, latent:], cos, sin)
    for cache, rows in ((kv_cache, kc), (kr_cache, kr)):
        write_rows(_OP, cache, rows.to(rounded), cache_index, nz=cache_mode == "PA_NZ")

    if query_norm_flag:
        query_norm = query_norm.reshape(*leading, -1)
    else:
        query_norm, norm_scale = query_norm.new_empty(0), torch.empty(0)
    return (
        absorbed.to(rounded).reshape(*leading, heads, latent).contiguous(),
        turned_q.to(rounded).reshape(*leading, heads, -1).contiguous(),
        torch.empty(0),
        query_norm,
        norm_scale,
    )


def _check(
    mode: int,
    x: torch.Tensor,
    dq: torch.Tensor,
    uq: torch.Tensor,
    uk: torch.Tensor,
    dkv: torch.Tensor,
) -> None:
    """Refuse dtypes that the mode does not have, and products that do not fit."""
    int8 = {0: (), 1: ("weight_uq_qr",)}.get(
        mode, ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr")
    )
    named = {"token_x": x, "weight_dq": dq, "weight_uq_qr": uq, "weight_dkv_kr": dkv}
    for name, tensor in named.items():
        expected = torch.int8 if name in int8 else uk.dtype
        if tensor.dtype != expected:
            raise ValueError(
                f"{_OP}: {name} must be {expected} in weight_quant_mode {mode}, is {tensor.dtype}"
            )
    heads, nope, latent = uk.shape
    rope = dkv.shape[1] - latent
    if dq.shape[1] != uq.shape[0] or uq.shape[1] != heads * (nope + rope) or rope <= 0:
        shapes = {n: tuple(t.shape) for n, t in {**named, "weight_uk": uk}.items()}
        raise ValueError(f"{_OP}: the weights do not fit together: {shapes}")


def _contiguous(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{_OP}: {name} must be contiguous, its strides are {tensor.stride()}")


def npu_mla_prolog_v3_functional(
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
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    quant_scale_ckv: torch.Tensor | None = None,
    quant_scale_ckr: torch.Tensor | None = None,
    smooth_scales_cq: torch.Tensor | None = None,
    actual_seq_len: torch.Tensor | None = None,
    k_nope_clip_alpha: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
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
) -> tuple[torch.Tensor, ...]:
    """As :func:`npu_mla_prolog_v3`, but on copies of the caches, which follow its five results.

    Returns:
        Seven tensors: the five, then the written copies of ``kv_cache`` and ``kr_cache``.

    Raises:
        ValueError: As the op in place.
        NotImplementedError: As the op in place.
    """
    arguments = dict(locals())
    copies = {name: arguments[name].clone() for name in ("kv_cache", "kr_cache")}
    return (*npu_mla_prolog_v3(**(arguments | copies)), *copies.values())
