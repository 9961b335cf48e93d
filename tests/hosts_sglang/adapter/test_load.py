"""From a loaded model to an applied plan, by the hooks that SGLang itself sets."""

from __future__ import annotations

from typing import Any

import pytest
from sglang_world.model import Runner, attentions, build, config_of, published

from npu_backend.hosts.sglang.route import route_of
from npu_backend.runtime import is_tombstone


def _loaded(runner: Runner) -> None:
    """What ``ModelRunner.initialize`` ends with, by its own method with the hook around it."""
    model_runner = pytest.importorskip("sglang.srt.model_executor.model_runner")
    model_runner.ModelRunner.configure_kv_cache_dtype(runner)


def test_the_registered_hooks_are_applied_by_sglang_and_the_plan_is_before_the_pool(
    install: Any, told: Any
) -> None:
    adapter = install(SGLANG_NPU_USE_MLAPO="1")
    with published(disaggregation_mode="decode"):
        model = build(config_of(layers=2))
        runner = Runner(model)
        _loaded(runner)
        session = adapter.sessions[id(model)]
        assert session.ledger.agrees
        for attention in attentions(model).values():
            assert is_tombstone(attention.w_kc), "released before there is a pool"
            assert route_of(attention) is None, "no route before there is a cache"
        runner.pool()
        adapter.after_pool(None, runner)
    for attention in attentions(model).values():
        assert route_of(attention) is not None
    line = next(text for text in told() if "applied" in text)
    assert "2 layers, layers 0-1: mlaprolog in decode,target_verify,idle" in line
    assert f"freed {session.ledger.freed} bytes" in line
    assert session.current_plan().fingerprint in line
