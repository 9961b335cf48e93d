"""What a cache holds of a latent and a key, and how a query goes with it, from plain ops.

Source: catalog, ``prolog-docs``; the fused path writes the same bytes up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from npu_backend.runtime import PACKED_TILE, LayerCache
from npu_backend_builtin.impl._rope import write_rows

__all__ = ["query_encoder", "row_writer"]

E4M3_MAX = 448.0
"""Largest value of float8_e4m3fn."""
INT8_MAX = 127.0

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
Query = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]
Encoder = Callable[[torch.Tensor, torch.Tensor], Query]


def _rounder(dtype: torch.dtype) -> tuple[Callable[[torch.Tensor], torch.Tensor], float]:
    """Return how to round fp32 to an 8-bit dtype, half to even and saturated, and its range."""
    if dtype == torch.int8:

        def integer(x: torch.Tensor) -> torch.Tensor:
            return x.round().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8)

        return integer, INT8_MAX

    def float8(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-E4M3_MAX, E4M3_MAX).to(dtype)

    return float8, E4M3_MAX


def _by_row(dtype: torch.dtype) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return ``(..., K) -> (8-bit values, fp32 scales (..., 1))``; zeros have scale 0."""
    rounded, top = _rounder(dtype)

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True) / top
        return rounded(wide / scale.masked_fill(scale == 0, 1.0)), scale

    return quantize


def row_writer(cache: LayerCache) -> Writer:
    """Return ``(latent, key, slots)``: write both in the cache's layout.

    ``latent`` ``(tokens, kv_lora_rank)`` is normed and ``key`` ``(tokens, rope)`` rotated, both in
    the layer's dtype.
    """
    layout, k_nope, k_rope = cache.layout, cache.k_nope, cache.k_rope
    nz = layout.cache_mode == "PA_NZ"
    if layout.packed:
        quantize, alpha = _by_row(k_nope.dtype), cache.clip_alpha

        def packed(latent: torch.Tensor, key: torch.Tensor, slots: torch.Tensor) -> None:
            tiles = latent.reshape(latent.shape[0], -1, PACKED_TILE).float()
            if alpha is not None:
                edge = tiles.abs().amax(-1, keepdim=True) * alpha
                tiles = tiles.clamp(-edge, edge)
            values, scales = quantize(tiles)
            parts = (values.flatten(-2), key.contiguous(), scales.squeeze(-1).contiguous())
            rows = torch.cat([part.view(torch.uint8) for part in parts], -1)
            write_rows(k_nope.view(torch.uint8), rows, slots, nz=nz)

        return packed
    encoders = [
        _factored(tensor.dtype, factor)
        for tensor, factor in ((k_nope, cache.latent_factor), (k_rope, cache.key_factor))
    ]
    encode_latent, encode_key = encoders

    def separate(latent: torch.Tensor, key: torch.Tensor, slots: torch.Tensor) -> None:
        write_rows(k_nope, encode_latent(latent), slots, nz=nz)
        write_rows(k_rope, encode_key(key), slots, nz=nz)

    return separate


def _factored(
    dtype: torch.dtype, factor: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    if factor is None:
        return lambda x: x
    (rounded, _), by = _rounder(dtype), factor.reshape(1, -1)
    return lambda x: rounded(x.float() * by)


def query_encoder(cache: LayerCache) -> Encoder:
    """Return ``(q_nope, q_pe) -> (q_nope, q_pe, scale)`` as attention over the cache wants them.

    With a quantized query the whole score is multiplied once, by the query's scale over the
    latent's factor; the rotated part, which is not quantized, is divided by that here.
    """
    if not cache.layout.quantizes_queries:
        return lambda q_nope, q_pe: (q_nope, q_pe, None)
    quantize, factor = _by_row(cache.k_nope.dtype), cache.latent_factor
    assert factor is not None

    def encode(q_nope: torch.Tensor, q_pe: torch.Tensor) -> Query:
        values, scale = quantize(q_nope)
        turned = q_pe.float() * factor / scale.masked_fill(scale == 0, 1.0)
        return values, turned.to(q_pe.dtype), scale

    return encode
