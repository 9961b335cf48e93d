"""mlapo: ``mla_preprocess`` of sgl-kernel-npu or of vllm-ascend in static W8A8.

Both want the latent's rows before the query's, RoPE rows in half layout, and weights in blocks of
FRACTAL_NZ. They differ in their arguments, and vllm-ascend's can hand the compressed query over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from npu_backend.runtime import (
    FORMAT_NZ,
    LayerCache,
    Prepared,
    PreprocessResult,
    Weights,
    not_executed,
    static_scales,
)

__all__ = ["Mlapo"]

OPS = ("npu::mla_preprocess", "_C_ascend::mla_preprocess")
ASCEND = OPS[1]
CACHE_MODES = {"PA_BSND": "krope_ctkv", "PA_NZ": "nzcache"}
QUANT_MODE = "per_tensor_quant_asymm"
"""The op's default is another one, so it is always given."""
NZ_COLUMNS = 32
"""Inputs in one block of an int8 weight in FRACTAL_NZ (blocks of 16 x 32)."""

Path = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PreprocessResult]


def _half(rope: int) -> torch.Tensor:
    """Return the order that turns interleaved components into half layout."""
    return torch.cat((torch.arange(0, rope, 2), torch.arange(1, rope, 2)))


def _down_order(weights: Weights) -> torch.Tensor:
    """Return the op's order of the rows of fused_qkv_a_proj: latent, RoPE in halves, query."""
    layer = weights.layer
    rank, latent, rope = layer.q_lora_rank or 0, layer.kv_lora_rank, layer.qk_rope_head_dim
    rows = (torch.arange(rank, rank + latent), rank + latent + _half(rope), torch.arange(rank))
    return torch.cat(rows).to(weights.device)


def _up_order(weights: Weights) -> torch.Tensor:
    """Return the op's order of the rows of q_b_proj: in each head nope, then RoPE in halves."""
    layer = weights.layer
    nope, rope = layer.qk_nope_head_dim, layer.qk_rope_head_dim
    head = torch.cat((torch.arange(nope), nope + _half(rope)))
    starts = torch.arange(weights.local_heads).unsqueeze(-1) * (nope + rope)
    return (starts + head).reshape(-1).to(weights.device)


