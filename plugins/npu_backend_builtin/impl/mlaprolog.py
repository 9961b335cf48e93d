"""mlaprolog: ``npu_mla_prolog_v3``, with the copies of the weights that it wants.

Executed: weight_quant_mode 0 (float), 1 (int8 q_b_proj), 2 (int8 throughout), 3 (MXFP8) and 4 (fp8)
with every cache that goes with them. Mode 5 is planned and its schema checked: torch has no dtype
for HiFloat8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npu_backend import PrepareError
from npu_backend.runtime import (
    FORMAT_NZ,
    PACKED_TILE,
    QUANTIZE_OPS,
    LayerCache,
    Prepared,
    PreprocessResult,
    Weights,
    not_executed,
    quantize_input,
)
from npu_backend_builtin.mlaprolog import KV_MODES

__all__ = ["MlaProlog"]

E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
"""Dtype of MX scales; torch has it since 2.7."""
EXECUTED_MODES = (0, 1, 2, 3, 4)
EXECUTED_CACHE_MODES = ("PA_BSND", "PA_NZ")
_KINDS = {2: "w8a8-dynamic", 3: "mxfp8", 4: "fp8"}
"""Quantization of the input by weight_quant_mode; the other modes take it as it is."""
_MODE = "weight_quant_mode="

Path = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PreprocessResult]


def _mode(given: Weights | Prepared) -> int:
    return int(given.offer.mode.removeprefix(_MODE))


def _turned(weights: Weights, rows: torch.Tensor) -> torch.Tensor:
    """Return rows ``(out, in)`` as ``(in, out)`` in FRACTAL_NZ, in storage of their own."""
    return weights.ops.npu_format_cast(rows.t().contiguous(), FORMAT_NZ)


def _query_up(weights: Weights, mode: int) -> torch.Tensor:
    """Return weight_uq_qr; in mode 1 it is the parameter itself, seen as ``(in, out)``, in
    FRACTAL_NZ as an int8 product takes it too: cast in place where the host has not done so."""
    weight = weights["q_b_proj"]
    if mode != 1:
        return _turned(weights, weight)
    seen = weight.t()
    if not seen.is_contiguous():
        raise PrepareError(
            "q_b_proj is not laid out as the op takes it",
            whom=f"{weights.layer}, path, mlaprolog",
            why=(
                "in weight_quant_mode 1 the op reads the parameter itself, as (in, out) row by row",
                f"q_b_proj is {tuple(weight.shape)} with strides {weight.stride()}",
            ),
            remedy="let the host store it transposed, as its int8 matmul wants it: "
            "weight.data = weight.data.t().contiguous().t()",
            code="quant.layout",
        )
    if not weights.ops.is_nz(seen):
        cast = weights.ops.npu_format_cast(seen, FORMAT_NZ)
        seen = weights.relayout("q_b_proj", cast.t()).t()
    return seen


def _cache_options(cache: LayerCache) -> dict[str, Any]:
    """Return the op's arguments that follow from what the cache holds."""
    layout = cache.layout
    if (kv := KV_MODES[layout.dtype]) == 0:
        return {}
    options: dict[str, Any] = {
        "kv_cache_quant_mode": kv,
        "query_quant_mode": int(layout.quantizes_queries),
        "ckvkr_repo_mode": int(layout.packed),
        "quant_scale_repo_mode": int(layout.packed),
        "tile_size": PACKED_TILE,
    }
    for name, factor in (
        ("quant_scale_ckv", cache.latent_factor),
        ("quant_scale_ckr", cache.key_factor),
        ("k_nope_clip_alpha", cache.clip_alpha),
    ):
        if factor is not None:
            options[name] = factor
    return options


