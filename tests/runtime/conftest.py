"""Small layers on real tensors, planned by the built-in plugins or by hand-made answers."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

import npu_backend.runtime as runtime  # before torch: it decides how torch is imported
from npu_backend import Answer, Deployment, Envelope, MlaLayer, Offer, Phase, Release
from npu_backend.offers import PluginInfo
from npu_backend.plan import LayerPlan
from npu_backend.planner import plan_model
from npu_backend.runtime.prove.seeded import seeded_weights
from npu_backend_builtin import absorb, mlapo, mlaprolog, role_release, transpose_bmm

VENDOR = PluginInfo("fake", "fake-dist", "1.0", "fake = fake_plugin")


def _answers(plugin: PluginInfo, records: Any) -> tuple[Answer, ...]:
    if records is None:
        return ()
    return (Answer(plugin, records if isinstance(records, tuple) else (records,)),)


class BuiltIns:
    """Asks the built-in modules, as the registry would, after what a test adds."""

    def __init__(
        self,
        paths: Iterable[Offer] = (),
        q_absorb: Iterable[Offer] = (),
        v_up: Iterable[Offer] = (),
        release: Iterable[str] = (),
    ) -> None:
        self.paths = tuple(paths)
        self.bmm = {"q_absorb": tuple(q_absorb), "v_up": tuple(v_up)}
        self.release = tuple(Release(name, "the test says so") for name in release)

    @staticmethod
    def _ask(module: Any, hook: str, *args: Any) -> tuple[Answer, ...]:
        name = module.__name__.rpartition(".")[2]
        return _answers(PluginInfo(name, "npu-backend", "0.1.0"), getattr(module, hook)(*args))

    def ask_paths(self, layer: Any, deployment: Any) -> tuple[Answer, ...]:
        found = _answers(VENDOR, self.paths)
        for module in (mlaprolog, mlapo, absorb):
            found += self._ask(module, "select_preprocess_path", layer, deployment)
        return found

    def ask_bmm(self, bmm: Any, deployment: Any) -> tuple[Answer, ...]:
        own = _answers(VENDOR, self.bmm[bmm.site])
        return own + self._ask(transpose_bmm, "select_bmm_kernel", bmm, deployment)

    def ask_release(self, layer: Any, deployment: Any, readers: Any) -> tuple[Answer, ...]:
        own = _answers(VENDOR, self.release) if self.release else ()
        return own + self._ask(role_release, "release_weights", layer, deployment, readers)


def make_layer(**changes: Any) -> MlaLayer:
    """A layer that only absorb serves: small, with q_lora and RoPE."""
    base: dict[str, Any] = {
        "layer_id": 7,
        "hidden_size": 64,
        "num_heads": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    }
    return MlaLayer(**{**base, **changes})


def make_fused_layer(**changes: Any) -> MlaLayer:
    """The smallest layer that npu_mla_prolog_v3 takes."""
    base: dict[str, Any] = {
        "hidden_size": 1024,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return make_layer(**{**base, **changes})


def make_plan(layer: MlaLayer | None = None, answers: Any = None, **deployment: Any) -> LayerPlan:
    """Plan one layer; role decode on A3 with CANN 9.1.0 unless said otherwise."""
    said = {"role": "decode", "soc": "A3", "cann": "9.1.0", **deployment}
    plan = plan_model([layer or make_layer()], Deployment(**said), answers or BuiltIns())
    return plan.layers[0]


def make_weights(layer: MlaLayer, parameters: bool = False, tp: int = 1) -> dict[str, torch.Tensor]:
    """Seeded weights; as module parameters where asked."""
    made = seeded_weights(layer, tp).to(torch.device("cpu"))
    if parameters:
        made = {n: torch.nn.Parameter(t, requires_grad=False) for n, t in made.items()}
    return made


class Harness:
    """Everything a test needs, in one fixture."""

    BuiltIns = BuiltIns
    VENDOR = VENDOR
    layer = staticmethod(make_layer)
    fused_layer = staticmethod(make_fused_layer)
    plan = staticmethod(make_plan)
    weights = staticmethod(make_weights)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def plugin(self, **objects: Any) -> str:
        """Make a module ``fake_plugin`` with the given objects; return its name."""
        module = types.ModuleType("fake_plugin")
        for name, value in objects.items():
            setattr(module, name, value)
        self._monkeypatch.setitem(sys.modules, "fake_plugin", module)
        return "fake_plugin"

    def kernel(
        self,
        make: Callable[..., Any],
        *,
        strategy: str = "fast",
        weight: str = "w_vc",
        prepare: Callable[[Any], Mapping[str, Any] | None] = lambda weights: None,
        **offer: Any,
    ) -> Offer:
        """Offer a kernel whose ``bind`` is ``make(prepared)``."""

        class Impl:
            def prepare(self, weights: Any) -> Any:
                return prepare(weights)

            def bind(self, prepared: Any, cache: Any) -> Any:
                return make(prepared)

        name = "Impl_" + "".join(c for c in strategy if c.isalnum())
        if "fake_plugin" in sys.modules:
            setattr(sys.modules["fake_plugin"], name, Impl)
        else:
            self.plugin(**{name: Impl})
        said = {"reads": (weight,), **offer}
        return Offer(strategy=strategy, impl=f"fake_plugin:{name}", **said)

    def bind(
        self,
        plan: LayerPlan | None = None,
        weights: dict[str, torch.Tensor] | None = None,
        cache: runtime.LayerCache | None = None,
        **options: Any,
    ) -> runtime.BoundLayer:
        """Bind a plan to fresh weights and a fresh cache of 4 blocks."""
        plan = plan or make_plan()
        if weights is None:
            weights = make_weights(plan.layer, tp=plan.deployment.attn_tp_size)
        cache = cache or runtime.LayerCache.allocate(plan.layer, 4, max_positions=64)
        return runtime.bind(plan, weights, cache, **options)

    @staticmethod
    def step(
        layer: runtime.BoundLayer, rows: int = 5, phase: Phase = Phase.DECODE, seed: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Run one step; return every result, v_up of q_nope, and both caches."""
        cache = layer.cache
        cache.k_nope.zero_()
        cache.k_rope.zero_()
        generator = torch.Generator().manual_seed(seed)
        described = layer.plan.layer
        hidden = torch.randn(rows, described.hidden_size, generator=generator)
        hidden = hidden.to(getattr(torch, described.dtype))
        result = layer.preprocess(
            hidden, torch.arange(rows) + 3, torch.arange(rows) + 9, phase=phase
        )
        out = layer.v_up_for(phase)(result.q_nope)
        found = (*result, out, cache.k_nope.clone(), cache.k_rope.clone())
        return tuple(t for t in found if t is not None)

    @staticmethod
    def scaled(factor: float) -> Callable[[Any], Any]:
        """Return a ``make`` for :meth:`kernel`: the right product times a factor, which tells who
        multiplied."""

        def make(prepared: Any) -> Any:
            (name,) = prepared.offer.reads
            weight = prepared.weights[name]

            def call(x: torch.Tensor) -> torch.Tensor:
                return torch.einsum("thk,hkn->thn", x, weight) * factor

            return call

        return make

    @staticmethod
    def rows(last: int | None, first: int = 1) -> Envelope:
        return Envelope(tokens=(first, last))


@pytest.fixture
def h(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(monkeypatch)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterable[None]:
    with torch.no_grad():
        yield
