"""Every built-in passes the suites that a vendor's plugin has to pass."""

from __future__ import annotations

from npu_backend.testing import BmmKernelConformance
from npu_backend_builtin import transpose_bmm


class TestTransposing(BmmKernelConformance):
    plugin = transpose_bmm
    strategy = transpose_bmm.TRANSPOSING
    sites = ("v_up", "q_absorb")
    shapes = ((4, 128, 256),)
    dtypes = ("bfloat16", "float16", "float32")
