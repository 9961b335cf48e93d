"""Fake distributions on the path, and what a hook is asked about."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from npu_backend.deployment import Deployment
from npu_backend.hookspecs import hookimpl
from npu_backend.model.records import MlaLayer
from npu_backend.offers import Answer, BmmSpec, Offer, PluginInfo
from npu_backend.registry import PluginRecord, PluginWarning, Registry

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


@pytest.fixture(scope="session")
def register() -> Callable[..., PluginInfo]:
    """Register one function as a plugin of its own."""

    def register(
        registry: Registry,
        function: Callable[..., Any],
        hook: str,
        name: str = "vendor",
        dist: str = "vendor-kit",
        **flags: bool,
    ) -> PluginInfo:
        module = types.ModuleType(name)
        module.implementation = hookimpl(function, specname=hook, **flags)
        return registry.register(module, name=name, dist=dist, version="1")

    return register


@pytest.fixture(scope="session")
def ask(layer: MlaLayer, deployment: Deployment, bmm: BmmSpec) -> Callable[..., Any]:
    """Ask a registry through the hook's typed call."""

    def ask(registry: Registry, hook: str) -> tuple[Answer, ...]:
        if hook == "release_weights":
            return registry.ask_release(layer, deployment, {"w_kc": ()})
        if hook == "select_bmm_kernel":
            return registry.ask_bmm(bmm, deployment)
        return registry.ask_paths(layer, deployment)

    return ask


@pytest.fixture(scope="session")
def answers_to(register: Callable[..., Any], ask: Callable[..., Any]) -> Callable[..., Any]:
    """What comes of an implementation that returns a value, or raises an exception."""

    def answers_to(
        value: object,
        hook: str = "select_bmm_kernel",
        *,
        strict: bool = False,
        raises: BaseException | None = None,
    ) -> tuple[Answer, ...]:
        def implementation() -> object:
            if raises is not None:
                raise raises
            return value

        registry = Registry(strict=strict)
        register(registry, implementation, hook)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)
            return ask(registry, hook)

    return answers_to
