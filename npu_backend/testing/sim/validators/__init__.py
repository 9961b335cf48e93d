"""Limits of each op, callable without memory and without torch.

Every kernel of the simulated NPU calls its validator first. Figures come from the catalog.
"""

from npu_backend.testing.sim.validators.bmm import batch_matmul_transpose, npu_transpose_batchmatmul
from npu_backend.testing.sim.validators.mlapo import mla_preprocess
from npu_backend.testing.sim.validators.prolog import (
    npu_mla_prolog,
    npu_mla_prolog_v2,
    npu_mla_prolog_v3,
)
from npu_backend.testing.sim.validators.quant import (
    castable,
    npu_dynamic_mx_quant,
    npu_dynamic_quant,
    npu_format_cast,
    npu_quant_matmul,
    npu_quantize,
)
from npu_backend.testing.sim.validators.rope import (
    npu_interleave_rope,
    npu_kv_rmsnorm_rope_cache,
    npu_rms_norm,
)

__all__ = [
    "batch_matmul_transpose",
    "castable",
    "mla_preprocess",
    "npu_dynamic_mx_quant",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_interleave_rope",
    "npu_kv_rmsnorm_rope_cache",
    "npu_mla_prolog",
    "npu_mla_prolog_v2",
    "npu_mla_prolog_v3",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_rms_norm",
    "npu_transpose_batchmatmul",
]
