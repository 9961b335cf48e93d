"""Matmuls planned on their own, and kernels bound without a layer."""

from __future__ import annotations

from typing import Any

import pytest

import npu_backend
from npu_backend import Deployment
from npu_backend.api import Backend
from npu_backend.planner import BmmPlan, matmul

T102 = "npu_transpose_batchmatmul[1,0,2]"
T012 = "npu_transpose_batchmatmul[0,1,2]"
BMT = "batch_matmul_transpose"
BMM = "torch.bmm"


@pytest.fixture
def backend() -> Backend:
    """The built-in plugins alone; lines follow the CANN of each deployment."""
    loaded = npu_backend.load(third_party=False)
    return Backend(loaded.registry, loaded.catalog, torch_npu=None)


@pytest.fixture
def plan_bmm(backend: Backend) -> Any:
    """``plan_bmm("v_up", B, K, N, dtype=..., soc=..., cann=...) -> BmmPlan``."""

    def plan(
        site: str, B: int, K: int, N: int, *, matmul_options: Any = None, **said: Any
    ) -> BmmPlan:
        spec = matmul(site, B, K, N, **(matmul_options or {}))
        deployment = {"soc": "A3", "cann": "9.0.0", **said}
        return backend.plan_bmm(spec, Deployment(catalog=backend.catalog, **deployment))

    return plan
