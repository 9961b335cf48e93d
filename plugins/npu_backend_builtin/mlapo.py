"""mlapo: the fused int8 ``mla_preprocess`` of a kernel library, at most 1024 rows.

sgl-kernel-npu and vllm-ascend each register their own op of that name; the two are not
interchangeable, and the chosen kernel library decides which one is meant.
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

STRATEGY = "mlapo"
OP = "mla_preprocess"
CAST = "npu_format_cast"
OPS = {"sgl-kernel-npu": "npu::mla_preprocess", "vllm-ascend": "_C_ascend::mla_preprocess"}
FIGURES = {"vllm-ascend": OPS["vllm-ascend"]}
"""Libraries whose op has figures of its own; the others are measured by sgl-kernel-npu's."""
QUANT_MODE = "per_tensor_quant_asymm"
"""The op's mode for static W8A8."""
CACHE_MODES = {"krope_ctkv": "PA_BSND", "nzcache": "PA_NZ"}

PHASES = tuple(p for p in Phase if p is not Phase.EXTEND)
QUANT = "w8a8-static"
SYMMETRIC = "w8a8-static-symmetric"
"""Static int8 without ModelSlim's offset, deq_scale and quant_bias (compressed-tensors)."""


def _variants(check: Check, layer: MlaLayer, key: str) -> list[str]:
    """Return the cache modes that vllm-ascend's op has a kernel for, in the layer's dtype."""
    modes = check.figure(key).get(layer.dtype, {}).get(QUANT_MODE, [])
    return [CACHE_MODES[m] for m in modes if m in CACHE_MODES]


def _kv_layouts(check: Check, layer: MlaLayer) -> frozenset[KvLayout]:
    if check.knows("variants"):
        # Block sizes come from the tensors; a cache in int8 is of the op's dynamic mode.
        size = layer.kv_layout.block_size
        return frozenset(
            KvLayout(cache_mode=m, dtype=layer.dtype, block_size=size, rope="half")
            for m in _variants(check, layer, "variants")
        )
    block = layer.kv_layout.block_size
    high, also = check.figure("block_size_max"), check.figure("block_size_also")
    if block > high and block not in also:
        check.add(
            "kv.layout",
            f"{OP} takes block sizes up to {high}, or {', '.join(map(str, also))}, not {block}",
            "block_size_max",
        )
    modes = [
        m
        for m in check.figure("cache_modes")
        if m != "PA_NZ" or block == check.figure("nz_block_size")
    ]
    layouts = {
        KvLayout(cache_mode=m, dtype=layer.dtype, block_size=block, rope="half") for m in modes
    }
    if "PA_NZ" in modes:
        layouts.add(KvLayout(cache_mode="PA_NZ", dtype="int8", block_size=block, rope="half"))
    return frozenset(layouts)


def _q_lora(check: Check, layer: MlaLayer) -> str | None:
    """Return how the op hands ``q_lora`` out: only vllm-ascend's can (``enable_inner_out``)."""
    if not check.knows("inner_out_variants"):
        return None
    modes = _variants(check, layer, "inner_out_variants")
    return "float" if layer.kv_layout.cache_mode in modes else None


def _dims(check: Check, layer: MlaLayer) -> None:
    """Refuse sizes that the op has built in; vllm-ascend's takes more of them from the tensors."""
    if check.knows("hidden_size_max"):
        low, high = check.figure("hidden_size_min"), check.figure("hidden_size_max")
        if not low <= layer.hidden_size <= high:
            check.add(
                "dims.hidden_size",
                f"{OP} takes hidden_size {low}..{high}, not {layer.hidden_size}",
                "hidden_size_max",
            )
    if layer.q_lora_rank is None:
        check.add("dims.q_lora_rank", f"{OP} needs a q_lora_rank; the layer has q_proj instead")
    for name in ("q_lora_rank", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"):
        if getattr(layer, name) is not None and check.knows(name):
            check.member(f"dims.{name}", name, getattr(layer, name), name)
    inner = check.deployment.value(CAST, "n_multiple_8bit")
    for name in ("hidden_size", "q_lora_rank"):
        size = getattr(layer, name)
        if size is not None and size % inner:
            source = check.deployment.source(CAST, "n_multiple_8bit")
            check.add(
                f"dims.{name}",
                f"{OP} takes int8 weights in blocks of {inner} inputs, and {name} is {size} "
                f"[{source}]",
            )


@lru_cache(maxsize=256)
def _answer(layer: MlaLayer, deployment: Deployment) -> Offer | Decline:
    check = Check(FIGURES.get(deployment.kernels.name, OP), deployment)
    check.soc()
    check.library_op(OPS)
    _dims(check, layer)
    if not layer.has_rope:
        check.add("rope.layout", f"{OP} always rotates, and the layer has no RoPE")
    for what, dtype in (("activations", layer.dtype), ("w_kc", layer.bmm_dtype)):
        check.member("dtype", f"{what} of", dtype, "dtypes")
    # The op has no parameter for it: another epsilon would give other numbers without an error.
    check.member("model.numerics", "rms_norm_eps", layer.rms_norm_eps, "rms_norm_eps")
    wrong = [
        f"{name} is {kind}"
        for name in ("fused_qkv_a_proj", "q_b_proj")
        if (kind := layer.quant_of(name)) not in (QUANT, SYMMETRIC)
    ]
    bare = [name for name in ("fused_qkv_a_proj", "q_b_proj") if layer.quant_of(name) == SYMMETRIC]
    if bare:
        check.add(
            "quant.layout",
            f"{OP} takes input_offset, deq_scale and quant_bias as well; {' and '.join(bare)} "
            "have an input_scale only",
        )
    if wrong:
        check.add("quant.mode", f"{OP} takes {QUANT} projections; " + ", ".join(wrong))
    layouts = _kv_layouts(check, layer)
    check.fused_promises()
    if check.reasons:
        return Decline(strategy=STRATEGY, reasons=check.reasons)

    copies = ["fused_qkv_a_proj", "fused_qkv_a_proj.scale", "q_b_proj", "q_b_proj.scale"]
    aliases = {}
    if layer.w_kc_layout == "contiguous":
        aliases["wuk"] = "w_kc"
    else:
        copies.append("w_kc")
    return Offer(
        strategy=STRATEGY,
        impl="npu_backend_builtin.impl.mlapo:Mlapo",
        envelope=Envelope(phases=PHASES, tokens=(1, check.figure("tokens_max"))),
        reads_once=copies,
        copies=copies,
        aliases=aliases,
        uses=("v_up",),
        kv_layouts=layouts,
        q_lora=_q_lora(check, layer),
        mode=OPS[deployment.kernels.name],
    )


@hookimpl
def select_preprocess_path(layer: MlaLayer, deployment: Deployment) -> Offer | Decline:
    """Offer mlapo for layers in static W8A8 of the dimensions that the op has built in."""
    return _answer(layer.kind, deployment)