class MlaProlog:
    """The fused path of A2, A3 and A5."""

    def ops(self, weights: Weights) -> set[str]:
        """Return the ops that preparing and a step call."""
        kind = _KINDS.get(_mode(weights))
        found = {"npu::npu_mla_prolog_v3", "npu::npu_format_cast"}
        return found if kind is None else {*found, QUANTIZE_OPS[kind]}

    def prepare(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Split fused_qkv_a_proj, turn and cast the projections, make w_kc contiguous.

        Returns:
            ``weight_dq`` (hidden, q_lora_rank), ``weight_uq_qr`` (q_lora_rank, heads * (nope +
            rope)), ``weight_dkv_kr`` (hidden, kv_lora_rank + rope), ``weight_uk`` (heads, nope,
            kv_lora_rank), and but in mode 0 their scales: (1, out) float32, in mode 3 (out, in /
            32) e8m0.

        Raises:
            PrepareError: The mode is planned only, or q_b_proj has the wrong layout for mode 1.
        """
        layer, mode = weights.layer, _mode(weights)
        if mode not in EXECUTED_MODES:
            raise not_executed(
                f"weight_quant_mode {mode}",
                layer,
                "mlaprolog",
                f"executed are {', '.join(map(str, EXECUTED_MODES))}",
                "run layers of the executed modes; the plan and the schema can be looked at",
            )
        if (cache_mode := layer.kv_layout.cache_mode) not in EXECUTED_CACHE_MODES:
            raise not_executed(
                f"cache mode {cache_mode}",
                layer,
                "mlaprolog",
                f"executed are {', '.join(EXECUTED_CACHE_MODES)}",
                "give the layer one of the executed cache modes",
                code="kv.layout",
            )
        rank = layer.q_lora_rank
        assert rank is not None
        fused = weights["fused_qkv_a_proj"]
        made = {
            "weight_dq": _turned(weights, fused[:rank]),
            "weight_uq_qr": _query_up(weights, mode),
            "weight_dkv_kr": _turned(weights, fused[rank:]),
            "weight_uk": weights["w_kc"].contiguous(),
        }
        if mode == 1:
            made["dequant_scale_w_uq_qr"] = weights["q_b_proj.scale"].reshape(1, -1)
        if mode in (2, 4):
            scale = weights["fused_qkv_a_proj.scale"].reshape(1, -1)
            made["dequant_scale_w_dq"] = scale[:, :rank].clone()
            made["dequant_scale_w_dkv_kr"] = scale[:, rank:].clone()
            made["dequant_scale_w_uq_qr"] = weights["q_b_proj.scale"].reshape(1, -1).clone()
        if mode == 3:
            scale = weights["fused_qkv_a_proj.scale"].reshape(fused.shape[0], -1)
            made["dequant_scale_w_dq"] = scale[:rank].clone()
            made["dequant_scale_w_dkv_kr"] = scale[rank:].clone()
            up = weights["q_b_proj"].shape[0]
            made["dequant_scale_w_uq_qr"] = weights["q_b_proj.scale"].reshape(up, -1).clone()
        return made

    def bind(self, prepared: Prepared, cache: LayerCache) -> Path:
        """Return the path."""
        layer, mode = prepared.layer, _mode(prepared)
        rope_at = cache.rope_rows()
        prolog, kind = prepared.ops.npu_mla_prolog_v3, _KINDS.get(mode)
        quantize = None if kind is None else quantize_input(kind, prepared.ops)
        weights = tuple(
            prepared[n] for n in ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr")
        )
        gammas = (prepared.weights["q_a_layernorm"], prepared.weights["kv_a_layernorm"])
        caches, quantizes_queries = (cache.k_nope, cache.k_rope), layer.kv_layout.quantizes_queries
        indexed = layer.indexer.kind == "own"
        options: dict[str, Any] = {
            "rmsnorm_epsilon_cq": layer.rms_norm_eps,
            "rmsnorm_epsilon_ckv": layer.rms_norm_eps,
            "cache_mode": layer.kv_layout.cache_mode,
            "query_norm_flag": indexed,
            "weight_quant_mode": mode,
            **_cache_options(cache),
            **{n: prepared[n] for n in prepared if n.startswith("dequant_scale")},
        }

        def path(
            hidden_states: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
        ) -> PreprocessResult:
            cos, sin = rope_at(positions)
            token_x, by_token = hidden_states.contiguous(), {}
            if quantize is not None:
                token_x, scale = quantize(token_x)
                rows = scale.reshape(scale.shape[0], -1)
                # The quantizing op gives bytes, this one takes the dtype.
                by_token["dequant_scale_x"] = rows.view(E8M0) if mode == 3 else rows
            q_nope, q_pe, q_scale, q_lora, q_lora_scale = prolog(
                token_x,
                *weights,
                *gammas,
                sin,
                cos,
                *caches,
                cache_index=slot_mapping,
                **by_token,
                **options,
            )
            q_nope_scale = q_scale if quantizes_queries else None
            if not indexed:
                return PreprocessResult(q_nope, q_pe, q_nope_scale=q_nope_scale)
            lora_scale = q_lora_scale if mode else None
            return PreprocessResult(q_nope, q_pe, q_lora, lora_scale, q_nope_scale)

        return path
