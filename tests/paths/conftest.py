"""Layers with the models' own ranks and head dims, and few heads; plans of the built-in plugins."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from collections.abc import Callable
from typing import Any

import pytest

import npu_backend
from npu_backend import Deployment, MlaLayer
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
