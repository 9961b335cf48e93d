"""The compressed query from original weights, for an indexer whose path hands none over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from npu_backend.errors import PlanMismatchError, PrepareError, WeightReleasedError
from npu_backend.plan import LayerPlan
from npu_backend.runtime.ops import ops_for
from npu_backend.runtime.projections import linear, linear_ops

__all__ = ["compressed_query"]

_WEIGHT, _GAMMA = "fused_qkv_a_proj", "q_a_layernorm"


def compressed_query(
    plan: LayerPlan, weights: Mapping[str, torch.Tensor], device: torch.device, *, prepared: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``(tokens, hidden_size) -> (tokens, q_lora_rank)``, normed, in the layer's dtype.

    The whole of ``fused_qkv_a_proj`` is multiplied, as hosts do: quantized, its rows cannot be
    taken apart without a copy.

    Raises:
        PrepareError: The layer is not prepared.
        PlanMismatchError: The layer has ``q_proj`` instead.
        WeightReleasedError: The plan releases the weight.
    """
    layer, whom = plan.layer, f"{plan.layer}, indexer"
    if not prepared:
        raise PrepareError(
            "a compressed query was asked for before prepare()",
            whom=whom,
            why="no op is checked yet",
            remedy="call layer.prepare() once after bind()",
        )
    if layer.q_lora_rank is None:
        raise PlanMismatchError(
            "the layer has no compressed query",
            whom=whom,
            why="its queries come from q_proj",
            remedy="ask layers that have a q_lora_rank",
        )
    row = next(r for r in plan.weights if r.name == _WEIGHT)
    if row.action != "keep":
        raise WeightReleasedError(
            f"a compressed query was asked for, and the plan has {_WEIGHT} go ({row.action})",
            layer=plan.layer_id,
            weight=_WEIGHT,
            why="by the plan no indexer reads it: the path hands over q_lora in the format that "
            "wq_b takes, or the layer has no indexer of its own",
            remedy="take q_lora from the path's result; or describe the layer's indexer as it is",
        )
    ops = ops_for(device, plan.deployment)
    ops.check({"npu::npu_rms_norm", *linear_ops(layer, (_WEIGHT,))}, whom)
    project = linear(_WEIGHT, layer, weights, ops, "indexer")
    rank, gamma, epsilon = layer.q_lora_rank, weights[_GAMMA], layer.rms_norm_eps

    def compressed(hidden_states: torch.Tensor) -> torch.Tensor:
        low = project(hidden_states)[:, :rank].contiguous()
        return ops.npu_rms_norm(low, gamma, epsilon)[0]

    return compressed
