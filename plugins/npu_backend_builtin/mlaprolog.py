"""mlaprolog: ``npu_mla_prolog_v3``, the fused preprocess that writes the cache itself.

Its limits are the catalog's figures of ``npu_mla_prolog_v3``. It never serves extend: there the
host reads ``q_lora`` and the latent in the open.
"""

from __future__ import annotations

from functools import lru_cache

from npu_backend import (
    Decline,
    Deployment,
    Envelope,
    KvLayout,
    MlaLayer,
    Offer,
    Phase,
    hookimpl,
)
from npu_backend_builtin._limits import Check

STRATEGY = "mlaprolog"
OP = "npu_mla_prolog_v3"

PHASES = tuple(p for p in Phase if p is not Phase.EXTEND)

MODES = {
    ("none", "none"): 0,
    ("none", "w8a8-dynamic"): 1,
    ("w8a8-dynamic", "w8a8-dynamic"): 2,
    ("mxfp8", "mxfp8"): 3,
    ("fp8", "fp8"): 4,
    ("hif8", "hif8"): 5,
}
"""weight_quant_mode by the quantization of (fused_qkv_a_proj, q_b_proj)."""
Q_LORA = {0: "float", 1: "int8", 2: "int8", 3: "mxfp8", 4: "fp8", 5: "hif8"}
"""Format of the op's ``query_norm`` output by weight_quant_mode."""
KV_MODES = {
    "bfloat16": 0,
    "int8": 1,
    "fp8": 1,
    "int8_channel": 2,
    "int8_packed": 3,
    "fp8_packed": 3,
}
"""kv_cache_quant_mode by the cache's dtype: 1 per tensor, 2 per channel, 3 per tile (packed)."""
CACHE_KINDS = {0: (), 1: ("int8",), 2: ("int8",), 3: ("fp8",), 4: ("fp8",), 5: ()}
"""8-bit elements of a quantized cache by weight_quant_mode. Those of mode 5 are HiFloat8."""


def _mode(check: Check, layer: MlaLayer) -> int | None:
    pair = (layer.quant_of("fused_qkv_a_proj"), layer.quant_of("q_b_proj"))
    mode = MODES.get(pair)
    allowed = check.figure("weight_quant_modes") or ()
    if mode is None:
        known = "; ".join(f"{a} with {b}" for a, b in MODES)
        check.add(
            "quant.mode",
            f"fused_qkv_a_proj is {pair[0]} and q_b_proj {pair[1]}; {OP} takes {known}",
        )
    elif allowed and mode not in allowed:
        check.add(
            "quant.mode",
            f"weight_quant_mode {mode} is not among {', '.join(map(str, allowed))} on "
            f"{check.deployment.soc.family}",
            "weight_quant_modes",
        )
    return mode


def _kv_layouts(check: Check, layer: MlaLayer, mode: int | None) -> frozenset[KvLayout]:
    """Return what the op can write with this layer's block size; refuse a bad block size."""
    block = layer.kv_layout.block_size
    low, high = check.figure("block_size_min"), check.figure("block_size_max")
    step = check.figure("block_size_multiple")
    if not low <= block <= high or block % step:
        check.add(
            "kv.layout",
            f"{OP} takes block sizes {low}..{high} in steps of {step}, not {block}",
            "block_size_multiple",
        )
    triples = {(w, kv) for w, kv, _ in check.figure("mode_triples")}
    kinds = ("bfloat16", *CACHE_KINDS.get(-1 if mode is None else mode, ()))
    dtypes = [
        d for d, kv in KV_MODES.items() if (mode, kv) in triples and d.partition("_")[0] in kinds
    ]
    layouts = [
        KvLayout(cache_mode=m, dtype=d, block_size=block, rope="half")
        for m in check.figure("cache_modes")
        for d in dtypes
    ]
    packable = check.figure("packed_cache_modes")
    return frozenset(at for at in layouts if not at.packed or at.cache_mode in packable)


@lru_cache(maxsize=256)
def _answer(layer: MlaLayer, deployment: Deployment) -> Offer | Decline:
    check = Check(OP, deployment)
    check.op_present(f"npu::{OP}")
    check.soc()
    heads = layer.local_heads(deployment.attn_tp_size)
    limit = check.figure("heads_max")
    if heads > limit or heads & (heads - 1):
        check.add(
            "dims.heads",
            f"{OP} takes a power of two up to {limit} local heads, not {heads}",
            "heads_max",
        )
    if layer.q_lora_rank is None:
        check.add("dims.q_lora_rank", f"{OP} needs a q_lora_rank; the layer has q_proj instead")
    else:
        check.member("dims.q_lora_rank", "q_lora_rank", layer.q_lora_rank, "q_lora_rank")
    for name in ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        check.member(f"dims.{name}", name, getattr(layer, name), name)
    if not layer.has_rope:
        check.add("rope.layout", f"{OP} always rotates, and the layer has no RoPE")
    floats = {"activations": layer.dtype, "w_kc": layer.bmm_dtype}
    floats |= {
        name: layer.dtype_of(name)
        for name in ("fused_qkv_a_proj", "q_b_proj")
        if layer.quant_of(name) == "none"
    }
    for what, dtype in floats.items():
        check.member("dtype", f"{what} of", dtype, "dtypes")
    mode = _mode(check, layer)
    layouts = _kv_layouts(check, layer, mode)
    check.fused_promises()
    if check.reasons or mode is None:
        return Decline(strategy=STRATEGY, reasons=check.reasons)

    copies = ["fused_qkv_a_proj"]
    aliases = {}
    if mode == 1:
        # The op takes q_b_proj as it is: the prepared name is the parameter's own storage.
        aliases["weight_uq_qr"] = "q_b_proj"
        aliases["dequant_scale_w_uq_qr"] = "q_b_proj.scale"
    else:
        copies.append("q_b_proj")
    if mode >= 2:
        copies += ["fused_qkv_a_proj.scale", "q_b_proj.scale"]
    if layer.w_kc_layout == "contiguous":
        aliases["weight_uk"] = "w_kc"
    else:
        copies.append("w_kc")
    return Offer(
        strategy=STRATEGY,
        impl="npu_backend_builtin.impl.mlaprolog:MlaProlog",
        envelope=Envelope(phases=PHASES, format="nz"),
        reads_once=copies,
        copies=copies,
        aliases=aliases,
        uses=("v_up",),
        kv_layouts=layouts,
        q_lora=Q_LORA[mode],
        mode=f"weight_quant_mode={mode}",
    )


@hookimpl
def select_preprocess_path(layer: MlaLayer, deployment: Deployment) -> Offer | Decline:
    """Offer mlaprolog where the op takes the layer on this chip and these versions."""
    return _answer(layer.kind, deployment)
