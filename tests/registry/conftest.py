"""Fake distributions on the path, and what a hook is asked about."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from npu_backend.deployment import Deployment
from npu_backend.model.records import MlaLayer
from npu_backend.offers import BmmSpec, Offer
from npu_backend.registry import PluginRecord, Registry

DISTS = Path(__file__).parent / "dists"


@pytest.fixture
def forget_fakes() -> Iterator[None]:
    """Let every test import the fake plugins anew."""
    yield
    for name in [n for n in sys.modules if n.startswith("fake_")]:
        del sys.modules[name]


@pytest.fixture
def load(forget_fakes: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Load the fake built-ins and the named fake distributions, in path order."""

    def load(*folders: str, core: bool = True, **options: Any) -> Registry:
        paths = [str(DISTS / f) for f in (("core", *folders) if core else folders)]
        for path in reversed(paths):
            monkeypatch.syspath_prepend(path)
        options.setdefault("environ", {})
        return Registry.load(distributions=distributions(path=paths), **options)

    return load


@pytest.fixture(scope="session")
def layer() -> MlaLayer:
    return MlaLayer(
        layer_id=3,
        hidden_size=7168,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


@pytest.fixture(scope="session")
def deployment() -> Deployment:
    return Deployment(role="decode")


@pytest.fixture(scope="session")
def bmm(layer: MlaLayer) -> BmmSpec:
    return BmmSpec(layer=layer, site="v_up", B=128, K=512, N=128)


@pytest.fixture(scope="session")
def offer() -> Callable[[str], Offer]:
    return lambda strategy: Offer(strategy=strategy, impl="vendor:Kernel")


@pytest.fixture
def record_of() -> Callable[[Registry, str], PluginRecord]:
    """Find the one record of a plugin by its distribution and name."""

    def record_of(registry: Registry, full: str) -> PluginRecord:
        found = [r for r in registry.plugins if f"{r.info.dist}/{r.info.name}" == full]
        assert len(found) == 1, [str(r.info) for r in registry.plugins]
        return found[0]

    return record_of
