"""absorb: separate ops with weight absorption. Serves every phase of a layer whose numbers the chip
can compute with.

No limit of a fused op stands in its way: where ``npu_kv_rmsnorm_rope_cache`` or
``npu_interleave_rope`` do not take a layer's dimensions, the step is made of plain ops. What is
left are the chip's own formats: those of each quantized projection, and those of the cache.
"""

from __future__ import annotations

from functools import lru_cache

from npu_backend import Decline, Deployment, MlaLayer, Offer, Reason, hookimpl
from npu_backend_builtin._limits import Check

STRATEGY = "absorb"

QUANTIZE = "npu_dynamic_quant"
MX_QUANTIZE = "npu_dynamic_mx_quant"
MATMUL = "npu_quant_matmul"
FLOAT8 = "float8_e4m3fn"

LINEARS = {
    "w8a8-static": ((MATMUL, "dtypes", "int8"),),
    "w8a8-static-symmetric": ((MATMUL, "dtypes", "int8"),),
    "w8a8-dynamic": ((QUANTIZE, "dst_types", "int8"), (MATMUL, "dtypes", "int8")),
    "w4a8-dynamic": ((QUANTIZE, "dst_types", "int8"),),
    "fp8": ((QUANTIZE, "dst_types", FLOAT8), (MATMUL, "dtypes", FLOAT8)),
    "fp8-block": ((QUANTIZE, "dst_types", FLOAT8), (MATMUL, "dtypes", FLOAT8)),
    "mxfp8": ((MX_QUANTIZE, "dst_types", FLOAT8), (MATMUL, "dtypes", FLOAT8)),
    # HiFloat8 has no figure of its own; it is one of the chip's 8-bit floats.
    "hif8": ((MATMUL, "dtypes", FLOAT8),),
}
"""What a projection of a quantization asks of ops: the op, its figure, and the dtype wanted."""


def _projections(layer: MlaLayer) -> tuple[str, str]:
    if layer.q_lora_rank is None:
        return "q_proj", "kv_a_proj_with_mqa"
    return "fused_qkv_a_proj", "q_b_proj"


def _op_refusals(op: str, deployment: Deployment) -> tuple[Reason, ...]:
    """Refuse an op that the line or the chip lacks, where the catalog says which have it."""
    check = Check(op, deployment)
    check.op_present(f"npu::{op}")
    if "soc" in deployment.catalog.limits[op] and deployment.soc.family not in check.figure("soc"):
        known = ", ".join(check.figure("soc"))
        check.add("quant.mode", f"{op} is an op of {known}, not of {deployment.soc.family}", "soc")
    return tuple(check.reasons)


def _refusals(op: str, figure: str, dtype: str, deployment: Deployment) -> tuple[Reason, ...]:
    """Refuse what an op of this chip does not compute with."""
    refused = _op_refusals(op, deployment)
    if refused:
        return refused
    check, family = Check(op, deployment), deployment.soc.family
    allowed = check.figure(figure)
    if allowed is None:
        check.add("soc.undocumented", f"{op} is not documented for {family}")
    elif dtype not in allowed:
        told = ", ".join(allowed)
        check.add("quant.mode", f"{op} takes {told} on {family}, not {dtype}", figure)
    return tuple(check.reasons)


def _linear(layer: MlaLayer, deployment: Deployment) -> list[Reason]:
    """Return why this chip cannot execute the projections of the layer."""
    found: list[Reason] = []
    for name in _projections(layer):
        kind = layer.quant_of(name)
        for op, figure, dtype in LINEARS.get(kind, ()):
            for reason in _refusals(op, figure, dtype, deployment):
                found.append(Reason(reason.code, f"{name} is {kind}: {reason.message}"))
            dtypes = deployment.value(op, "dtypes") if op != MATMUL else None
            if dtypes is not None and layer.dtype not in dtypes:
                found.append(
                    Reason(
                        "dtype",
                        f"{name} is {kind}: {op} takes activations of {', '.join(dtypes)}, not "
                        f"{layer.dtype} [{deployment.source(op, 'dtypes')}]",
                    )
                )
        if kind == "mxfp8":
            found += _mx_blocks(layer, name, deployment)
    return found


def _mx_blocks(layer: MlaLayer, name: str, deployment: Deployment) -> list[Reason]:
    """Refuse inputs that are no whole pairs of blocks: npu_quant_matmul's scales come in pairs."""
    inputs = layer.q_lora_rank if name == "q_b_proj" else layer.hidden_size
    pair = 2 * deployment.value(MATMUL, "mx_block")
    if inputs is None or inputs % pair == 0:
        return []
    return [
        Reason(
            "quant.layout",
            f"{name} is mxfp8: its scales are (out, in / {pair}, 2), and its {inputs} inputs are "
            f"no multiple of {pair} [{deployment.source(MATMUL, 'mx_block')}]",
        )
    ]


def _cache(layer: MlaLayer, deployment: Deployment) -> list[Reason]:
    """Return why this chip cannot write the layer's cache."""
    if layer.kv_layout.latent_dtype != FLOAT8:
        return []
    return [
        Reason("kv.layout", f"the cache is {layer.kv_layout.dtype}: {reason.message}")
        for reason in _refusals(QUANTIZE, "dst_types", FLOAT8, deployment)
    ]


@lru_cache(maxsize=256)
def _answer(layer: MlaLayer, deployment: Deployment) -> Offer | Decline:
    if reasons := (*_linear(layer, deployment), *_cache(layer, deployment)):
        return Decline(strategy=STRATEGY, reasons=tuple(dict.fromkeys(reasons)))
    reads = _projections(layer)
    scales = [f"{name}.scale" for name in reads if layer.quant_of(name) != "none"]
    return Offer(
        strategy=STRATEGY,
        impl="npu_backend_builtin.impl.absorb:Absorb",
        reads=(*reads, *scales),
        uses=("q_absorb", "v_up"),
        q_lora="float",
    )


@hookimpl
def select_preprocess_path(layer: MlaLayer, deployment: Deployment) -> Offer | Decline:
    """Offer absorb wherever the chip has the number formats of the layer."""
    return _answer(layer.kind, deployment)
