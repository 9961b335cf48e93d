"""The adapter inside SGLang's own code."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings of SGLang and its dependencies are not this project's; its own stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="npu_backend")
        yield


@pytest.fixture(scope="session")
def world() -> Any:
    """SGLang's modules on the simulated NPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = import_module("sglang_world.start")
        found = start.start()
        for name in (
            "sglang.srt.models.deepseek_v2",
            "sglang.srt.model_executor.model_runner",
            "sglang.srt.disaggregation.role_switch",
            "sglang.srt.managers.scheduler_components.weight_updater",
        ):
            import_module(name)
    return found


@pytest.fixture
def registry(world: Any) -> Iterator[Any]:
    """SGLang's hook registry; what was patched is as before afterwards."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.reset()
    yield hooks
    for target in list(hooks.HookRegistry._hooks):
        where, _, name = target.rpartition(".")
        owner = resolve_name(where)
        wrapped = original = getattr(owner, name)
        while hasattr(original, "__wrapped__"):
            original = original.__wrapped__
        if wrapped is not original:
            setattr(owner, name, original)
            hooks._propagate_patch(wrapped, original, owner)
    hooks.HookRegistry.reset()


Install = Callable[..., Any]


@pytest.fixture
def install(registry: Any) -> Install:
    """Return ``install(**environment) -> adapter``: hooks registered and applied by SGLang."""
    adapters = import_module("npu_backend.hosts.sglang.adapter")
    gc.collect()  # of the test before: bytes that go now would stand in a ledger

    def make(**environ: str) -> Any:
        adapter = adapters.make_adapter(environ)
        adapter.register(registry.HookRegistry, registry.HookType)
        registry.HookRegistry.apply_hooks()
        return adapter

    return make


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what npu-backend logged so far."""
    caplog.set_level(logging.INFO, logger="npu_backend")

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name.startswith("npu_backend")]

    return lines
