"""Plans from the installed built-ins, with room for a vendor's answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import npu_backend
from npu_backend import Deployment, MlaLayer
from npu_backend.api import Backend
from npu_backend.plan import LayerPlan, ModelPlan


@pytest.fixture
def backend() -> Backend:
    """The built-in plugins alone, as installed, on a machine without torch-npu."""
    loaded = npu_backend.load(third_party=False)
    return Backend(loaded.registry, loaded.catalog, torch_npu=None)


class Planner:
    """Plan a bundled model in one call."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(
        self, model: str, *, read: dict[str, Any] | None = None, **deployment: Any
    ) -> ModelPlan:
        layers = npu_backend.read_model(model, **(read or {}))
        return self.backend.plan(layers, Deployment(**deployment))

    def layers(self, layers: list[MlaLayer], **deployment: Any) -> ModelPlan:
        return self.backend.plan(layers, Deployment(**deployment))

    def vendor(
        self, *hooks: Callable[..., Any], name: str = "acme", dist: str = "acme-npu"
    ) -> None:
        """Register functions named as hooks are, as one vendor's plugin."""
        plugin = type(
            name, (), {f.__name__: staticmethod(npu_backend.hookimpl(f)) for f in hooks}
        )()
        self.backend.registry.register(plugin, name=name, dist=dist, version="1.0")


@pytest.fixture
def plan(backend: Backend) -> Planner:
    return Planner(backend)


def who(plan: LayerPlan, site: str) -> list[tuple[str, list[str], tuple[int, int | None]]]:
    """``(strategy, phases, rows)`` of each entry."""
    return [(e.strategy, [p.value for p in e.phases], e.tokens) for e in plan.table(site)]


def refusals(plan: LayerPlan, strategy: str, site: str | None = None) -> dict[str, str]:
    """Reason codes with messages of everything said against a strategy."""
    return {
        r.code: r.message
        for d in plan.declined
        if d.strategy == strategy and d.site == site
        for r in d.reasons
    }


@pytest.fixture(name="who")
def _who() -> Callable[..., Any]:
    return who


@pytest.fixture(name="refusals")
def _refusals() -> Callable[..., Any]:
    return refusals


def make_layer(**changes: Any) -> MlaLayer:
    """A DeepSeek-V3 layer (facts: 128 heads, ranks 1536 and 512, head dims 128, 64, 128)."""
    values: dict[str, Any] = {
        "layer_id": 0,
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return MlaLayer(**{**values, **changes})


@pytest.fixture(name="make_layer")
def _make_layer() -> Callable[..., MlaLayer]:
    return make_layer
