"""absorb: separate ops. Projects, absorbs ``w_kc`` into the queries, rotates, writes the cache.

Where ``npu_kv_rmsnorm_rope_cache`` and ``npu_interleave_rope`` do not take the layer's dimensions,
dtype or RoPE layout, the step is made of plain ops. Prepares nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from npu_backend import MlaLayer
from npu_backend.runtime import (
    LayerCache,
    Prepared,
    PreprocessResult,
    Weights,
    linear,
    linear_ops,
)
from npu_backend_builtin.impl._kv import query_encoder, row_writer
from npu_backend_builtin.impl._rope import rotate

__all__ = ["Absorb"]

_FUSED_DTYPES = ("float16", "bfloat16")
_CACHE_MODES = {"PA_BSND": "PA_BNSD", "PA_NZ": "PA_NZ"}
"""The cache write's own names of the cache modes; with one KV head BSND and BNSD are the same."""

Path = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PreprocessResult]
Project = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]]
Kernel = Callable[[torch.Tensor], torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _projections(layer: MlaLayer) -> tuple[str, str]:
    if layer.q_lora_rank is None:
        return "q_proj", "kv_a_proj_with_mqa"
    return "fused_qkv_a_proj", "q_b_proj"


def _fused_rope(given: Weights | Prepared) -> bool:
    layer = given.layer
    sizes = given.deployment.value("npu_interleave_rope", "head_dim")
    return (
        layer.has_rope
        and layer.kv_layout.rope == "half"
        and layer.dtype in _FUSED_DTYPES
        and layer.qk_rope_head_dim in sizes
    )


def _fused_write(given: Weights | Prepared) -> bool:
    layer = given.layer
    widths = given.deployment.value("npu_kv_rmsnorm_rope_cache", "kv_width")
    return (
        _fused_rope(given)
        and layer.kv_lora_rank + layer.qk_rope_head_dim in widths
        and layer.kv_layout.dtype == layer.dtype
        and layer.kv_layout.cache_mode in _CACHE_MODES
    )


def _project(prepared: Prepared) -> Project:
    """Return ``hidden -> (q, kv, q_lora)``: ``(tokens, heads * (nope + rope))``, ``(tokens,
    kv_lora_rank + rope)``, and ``(tokens, q_lora_rank)`` or None."""
    layer, ops, given = prepared.layer, prepared.ops, prepared.weights
    first, second = (linear(n, layer, given, ops, "absorb") for n in _projections(layer))
    if layer.q_lora_rank is None:

        def separate(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            return first(hidden), second(hidden), None

        return separate
    gamma, epsilon = given["q_a_layernorm"], layer.rms_norm_eps
    widths = [layer.q_lora_rank, layer.kv_lora_rank + layer.qk_rope_head_dim]

    def compressed(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        low, kv = torch.split(first(hidden), widths, -1)
        q_lora, _ = ops.npu_rms_norm(low, gamma, epsilon)
        return second(q_lora), kv, q_lora

    return compressed


def _rotate_queries(prepared: Prepared) -> Rotate:
    """Return ``(q, cos, sin) -> q``, ``(tokens, heads, rope)`` in the layout of the cache."""
    layer, ops = prepared.layer, prepared.ops
    if _fused_rope(prepared):

        def fused(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            # (batch, heads, length, rope): each token is a batch of length one.
            turned = ops.npu_interleave_rope(
                q.unsqueeze(2).contiguous(), cos[:, None, None], sin[:, None, None]
            )
            return turned.squeeze(2)

        return fused
    interleaved = layer.kv_layout.rope == "interleaved"

    def plain(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotate(q, cos[:, None], sin[:, None], interleaved=interleaved)

    return plain


def _write(prepared: Prepared, cache: LayerCache) -> Write:
    """Return ``(kv, cos, sin, slots)``: norm the latent, rotate the key, write both."""
    layer, ops = prepared.layer, prepared.ops
    gamma, epsilon = prepared.weights["kv_a_layernorm"], layer.rms_norm_eps
    if _fused_write(prepared):
        mode, k_nope, k_rope = _CACHE_MODES[layer.kv_layout.cache_mode], cache.k_nope, cache.k_rope

        def fused(
            kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor
        ) -> None:
            ops.npu_kv_rmsnorm_rope_cache(
                kv[:, None, None],
                gamma,
                cos[:, None, None],
                sin[:, None, None],
                slots,
                k_rope,
                k_nope,
                epsilon=epsilon,
                cache_mode=mode,
            )

        return fused
    latent, interleaved = layer.kv_lora_rank, layer.kv_layout.rope == "interleaved"
    write = row_writer(cache)

    def plain(kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor) -> None:
        normed, _ = ops.npu_rms_norm(kv[:, :latent], gamma, epsilon)
        write(normed, rotate(kv[:, latent:], cos, sin, interleaved=interleaved), slots)

    return plain


def _rotating(prepared: Prepared, cache: LayerCache, absorb: Kernel) -> Path:
    layer, heads = prepared.layer, prepared.local_heads
    widths = [layer.qk_nope_head_dim, layer.qk_rope_head_dim]
    project, write, turn = _project(prepared), _write(prepared, cache), _rotate_queries(prepared)
    rope_at = cache.rope_rows()
    encode = query_encoder(cache)
    indexed = layer.indexer.kind == "own"

    def path(
        hidden_states: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PreprocessResult:
        cos, sin = rope_at(positions)
        q, kv, q_lora = project(hidden_states)
        q_nope, q_pe = torch.split(q.view(-1, heads, sum(widths)), widths, -1)
        write(kv, cos, sin, slot_mapping)
        absorbed, turned, scale = encode(absorb(q_nope), turn(q_pe, cos, sin))
        return PreprocessResult(absorbed, turned, q_lora if indexed else None, q_nope_scale=scale)

    return path


def _still(prepared: Prepared, cache: LayerCache, absorb: Kernel) -> Path:
    """Return the path of a layer without RoPE."""
    layer, heads, ops = prepared.layer, prepared.local_heads, prepared.ops
    widths = [layer.qk_nope_head_dim, layer.qk_rope_head_dim]
    gamma, epsilon = prepared.weights["kv_a_layernorm"], layer.rms_norm_eps
    project, write, encode = _project(prepared), row_writer(cache), query_encoder(cache)
    latent, indexed = layer.kv_lora_rank, layer.indexer.kind == "own"

    def path(
        hidden_states: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PreprocessResult:
        q, kv, q_lora = project(hidden_states)
        q_nope, q_pe = torch.split(q.view(-1, heads, sum(widths)), widths, -1)
        normed, _ = ops.npu_rms_norm(kv[:, :latent], gamma, epsilon)
        write(normed, kv[:, latent:], slot_mapping)
        absorbed, straight, scale = encode(absorb(q_nope), q_pe.contiguous())
        return PreprocessResult(absorbed, straight, q_lora if indexed else None, q_nope_scale=scale)

    return path


class Absorb:
    """The path of every layer, phase and KV layout."""

    def ops(self, weights: Weights) -> set[str]:
        """Return the ops that a step of this layer calls."""
        found = {"npu::npu_rms_norm", *linear_ops(weights.layer, _projections(weights.layer))}
        if _fused_rope(weights):
            found.add("npu::npu_interleave_rope")
        if _fused_write(weights):
            found.add("npu::npu_kv_rmsnorm_rope_cache")
        return found

    def prepare(self, weights: Weights) -> None:
        """Prepare nothing: a step reads the loaded weights themselves."""

    def bind(self, prepared: Prepared, cache: LayerCache) -> Path:
        """Return the path.

        Raises:
            PrepareError: A projection's quantization is planned only.
        """
        assert prepared.q_absorb is not None
        make = _rotating if prepared.layer.has_rope else _still
        return make(prepared, cache, prepared.q_absorb)
