"""CPU references of every op that the project calls, by the documented meaning of each op.

Parameter names and order are those of the newest known TorchNPU line, and of sgl-kernel-npu for its
own two ops. CPU tensors in and out; caches are written in place. Computation is in fp32 and rounds
where the op is documented to round: the references show what an op means, and neither the last bit
of a device's numerics nor its speed.

They share no helper with the code of the paths, nor with the fp32 reference of the layer that
proofs compare with: a mistake in one shows in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from npu_backend.runtime.reference.bmm import batch_matmul_transpose, npu_transpose_batchmatmul
from npu_backend.runtime.reference.formats import get_npu_format, npu_format_cast
from npu_backend.runtime.reference.mlapo import mla_preprocess
from npu_backend.runtime.reference.prolog import npu_mla_prolog_v3, npu_mla_prolog_v3_functional
from npu_backend.runtime.reference.quant import (
    npu_dynamic_mx_quant,
    npu_dynamic_quant,
    npu_quant_matmul,
    npu_quantize,
)
from npu_backend.runtime.reference.rope import (
    npu_interleave_rope,
    npu_kv_rmsnorm_rope_cache,
    npu_rms_norm,
)

__all__ = [
    "REFERENCES",
    "batch_matmul_transpose",
    "get_npu_format",
    "mla_preprocess",
    "npu_dynamic_mx_quant",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_interleave_rope",
    "npu_kv_rmsnorm_rope_cache",
    "npu_mla_prolog_v3",
    "npu_mla_prolog_v3_functional",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_rms_norm",
    "npu_transpose_batchmatmul",
]

REFERENCES: Mapping[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function
    for function in (
        batch_matmul_transpose,
        get_npu_format,
        mla_preprocess,
        npu_dynamic_mx_quant,
        npu_dynamic_quant,
        npu_format_cast,
        npu_interleave_rope,
        npu_kv_rmsnorm_rope_cache,
        npu_mla_prolog_v3,
        npu_mla_prolog_v3_functional,
        npu_quant_matmul,
        npu_quantize,
        npu_rms_norm,
        npu_transpose_batchmatmul,
    )
}
"""Every reference by the op's qualified name, as the catalog writes it."""
