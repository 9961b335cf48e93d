"""Shadow mode: SGLang serves by its own code, and what it does otherwise is told."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from sglang_world.model import Runner, attentions, build, config_of, published
from sglang_world.start import NPU_MODULE, PRE_MODULE
from sglang_world.steps import batch_of, inputs

from npu_backend.hosts.sglang.route import route_of

SHADOW = {"SGLANG_NPU_USE_MLAPO": "1", "NPU_BACKEND_SGLANG_SHADOW": "1"}


@pytest.fixture
def shadowed(install: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A loaded model that is watched, by role; SGLang's own preprocess object is on."""
    functions, pre = import_module(NPU_MODULE), import_module(PRE_MODULE)
    monkeypatch.setattr(functions, "is_mla_preprocess_enabled", lambda: True)

    def make(role: str, *, dsa: bool = True, **more: Any) -> tuple[Any, Runner, Any]:
        adapter = install(**SHADOW, **more)
        runner = Runner(build(config_of(layers=1, dsa=dsa)))
        adapter.after_load(None, runner)
        pool = runner.pool()
        for module in (functions, pre):
            monkeypatch.setattr(module, "get_token_to_kv_pool", lambda: pool)
        return adapter, runner, adapter.shadows[id(runner.model)]

    return make


def step(runner: Runner, mode: str = "DECODE") -> Any:
    (attention,) = attentions(runner.model).values()
    attention.skip_topk = True  # the indexer is not what is watched
    states, positions, slots = inputs(3)
    call = import_module(NPU_MODULE).forward_dsa_prepare_npu
    chosen = torch.zeros((3, 1), dtype=torch.int32, device="npu")
    return call(attention, positions, states, batch_of(mode, slots), None, False, chosen)


def test_nothing_is_bound_routed_or_freed(shadowed: Any, told: Any) -> None:
    with published(disaggregation_mode="decode"):
        adapter, runner, _shadow = shadowed("decode")
    (attention,) = attentions(runner.model).values()
    assert route_of(attention) is None
    assert not adapter.sessions
    assert all(p.untyped_storage().nbytes() for p in attention.parameters())
    assert attention.w_kc.untyped_storage().nbytes()
    assert any("shadow, nothing is changed" in text for text in told())


def test_another_path_than_the_plan_s_is_told_once(shadowed: Any, told: Any) -> None:
    """A 16-bit DSA layer on A3: SGLang runs absorb, the plan has mlaprolog (docs/sglang.md)."""
    with published(disaggregation_mode="decode"):
        _, runner, shadow = shadowed("decode")
        step(runner)
        step(runner)
    lines = [str(d) for d in shadow.differences]
    assert lines == ["layer 0: SGLang ran absorb in decode, the plan says mlaprolog"]
    assert sum("SGLang ran absorb" in text for text in told()) == 1
    assert "the plan releases w_kc, SGLang holds 1048576 bytes" in shadow.report()


def test_a_release_that_a_reachable_step_reads_is_unsafe(
    shadowed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker that prefills locally: SGLang frees w_kc and qkv_a, and extend reads both."""
    pre = import_module(PRE_MODULE)
    monkeypatch.setattr(pre.NPUFusedMLAPreprocess, "uses_mlaprolog", lambda self: True)
    with published(disaggregation_mode="decode"):
        _, runner, shadow = shadowed("decode", NPU_BACKEND_SGLANG_PROMISES="local_prefill")
        step(runner)
    unsafe = {str(d) for d in shadow.differences if d.unsafe}
    assert any("UNSAFE: SGLang freed w_kc, and" in text and "extend" in text for text in unsafe)
    assert any("UNSAFE: SGLang freed fused_qkv_a_proj" in text for text in unsafe)


def test_without_a_reader_the_same_releases_are_no_difference(
    shadowed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pre = import_module(PRE_MODULE)
    monkeypatch.setattr(pre.NPUFusedMLAPreprocess, "uses_mlaprolog", lambda self: True)
    with published(disaggregation_mode="decode"):
        _, runner, shadow = shadowed("decode")
        step(runner)
        (attention,) = attentions(runner.model).values()
        assert attention.w_kc.untyped_storage().nbytes() == 0, "SGLang freed it"
    assert [d for d in shadow.differences if d.unsafe] == []
    assert "the plan releases kv_b_proj, SGLang holds 2097152 bytes" in shadow.report()


def test_a_phase_that_is_not_planned_is_told(shadowed: Any) -> None:
    with published(disaggregation_mode="decode"):
        _, runner, shadow = shadowed("decode")
        shadow.stepped(
            attentions(runner.model)[0], "absorb", batch_of("EXTEND", None).forward_mode, 3
        )
    assert "which is not planned" in shadow.report()
