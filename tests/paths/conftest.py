"""Layers with the models' own ranks and head dims, and few heads; plans of the built-in plugins."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from collections.abc import Callable
from typing import Any

import pytest

import npu_backend
from npu_backend import Deployment, MlaLayer, Phase
from npu_backend.plan import LayerPlan

BACKEND = npu_backend.load(third_party=False)


def make_layer(**changes: Any) -> MlaLayer:
    """A layer that every fused path takes in some quantization."""
    base: dict[str, Any] = {
        "layer_id": 3,
        "hidden_size": 2048,
        "num_heads": 2,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return MlaLayer(**{**base, **changes})


def plan_layer(layer: MlaLayer, **deployment: Any) -> LayerPlan:
    """Plan one layer as a decode worker that also extends, by the newest CANN."""
    given: dict[str, Any] = {
        "role": "decode",
        "promises": ["local_prefill"],
        "soc": "A3",
        "cann": "9.2.0",
    }
    return BACKEND.plan([layer], Deployment(**{**given, **deployment})).layers[0]


@pytest.fixture(name="make_layer")
def _make_layer() -> Callable[..., MlaLayer]:
    return make_layer


@pytest.fixture(name="plan_layer")
def _plan_layer() -> Callable[..., LayerPlan]:
    return plan_layer


@pytest.fixture
def backend() -> npu_backend.api.Backend:
    return BACKEND


@pytest.fixture
def internal_formats() -> None:
    """Allow internal formats as hosts do; lines up to 7.3 quietly make ND of NZ otherwise."""
    import torch

    torch.npu.config.allow_internal_format = True


def _prove_path(layer: MlaLayer, path: str, soc: str, **more: str) -> None:
    """Prove a path on the simulated NPU, or that the plan refuses it with a reason."""
    from npu_backend.runtime.prove import prove_layer
    from npu_backend.testing.sim.settings import installed_line

    versions = BACKEND.catalog.versions
    line = installed_line()
    request = f"path={path}{'@nextn' if layer.is_nextn else ''}"
    given = {"soc": soc, "cann": versions.paired_cann(line), "torch_npu": line, **more}
    free = plan_layer(layer, **given)
    refused = [
        reason.code
        for d in free.declined
        if d.strategy == path and d.site is None
        for reason in d.reasons
        if reason.code != "policy.duplicate"
    ]
    if refused:
        # Not legal here: what there is to show is that the plan says so, and why.
        assert path not in [e.strategy for e in free.path]
        return
    plan = plan_layer(layer, **given, requests=[request])
    served = {p for e in plan.path if e.strategy == path for p in e.phases}
    assert served >= {Phase.DECODE}
    proof = prove_layer(plan, device="npu:0", rows=(3,))
    assert proof.passed, [(p.name, p.text) for p in proof.failed]
    ran = {s.phase for s in proof.steps if s.path == path}
    assert ran == {p.value for p in served}


@pytest.fixture
def prove_path() -> Callable[..., None]:
    return _prove_path
