"""What a preprocess path returns, whichever path it is."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["PreprocessResult"]


class PreprocessResult(NamedTuple):
    """The queries of one step; keys and latents are in the cache.

    Attributes:
        q_nope: ``(tokens, heads, kv_lora_rank)``, multiplied with ``w_kc`` already, in the layer's
            dtype; with a cache of ``int8`` or ``fp8``, in the cache's.
        q_pe: ``(tokens, heads, qk_rope_head_dim)``, rotated, in the RoPE layout of the layer's
            cache; not rotated where the layer has no RoPE. With a quantized ``q_nope`` it is times
            the latent's factor over ``q_nope_scale``, so that attention multiplies a whole score
            once, by ``q_nope_scale`` over the factor.
        q_lora: ``(tokens, q_lora_rank)`` after its norm, for the layer's own indexer, in the format
            that the path's offer names (``float``: the layer's dtype). None where the layer has no
            indexer of its own, or the path does not hand it over.
        q_lora_scale: Scale of a quantized ``q_lora``: ``(tokens, 1)`` float32, of MXFP8 ``(tokens,
            q_lora_rank / 32)`` e8m0; else None.
        q_nope_scale: Scale of a quantized ``q_nope``, ``(tokens, heads, 1)`` float32; else None.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    q_lora: torch.Tensor | None = None
    q_lora_scale: torch.Tensor | None = None
    q_nope_scale: torch.Tensor | None = None
