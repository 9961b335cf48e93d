"""References of ``npu_mla_prolog_v3`` and its functional form.

There: weight_quant_mode 0 (float), 1 (int8 weight_uq_qr), 2 (int8 throughout), 3 (MXFP8) and 4
(fp8); kv_cache_quant_mode 0, 1 (per tensor), 2 (per channel) and 3 (per tile, packed); cache modes
PA_BSND and PA_NZ. Not there: weight_quant_mode 5 (hif8), which torch has no dtype for.

Source of formulas, dtypes and scale layouts: the op's descriptions in the op-plugin documentation
(torch_npu.npu_mla_prolog_v3) and in ops-transformer (aclnnMlaPrologV3WeightNz); of the order inside
a packed row, ops-transformer's description of kv_quant_sparse_flash_attention, which reads it; that
quant_scale_ckv and quant_scale_ckr are factors, and that a quantized query scales its rotated part
too, op-plugin's own test of the op (test_mla_prolog_v3.py).
"""

from __future__ import annotations

import torch

from npu_backend.runtime.reference.caches import write_rows
from npu_backend.runtime.reference.numerics import (
    as_scale,
    eight_bit,
    int8_product,
    mx_product,
    mx_quantized,
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
    return tensor


class _Arithmetic:
    """The matrix products of one weight_quant_mode.

    Modes 2 and 4 multiply by one scale a token and one a channel, mode 3 by one for each 32 inputs.
    """

    def __init__(self, mode: int, rounded: torch.dtype) -> None:
        self.mode, self.rounded = mode, rounded
        self.eight = torch.int8 if mode in (1, 2) else torch.float8_e4m3fn

    def down(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        name: str,
    ) -> torch.Tensor:
        """Return ``x @ weight`` rounded, for the two projections of the hidden states."""
        if self.mode in (0, 1):
            return product(x, weight).to(self.rounded)
        x_scale = _needed("dequant_scale_x", x_scale, self.mode)
        scale = _needed(f"dequant_scale_w_{name}", scale, self.mode)
        return self._scaled(x, x_scale, weight, scale).to(self.rounded)

    def quantized_query(
        self, normed: torch.Tensor, smooth: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the compressed query as the second product takes it, and its scales."""
        if self.mode == 0:
            return normed.to(self.rounded), torch.empty(0)
        if self.mode == 3:
            return mx_quantized(normed)
        if smooth is not None:
            normed = normed * smooth.float().reshape(1, -1)
        return row_quantized(normed, self.eight)

    def up(
        self,
        query: torch.Tensor,
        query_scale: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``query @ weight`` rounded."""
        if self.mode == 0:
            return product(query, weight).to(self.rounded)
        scale = _needed("dequant_scale_w_uq_qr", scale, self.mode)
        return self._scaled(query, query_scale, weight, scale).to(self.rounded)

    def _scaled(
        self, a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor
    ) -> torch.Tensor:
        if self.mode == 3:
            rows = a_scale.reshape(a.shape[0], -1), b_scale.reshape(b.shape[1], -1)
            return mx_product(a, rows[0], b, rows[1])
        multiply = int8_product if a.dtype == torch.int8 else product
        by_token = as_scale(a_scale).reshape(-1, 1)
        return multiply(a, b).float() * by_token * as_scale(b_scale).reshape(1, -1)


_PER_TENSOR, _PER_CHANNEL, _PER_TILE = 1, 2, 3


def _cached(
    mode: int,
    tile: int,
    latent: torch.Tensor,
    key: torch.Tensor,
    dtype: torch.dtype,
    rounded: torch.dtype,
    ckv: torch.Tensor | None,
    ckr: torch.Tensor | None,
    alpha: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows that go into kv_cache and kr_cache; None where they are one row.

    A packed row is the tiles' 8-bit values, the key in 16 bits, and one fp32 scale a tile, as
    bytes of the cache's dtype.
    """
    if mode == 0:
        return latent.to(rounded), key.to(rounded)
    if mode == _PER_TILE:
        tiles = latent.reshape(len(latent), -1, tile)
        if alpha is not None:
            edge = tiles.abs().amax(-1, keepdim=True) * alpha.float()
            tiles = tiles.clamp(-edge, edge)
        values, scales = row_quantized(tiles, dtype)
        parts = (values.flatten(-2), key.to(rounded).contiguous(), scales.squeeze(-1).contiguous())
        packed = torch.cat([part.contiguous().view(torch.int8) for part in parts], -1)
        return packed.view(dtype), None
    if ckv is None:
        raise ValueError(f"{_OP}: quant_scale_ckv is needed in kv_cache_quant_mode {mode}")
    row = eight_bit(latent.to(rounded).float() * ckv.float().reshape(1, -1), dtype)
    if mode == _PER_TENSOR:
        return row, key.to(rounded)
    if ckr is None:
        raise ValueError(f"{_OP}: quant_scale_ckr is needed in kv_cache_quant_mode {mode}")
    return row, eight_bit(key.to(rounded).float() * ckr.float().reshape(1, -1), dtype)


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
        token_x: ``(tokens, hidden)`` or ``(batch, length, hidden)``; int8 in mode 2, e4m3 in 3 and
            4.
        weight_dq: ``(hidden, q_lora_rank)``; int8 in mode 2, e4m3 in 3 and 4.
        weight_uq_qr: ``(q_lora_rank, heads * (nope + rope))``, per head nope then rope; int8 in
            modes 1 and 2, e4m3 in 3 and 4.
        weight_uk: ``(heads, nope, kv_lora_rank)``, float.
        weight_dkv_kr: ``(hidden, kv_lora_rank + rope)``; int8 in mode 2, e4m3 in 3 and 4.
        rmsnorm_gamma_cq: ``(q_lora_rank,)``.
        rmsnorm_gamma_ckv: ``(kv_lora_rank,)``.
        rope_sin: ``(tokens, rope)`` or ``(batch, length, rope)``, each angle twice, half layout.
        rope_cos: As ``rope_sin``.
        kv_cache: ``(blocks, block_size, 1, kv_lora_rank)``, packed ``(..., 656)``; written. 8-bit
            in kv modes 1 to 3: int8 with weight modes 1 and 2, e4m3 with 3 and 4.
        kr_cache: ``(blocks, block_size, 1, rope)``; written, in half layout. Int8 in kv mode 2,
            without elements where the cache is packed.
        cache_index: int64, slot of each token. Repeated slots: the last writer is undefined.
        dequant_scale_x: Modes 2 and 4: ``(tokens, 1)`` fp32. Mode 3: ``(tokens, hidden / 32)``
            e8m0.
        dequant_scale_w_dq: Modes 2 and 4: ``(1, q_lora_rank)``. Mode 3: ``(q_lora_rank, hidden /
            32)``.
        dequant_scale_w_uq_qr: Modes 1, 2 and 4: ``(1, heads * (nope + rope))``. Mode 3:
            ``(heads * (nope + rope), q_lora_rank / 32)``.
        dequant_scale_w_dkv_kr: Modes 2 and 4: ``(1, kv_lora_rank + rope)``. Mode 3:
            ``(kv_lora_rank + rope, hidden / 32)``.
        quant_scale_ckv: Factor on the latent before it is rounded: kv mode 1 ``(1,)``, 2
            ``(1, kv_lora_rank)``.
        quant_scale_ckr: Likewise of the key: kv mode 2 ``(1, rope)``.
        smooth_scales_cq: Modes 1, 2 and 4: ``(1, q_lora_rank)`` or ``(1,)``.
        actual_seq_len: Belongs to cache modes that are not modelled.
        k_nope_clip_alpha: ``(1,)``, in kv mode 3 with weight modes 1 and 2: a tile is clipped to
            this part of its largest magnitude.
        rmsnorm_epsilon_cq: Epsilon of the query's norm.
        rmsnorm_epsilon_ckv: Epsilon of the latent's norm.
        cache_mode: ``PA_BSND`` or ``PA_NZ``.
        query_norm_flag: Ask for the last two results.
        weight_quant_mode: 0 to 4.
        kv_cache_quant_mode: 0 to 3.
        query_quant_mode: 1 with kv mode 1, else 0.
        ckvkr_repo_mode: 1 with kv mode 3, else 0.
        quant_scale_repo_mode: As ``ckvkr_repo_mode``.
        tile_size: Latents that share one scale in kv mode 3.
        qc_qr_scale: Factor on the normed query.
        kc_scale: Factor on the normed latent.
        token_x_dtype: Not modelled.
        weight_dq_dtype: Not modelled.
        weight_uq_qr_dtype: Not modelled.
        weight_dkv_kr_dtype: Not modelled.
        kv_cache_dtype: Not modelled.

    Returns:
        ``query`` (tokens, heads, kv_lora_rank), ``query_rope`` (tokens, heads, rope), with query
        mode 1 times ``quant_scale_ckv`` over the query's scale,
        ``dequant_scale_q_nope`` (0,), with query mode 1 (tokens, heads, 1) fp32 and an 8-bit
        ``query``; ``query_norm`` (tokens, q_lora_rank), float in mode 0 and 8-bit else, and
        ``dequant_scale_q_norm`` (tokens, 1) fp32, in mode 3 (tokens, q_lora_rank / 32) e8m0.
        Without ``query_norm_flag`` the last two are of shape (0,). A 3-D ``token_x`` gives (batch,
        length) for tokens, except in the scale, which is (batch * length, 1).

    Raises:
        ValueError: Dtypes, missing scales, slots outside the cache, or a tensor that is not
            contiguous (the op takes none).
        NotImplementedError: What is not there, by name.
    """
    wanted = {
        "weight_quant_mode": (weight_quant_mode, (0, 1, 2, 3, 4)),
        "cache_mode": (cache_mode, _CACHE_MODES),
        "actual_seq_len": (actual_seq_len is not None, (False,)),
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
    _check_cache(
        (weight_quant_mode, kv_cache_quant_mode, query_quant_mode),
        (ckvkr_repo_mode, quant_scale_repo_mode),
        kv_cache,
        kr_cache,
        weight_uk.dtype,
        cache_mode,
        k_nope_clip_alpha,
    )
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
    do = _Arithmetic(weight_quant_mode, rounded)
    down_q = do.down(x, dequant_scale_x, weight_dq, dequant_scale_w_dq, "dq")
    down_kv = do.down(x, dequant_scale_x, weight_dkv_kr, dequant_scale_w_dkv_kr, "dkv_kr")

    normed_q = rms_scaled(down_q, rmsnorm_gamma_cq, rmsnorm_epsilon_cq) * qc_qr_scale
    query_norm, norm_scale = do.quantized_query(normed_q, smooth_scales_cq)
    up_q = do.up(query_norm, norm_scale, weight_uq_qr, dequant_scale_w_uq_qr)
    q = up_q.reshape(x.shape[0], heads, -1)
    absorbed = product(q[..., :nope].transpose(0, 1), weight_uk).transpose(0, 1).to(rounded)
    query_scale = torch.empty(0)
    turned_q = rotate_pairs(q[..., nope:], cos.unsqueeze(1), sin.unsqueeze(1)).to(rounded)
    if query_quant_mode and quant_scale_ckv is not None:
        absorbed, query_scale = row_quantized(absorbed, kv_cache.dtype)
        # Attention multiplies the whole score by query scale and latent factor once.
        safe = torch.where(query_scale > 0, query_scale, torch.ones_like(query_scale))
        turned_q = turned_q.float() * quant_scale_ckv.float() / safe

    kc = rms_scaled(down_kv[:, :latent], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv) * kc_scale
    kr = rotate_pairs(down_kv[:, latent:], cos, sin)
    rows = _cached(
        kv_cache_quant_mode,
        tile_size,
        kc,
        kr,
        kv_cache.dtype,
        rounded,
        quant_scale_ckv,
        quant_scale_ckr,
        k_nope_clip_alpha,
    )
    for cache, row in zip((kv_cache, kr_cache), rows, strict=True):
        if row is not None:
            write_rows(_OP, cache, row, cache_index, nz=cache_mode == "PA_NZ")

    if query_norm_flag:
        query_norm = query_norm.reshape(*leading, -1)
    else:
        query_norm, norm_scale = query_norm.new_empty(0), norm_scale.new_empty(0)
    return (
        absorbed.reshape(*leading, heads, latent).contiguous(),
        turned_q.to(rounded).reshape(*leading, heads, -1).contiguous(),
        query_scale,
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
    eight = torch.int8 if mode in (1, 2) else torch.float8_e4m3fn
    quantized: tuple[str, ...] = {0: (), 1: ("weight_uq_qr",)}.get(
        mode, ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr")
    )
    named = {"token_x": x, "weight_dq": dq, "weight_uq_qr": uq, "weight_dkv_kr": dkv}
    for name, tensor in named.items():
        expected = eight if name in quantized else uk.dtype
        if tensor.dtype != expected:
            raise ValueError(
                f"{_OP}: {name} must be {expected} in weight_quant_mode {mode}, is {tensor.dtype}"
            )
    heads, nope, latent = uk.shape
    rope = dkv.shape[1] - latent
    if dq.shape[1] != uq.shape[0] or uq.shape[1] != heads * (nope + rope) or rope <= 0:
        shapes = {n: tuple(t.shape) for n, t in {**named, "weight_uk": uk}.items()}
        raise ValueError(f"{_OP}: the weights do not fit together: {shapes}")


_MODES = {
    (0, 0, 0), (1, 0, 0), (1, 2, 0), (1, 3, 0), (2, 0, 0), (2, 1, 1), (2, 3, 0),
    (3, 0, 0), (3, 1, 1), (3, 3, 0), (4, 0, 0), (4, 1, 1), (4, 3, 0),
}  # fmt: skip
"""(weight, kv cache, query) modes that the op takes, without those of hif8."""


def _check_cache(
    modes: tuple[int, int, int],
    repos: tuple[int, int],
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    rounded: torch.dtype,
    cache_mode: str,
    alpha: torch.Tensor | None,
) -> None:
    """Refuse modes that do not go together, and caches of another dtype than theirs."""
    weight, kv, _ = modes
    if modes not in _MODES:
        raise ValueError(f"{_OP}: (weight, kv cache, query) modes {modes} do not go together")
    if repos != ((1, 1) if kv == _PER_TILE else (0, 0)):
        raise ValueError(f"{_OP}: repository modes {repos} do not go with kv_cache_quant_mode {kv}")
    if kv == _PER_TILE and cache_mode != "PA_BSND":
        raise ValueError(f"{_OP}: a packed cache is not written in cache_mode {cache_mode}")
    eight = torch.int8 if weight in (1, 2) else torch.float8_e4m3fn
    expected = {"kv_cache": eight if kv else rounded, "kr_cache": eight if kv == 2 else rounded}
    for name, cache in (("kv_cache", kv_cache), ("kr_cache", kr_cache)):
        if cache.dtype != expected[name] and not (kv == _PER_TILE and cache is kr_cache):
            raise ValueError(
                f"{_OP}: {name} must be {expected[name]} in modes {modes}, is {cache.dtype}"
            )
    if (alpha is not None) != (kv == _PER_TILE and weight in (1, 2)):
        needed = "must not be given" if alpha is not None else "is needed"
        raise ValueError(f"{_OP}: k_nope_clip_alpha {needed} in modes {modes}")
    if kv == _PER_TILE and kr_cache.numel():
        raise ValueError(f"{_OP}: kr_cache must be empty where the key is packed into kv_cache")


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