def _blocks(weights: Weights, rows: torch.Tensor) -> torch.Tensor:
    """Return an int8 weight ``(out, in)`` as ``(1, in / 32, out, 32)`` in FRACTAL_NZ."""
    out, width = rows.shape
    parts = rows.view(out, width // NZ_COLUMNS, NZ_COLUMNS).permute(1, 0, 2).unsqueeze(0)
    return weights.ops.npu_format_cast(parts.contiguous(), FORMAT_NZ)


@lru_cache(maxsize=8)
def _zeros(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what the op is given for the input norm and biases it does not use, one for all layers
    (sgl-project/sgl-kernel-npu#78)."""
    return torch.zeros(width, dtype=dtype, device=device)


class Mlapo:
    """The fused int8 path of A2 and A3, at most 1024 rows."""

    def ops(self, weights: Weights) -> tuple[str, ...]:
        """Return the op of the library that the plan chose."""
        return (weights.offer.mode, "npu::npu_format_cast")

    def prepare(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Reorder, block and cast both projections, reorder their scales.

        Returns:
            ``wdqkv`` (1, hidden / 32, out, 32) and ``wuq`` (1, q_lora_rank / 32, heads * (nope +
            rope), 32) int8; for each, numbered 0 and 1, ``descale`` (out,) float32, ``bias`` (out,)
            int32, ``scale`` (1,) float32 and ``offset`` (1,) int32; ``wuk`` (heads, nope,
            kv_lora_rank).

        Raises:
            NotExecutedError: float16, or a quantized cache.
        """
        layer = weights.layer
        if layer.kv_layout.dtype != layer.dtype:
            raise not_executed(
                f"a cache of {layer.kv_layout.dtype}",
                layer,
                "mlapo",
                "executed are the cache modes krope_ctkv and nzcache, without quantization",
                "give the layer a float KV layout, or request another path",
                code="kv.layout",
            )
        if weights.offer.mode not in OPS or layer.dtype != "bfloat16":
            raise not_executed(
                f"{weights.offer.mode} with activations of {layer.dtype}",
                layer,
                "mlapo",
                f"executed are {' and '.join(OPS)} with bfloat16",
                "plan with --dtype bfloat16, or request another path",
            )
        made = {"wuk": weights["w_kc"].contiguous()}
        for number, (target, name, order) in enumerate(
            (
                ("wdqkv", "fused_qkv_a_proj", _down_order(weights)),
                ("wuq", "q_b_proj", _up_order(weights)),
            )
        ):
            scales = static_scales(weights[f"{name}.scale"])
            made[target] = _blocks(weights, weights[name].index_select(0, order))
            made[f"descale{number}"] = scales.deq_scale.index_select(0, order)
            made[f"bias{number}"] = scales.quant_bias.index_select(0, order)
            made[f"scale{number}"] = scales.input_scale.clone()
            made[f"offset{number}"] = scales.input_offset.clone()
        return made

    def bind(self, prepared: Prepared, cache: LayerCache) -> Path:
        """Return the path."""
        layer, preprocess = prepared.layer, prepared.ops.mla_preprocess
        rope_at = cache.rope_rows()
        dtype = getattr(torch, layer.dtype)
        # The op takes the scale in the activations' dtype and the offset as int8.
        scale0, scale1 = (prepared[f"scale{i}"].to(dtype) for i in (0, 1))
        offset0, offset1 = (prepared[f"offset{i}"].to(torch.int8) for i in (0, 1))
        zeros = _zeros(layer.hidden_size, dtype, prepared.device)
        gamma1, gamma2 = prepared.weights["q_a_layernorm"], prepared.weights["kv_a_layernorm"]
        beta1 = _zeros(gamma1.shape[0], dtype, prepared.device)
        wdqkv, descale0, bias0 = (prepared[n] for n in ("wdqkv", "descale0", "bias0"))
        wuq, descale1, bias1 = (prepared[n] for n in ("wuq", "descale1", "bias1"))
        wuk, mode = prepared["wuk"], CACHE_MODES[layer.kv_layout.cache_mode]
        k_nope, k_rope = cache.k_nope, cache.k_rope
        if mode == "nzcache":
            k_nope, k_rope = (_as_blocks(t) for t in (k_nope, k_rope))
        heads, latent, rope = wuk.shape[0], layer.kv_lora_rank, layer.qk_rope_head_dim
        hands_over = layer.indexer.kind == "own" and prepared.offer.q_lora is not None
        rank = gamma1.shape[0]

        def ascend(
            hidden_states: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
        ) -> PreprocessResult:
            cos, sin = rope_at(positions)
            rows = hidden_states.shape[0]
            q_nope = hidden_states.new_empty((rows, heads, latent))
            q_pe = hidden_states.new_empty((rows, heads, rope))
            # Without enable_inner_out the op does not touch it.
            q_lora = hidden_states.new_empty((rows, rank) if hands_over else (1,))
            preprocess(
                hidden_states.contiguous(),
                wdqkv,
                descale0,
                gamma1,
                beta1,
                wuq,
                descale1,
                gamma2,
                cos,
                sin,
                wuk,
                k_nope,
                k_rope,
                slot_mapping.to(torch.int32),
                scale0,
                offset0,
                bias0,
                scale1,
                offset1,
                bias1,
                None,
                None,
                mode,
                QUANT_MODE,
                hands_over,
                q_nope,
                k_nope,
                q_pe,
                k_rope,
                q_lora,
            )
            return PreprocessResult(q_nope, q_pe, q_lora if hands_over else None)

        if prepared.offer.mode == ASCEND:
            return ascend

        def path(
            hidden_states: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
        ) -> PreprocessResult:
            cos, sin = rope_at(positions)
            q_nope = hidden_states.new_empty((hidden_states.shape[0], heads, latent))
            q_pe = hidden_states.new_empty((hidden_states.shape[0], heads, rope))
            preprocess(
                hidden_states.contiguous(),
                zeros,
                zeros,
                wdqkv,
                descale0,
                gamma1,
                beta1,
                wuq,
                descale1,
                gamma2,
                cos,
                sin,
                wuk,
                k_nope,
                k_rope,
                slot_mapping.to(torch.int32),
                scale0,
                offset0,
                bias0,
                scale1,
                offset1,
                bias1,
                cache_mode=mode,
                quant_mode=QUANT_MODE,
                q_out0=q_nope,
                kv_cache_out0=k_nope,
                q_out1=q_pe,
                kv_cache_out1=k_rope,
            )
            # This op does not hand its q_lora over: the indexer computes it from the original.
            return PreprocessResult(q_nope, q_pe)

        return path


def _as_blocks(cache: torch.Tensor) -> torch.Tensor:
    """Return a PA_NZ cache as ``(blocks, width / 16, block_size, 16)``, the same memory."""
    blocks, size, _, width = cache.shape
    return cache.view(blocks, width // 16, size, 16)
