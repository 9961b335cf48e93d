"""absorb: separate ops with weight absorption. Serves every layer, phase and KV layout.

No limit of an op stands in its way: where ``npu_kv_rmsnorm_rope_cache`` or ``npu_interleave_rope``
do not take a layer's dimensions, the step is made of plain ops.
"""

from __future__ import annotations

from functools import lru_cache

from npu_backend import Deployment, MlaLayer, Offer, hookimpl

STRATEGY = "absorb"


@lru_cache(maxsize=256)
def _offer(layer: MlaLayer) -> Offer:
    if layer.q_lora_rank is None:
        reads = ("q_proj", "kv_a_proj_with_mqa")
    else:
        reads = ("fused_qkv_a_proj", "q_b_proj")
    scales = [f"{name}.scale" for name in reads if layer.quant_of(name) != "none"]
    return Offer(
        strategy=STRATEGY,
        impl="npu_backend_builtin.impl.absorb:Absorb",
        reads=(*reads, *scales),
        uses=("q_absorb", "v_up"),
        q_lora="float",
    )


@hookimpl
def select_preprocess_path(layer: MlaLayer, deployment: Deployment) -> Offer:
    """Offer absorb for every layer."""
    return _offer(layer.kind)
