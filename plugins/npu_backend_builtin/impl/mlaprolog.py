"""mlaprolog: ``npu_mla_prolog_v3``, with the copies of the weights that it wants.

Executed: weight_quant_mode 0 (float), 1 (int8 q_b_proj) and 2 (int8 throughout) with a float cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npu_backend import PrepareError
from npu_backend.runtime import FORMAT_NZ, LayerCache, Prepared, PreprocessResult, Weights
from npu_backend_builtin.impl._linear import not_executed

__all__ = ["MlaProlog"]

EXECUTED_MODES = (0, 1, 2)
_MODE = "weight_quant_mode="

Path = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PreprocessResult]


def _mode(given: Weights | Prepared) -> int:
    return int(given.offer.mode.removeprefix(_MODE))


def _turned(weights: Weights, rows: torch.Tensor) -> torch.Tensor:
    """Return rows ``(out, in)`` as ``(in, out)`` in FRACTAL_NZ, in storage of their own."""
    return weights.ops.npu_format_cast(rows.t().contiguous(), FORMAT_NZ)


def _query_up(weights: Weights, mode: int) -> torch.Tensor:
    """Return weight_uq_qr; in mode 1 it is the parameter itself, seen as ``(in, out)``."""
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
    return seen


class MlaProlog:
    """The fused path of A2, A3 and A5."""

    def ops(self, weights: Weights) -> set[str]:
        """Return the ops that preparing and a step call."""
        found = {"npu::npu_mla_prolog_v3", "npu::npu_format_cast"}
        return found | {"npu::npu_dynamic_quant"} if _mode(weights) == 2 else found

    def prepare(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Split fused_qkv_a_proj, turn and cast the projections, make w_kc contiguous.

        Returns:
            ``weight_dq`` (hidden, q_lora_rank), ``weight_uq_qr`` (q_lora_rank, heads * (nope +
            rope)), ``weight_dkv_kr`` (hidden, kv_lora_rank + rope), ``weight_uk`` (heads, nope,
            kv_lora_rank), and in modes 1 and 2 their scales, (1, out) float32.

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
        if mode == 2:
            scale = weights["fused_qkv_a_proj.scale"].reshape(1, -1)
            made["dequant_scale_w_dq"] = scale[:, :rank].clone()
            made["dequant_scale_w_dkv_kr"] = scale[:, rank:].clone()
            made["dequant_scale_w_uq_qr"] = weights["q_b_proj.scale"].reshape(1, -1).clone()
        return made

    def bind(self, prepared: Prepared, cache: LayerCache) -> Path:
        """Return the path."""
        layer, mode = prepared.layer, _mode(prepared)
        cos_table, sin_table = cache.tables()
        prolog, quantize = prepared.ops.npu_mla_prolog_v3, prepared.ops.npu_dynamic_quant
        weights = tuple(
            prepared[n] for n in ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr")
        )
        gammas = (prepared.weights["q_a_layernorm"], prepared.weights["kv_a_layernorm"])
        caches = (cache.k_nope, cache.k_rope)
        indexed = layer.indexer.kind == "own"
        options: dict[str, Any] = {
            "rmsnorm_epsilon_cq": layer.rms_norm_eps,
            "rmsnorm_epsilon_ckv": layer.rms_norm_eps,
            "cache_mode": layer.kv_layout.cache_mode,
            "query_norm_flag": indexed,
            "weight_quant_mode": mode,
            **{n: prepared[n] for n in prepared if n.startswith("dequant_scale")},
        }

        def path(
            hidden_states: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
        ) -> PreprocessResult:
            cos = cos_table.index_select(0, positions)
            sin = sin_table.index_select(0, positions)
            token_x, by_token = hidden_states.contiguous(), {}
            if mode == 2:
                token_x, scale = quantize(token_x)
                by_token["dequant_scale_x"] = scale.unsqueeze(-1)
            q_nope, q_pe, _, q_lora, q_lora_scale = prolog(
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
            if not indexed:
                return PreprocessResult(q_nope, q_pe)
            return PreprocessResult(q_nope, q_pe, q_lora, q_lora_scale if mode else None)

        return path
