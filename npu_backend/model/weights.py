"""The weights that MLA holds after load: names, shapes, dtypes, bytes per rank."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, prod

from attrs import frozen

from npu_backend.catalog import Catalog
from npu_backend.model.records import MlaLayer

__all__ = ["DTYPE_BYTES", "WeightSpec", "loaded_weights", "nz_castable", "stored"]

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
}

_WEIGHT_DTYPES = {
    "w8a8-static": "int8",
    "w8a8-static-symmetric": "int8",
    "w8a8-dynamic": "int8",
    "w8a16": "int8",
    "mxfp8": "float8_e4m3fn",
    "fp8-block": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
    "hif8": "uint8",
    "w4a8-dynamic": "int8",
    "w4a16": "int8",
}

FP8_BLOCK = 128
"""Rows and columns that share one scale in ``fp8-block`` (``weight_block_size`` of the config)."""
MX_BLOCK = 32
"""Inputs that share one e8m0 scale in ``mxfp8`` (OCP Microscaling Formats, version 1.0)."""


@frozen(cache_hash=True)
class WeightSpec:
    """One weight of one rank.

    Args:
        name: Its name, as every plan uses it.
        shape: ``(out, in)`` of a projection, ``(heads, K, N)`` of ``w_kc`` and ``w_vc``.
        dtype: Name of the dtype as torch has it.
        bytes: Bytes on this rank.
        origin: ``checkpoint``, or ``derived`` where the host makes it while loading.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    origin: str = "checkpoint"


def _scale_bytes(kind: str, rows: int, columns: int) -> tuple[str, int]:
    """Return dtype and bytes of a projection's scales, all of them together."""
    if kind == "w8a8-static":
        # deq_scale float32 and quant_bias int32 a row; input_scale and input_offset one value each.
        return "float32", rows * 8 + 8
    if kind == "w8a8-static-symmetric":
        return "float32", rows * 4 + 4
    if kind == "mxfp8":
        return "float8_e8m0fnu", rows * ceil(columns / MX_BLOCK)
    if kind == "fp8-block":
        return "float32", ceil(rows / FP8_BLOCK) * ceil(columns / FP8_BLOCK) * 4
    return "float32", rows * 4


def stored(kind: str, dtype: str, elements: int) -> tuple[str, int]:
    """Return dtype and bytes of a weight of that quantization, without its scales.

    Args:
        kind: One of :data:`~npu_backend.model.records.QUANT_KINDS`.
        dtype: Dtype of unquantized weights.
        elements: Elements of the weight.
    """
    held = _WEIGHT_DTYPES.get(kind, dtype)
    return held, elements * DTYPE_BYTES[held] // (2 if kind.startswith("w4") else 1)


def _projection(
    layer: MlaLayer, name: str, rows: int, columns: int, shards: int
) -> list[WeightSpec]:
    kind = layer.quant_of(name)
    rows_here = rows // shards
    dtype, size = stored(kind, layer.dtype, rows_here * columns)
    measured = dict(layer.measured)
    if name in measured:
        dtype, size = measured[name].dtype, measured[name].bytes // shards
    specs = [WeightSpec(name, (rows_here, columns), dtype, size)]
    scale = f"{name}.scale"
    if scale in measured:
        row = measured[scale]
        # Scales of rows and of blocks are split as the rows are; one value for all is on each rank.
        here = (row.bytes - row.replicated) // shards + row.replicated
        specs.append(WeightSpec(scale, (here // DTYPE_BYTES[row.dtype],), row.dtype, here))
    elif kind != "none":
        scale_dtype, scale_size = _scale_bytes(kind, rows_here, columns)
        specs.append(
            WeightSpec(scale, (scale_size // DTYPE_BYTES[scale_dtype],), scale_dtype, scale_size)
        )
    return specs


@lru_cache(maxsize=1024)
def _loaded(kind: MlaLayer, attn_tp_size: int) -> tuple[WeightSpec, ...]:
    heads = kind.local_heads(attn_tp_size)
    nope, rope, latent = kind.qk_nope_head_dim, kind.qk_rope_head_dim, kind.kv_lora_rank
    q_rows = kind.num_heads * (nope + rope)
    specs: list[WeightSpec] = []
    if kind.q_lora_rank is None:
        specs += _projection(kind, "q_proj", q_rows, kind.hidden_size, attn_tp_size)
        specs += _projection(kind, "kv_a_proj_with_mqa", latent + rope, kind.hidden_size, 1)
    else:
        rows = kind.q_lora_rank + latent + rope
        specs += _projection(kind, "fused_qkv_a_proj", rows, kind.hidden_size, 1)
        specs += _projection(kind, "q_b_proj", q_rows, kind.q_lora_rank, attn_tp_size)
    kv_rows = kind.num_heads * (nope + kind.v_head_dim)
    specs += _projection(kind, "kv_b_proj", kv_rows, latent, attn_tp_size)
    for name, shape in (
        ("w_kc", (heads, nope, latent)),
        ("w_vc", (heads, latent, kind.v_head_dim)),
    ):
        size = prod(shape) * DTYPE_BYTES.get(kind.bmm_dtype, 1)
        specs.append(WeightSpec(name, shape, kind.bmm_dtype, size, "derived"))
    return tuple(specs)


def loaded_weights(layer: MlaLayer, attn_tp_size: int) -> tuple[WeightSpec, ...]:
    """Return the weights one rank holds after load, in a fixed order.

    ``fused_qkv_a_proj`` and ``kv_a_proj_with_mqa`` are replicated over attention TP; ``q_proj``,
    ``q_b_proj``, ``kv_b_proj``, ``w_kc`` and ``w_vc`` are split by heads. No o_proj, norms or
    indexer weights.

    Raises:
        ModelError: The heads do not divide over ``attn_tp_size``.
    """
    layer.local_heads(attn_tp_size)
    return _loaded(layer.kind, attn_tp_size)


def nz_castable(catalog: Catalog, dtype: str, k: int, n: int) -> str | None:
    """Return why a weight ``(K, N)`` cannot be cast to FRACTAL_NZ, or None where it can.

    A weight that is not castable stays ND (sgl-project/sglang#21209).
    """
    op = "npu_format_cast"
    wide = DTYPE_BYTES.get(dtype, 1) == 1
    k_multiple = catalog.value(op, "k_multiple")
    n_multiple = catalog.value(op, "n_multiple_8bit" if wide else "n_multiple_16bit")
    if DTYPE_BYTES.get(dtype, 1) > 2:
        return f"{dtype} has no FRACTAL_NZ form"
    bad = [
        f"{axis} = {size} is not a multiple of {multiple}"
        for axis, size, multiple in (("K", k, k_multiple), ("N", n, n_multiple))
        if size % multiple
    ]
    return " and ".join(bad) + f" ({dtype})" if bad else None
