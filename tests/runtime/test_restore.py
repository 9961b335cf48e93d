"""What was released restorably is back before its first read, and goes again when asked."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager

import pytest
import torch

from npu_backend import Phase, PrepareError, WeightReleasedError, runtime
from npu_backend.model.records import Indexer
from npu_backend.runtime import is_tombstone, release

SWITCH = {"role": "decode", "promises": ["role_switch"], "restore": True}
EXTEND = {"rows": 3, "phase": Phase.EXTEND}
DECODE = {"rows": 3, "phase": Phase.DECODE}
READ_BY_EXTEND = ("fused_qkv_a_proj", "q_b_proj", "w_kc")


def _bound(h, layer=None, **deployment):
    plan = h.plan(layer or h.fused_layer(), **{**SWITCH, **deployment})
    bound = h.bind(plan)
    bound.prepare()
    return bound


def _equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _failing(monkeypatch, of):
    """Let the allocation for the weight number ``of`` fail as a full device does."""
    count, on = [0], release.HostCopy.on

    def full(self, device):
        count[0] += 1
        if count[0] == of:
            raise torch.OutOfMemoryError("NPU out of memory")
        return on(self, device)

    monkeypatch.setattr(release.HostCopy, "on", full)


def test_a_step_of_the_other_role_brings_back_what_it_reads(h, caplog):
    twin, bound = _bound(h), _bound(h)
    bound.release()
    assert set(READ_BY_EXTEND) < set(bound.released)
    with caplog.at_level(logging.WARNING, "npu_backend"):
        assert _equal(h.step(bound, **EXTEND), h.step(twin, **EXTEND))
    # kv_b_proj is for a host's own extend, which restores for itself.
    assert bound.released == ("kv_b_proj",)
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("npu_backend")]
    for name in READ_BY_EXTEND:
        assert name in said
    assert "extend" in said
    assert "bytes" in said


def test_a_step_that_reads_nothing_of_it_brings_nothing_back(h, caplog):
    twin, bound = _bound(h), _bound(h)
    bound.release()
    gone = bound.released
    assert _equal(h.step(bound, **DECODE), h.step(twin, **DECODE))
    assert bound.released == gone
    assert not [r for r in caplog.records if r.name.startswith("npu_backend")]


@pytest.mark.parametrize("indexer", [Indexer(), Indexer("own")])
def test_what_was_brought_back_goes_again_beside_what_never_came_back(h, indexer):
    """Of a layer with an indexer kv_b_proj went for good; of one without it waits for a host."""
    bound = _bound(h, h.fused_layer(indexer=indexer))
    assert {r.name: r.action for r in bound.plan.released()}["kv_b_proj"] == (
        "release" if indexer.kind == "own" else "restore"
    )
    first = bound.release()
    h.step(bound, **EXTEND)
    assert [row.name for row in bound.ledger.rows] == ["kv_b_proj"]
    again = bound.release()
    assert again.agrees
    assert again.freed == first.freed > 0
    assert {r.name for r in again.rows} == {r.name for r in first.rows} == set(bound.released)
    assert bound.release() is again


def test_restore_takes_names(h):
    bound = _bound(h, h.fused_layer(indexer=Indexer("own")))
    bound.release()
    assert bound.restore(["w_kc", "kv_b_proj", "nothing of this name"]) == ("w_kc",)
    assert "w_kc" not in bound.released
    assert {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj"} <= set(bound.released)
    assert set(bound.restore()) == {"fused_qkv_a_proj", "q_b_proj"}


@pytest.mark.parametrize("of", [1, 2, 3])
def test_out_of_memory_fails_the_step_and_leaves_the_layer_as_it_was(h, monkeypatch, of):
    twin, bound = _bound(h), _bound(h)
    ledger = bound.release()
    gone = bound.released
    with monkeypatch.context() as patch:
        _failing(patch, of)
        with pytest.raises(PrepareError, match="cannot be brought back") as caught:
            h.step(bound, **EXTEND)
        assert "out of memory" in str(caught.value)
    assert bound.released == gone
    assert bound.ledger is ledger
    assert _equal(h.step(bound, **DECODE), h.step(twin, **DECODE))
    assert _equal(h.step(bound, **EXTEND), h.step(twin, **EXTEND))


def test_nothing_is_brought_back_into_a_graph_that_is_being_captured(h, monkeypatch):
    bound = _bound(h)
    bound.release()
    gone = bound.released
    monkeypatch.setattr(release, "_is_capturing", lambda device: True)
    with pytest.raises(PrepareError, match="being captured"):
        h.step(bound, **EXTEND)
    assert bound.released == gone


QUANTS = {
    "int8": {"fused_qkv_a_proj": "w8a8-dynamic", "q_b_proj": "w8a8-dynamic"},
    "int8 q_b": {"q_b_proj": "w8a8-dynamic"},
}


@pytest.mark.parametrize("quant", QUANTS)
def test_callables_that_hold_views_of_a_weight_do_not_keep_it(h, quant):
    """A quantized projection takes a turned view of its weight when it is bound."""
    layer = h.fused_layer(quant=QUANTS[quant])
    twin, bound = _bound(h, layer), _bound(h, layer)
    ledger = bound.release()
    assert ledger.agrees
    assert set(bound.released) == {r.name for r in twin.plan.released()}
    assert _equal(h.step(bound, **EXTEND), h.step(twin, **EXTEND))
    assert bound.release().freed == ledger.freed


@pytest.mark.parametrize("quant", QUANTS)
def test_a_cache_that_comes_after_the_release_binds_what_is_there(h, quant):
    plan = h.plan(h.fused_layer(quant=QUANTS[quant]), **SWITCH)
    twin = h.bind(plan)
    twin.prepare()
    bound = runtime.bind(plan, h.weights(plan.layer))
    bound.prepare()
    assert bound.release().agrees
    bound.attach(runtime.LayerCache.allocate(plan.layer, 4, max_positions=64))
    gone = bound.released
    assert _equal(h.step(bound, **DECODE), h.step(twin, **DECODE))
    assert bound.released == gone
    assert _equal(h.step(bound, **EXTEND), h.step(twin, **EXTEND))


def test_a_prepared_name_that_is_the_weight_does_not_keep_it(h):
    """Mode 1: the op's q_b is the loaded one. A prefill worker reads it after a switch only."""
    plan = h.plan(
        h.fused_layer(quant=QUANTS["int8 q_b"]),
        role="prefill",
        host="sglang",
        phases=["extend"],
        promises=["role_switch"],
        restore=True,
        requests=["path=mlaprolog"],
    )
    twin, bound = h.bind(plan), h.bind(plan)
    for layer in (twin, bound):
        layer.prepare()
    assert "mlaprolog@decode" in plan.weight("q_b_proj").readers
    ledger = bound.release()
    assert ledger.agrees
    assert ledger.planned == plan.totals.release + plan.totals.restore
    assert _equal(h.step(bound, **DECODE), h.step(twin, **DECODE))


def test_a_host_shows_its_weights_in_the_planners_form(h):
    """SGLang keeps quantized weights turned; also when a step binds anew."""
    quant = QUANTS["int8"]
    plan = h.plan(h.fused_layer(quant=quant), **SWITCH)
    twin = h.bind(plan)
    twin.prepare()
    weights = h.weights(plan.layer)

    @contextmanager
    def within():
        for name in quant:
            if not is_tombstone(weights[name]):
                weights[name].data = weights[name].data.t()
        yield
        for name in quant:
            if not is_tombstone(weights[name]):
                weights[name].data = weights[name].data.t()

    cache = runtime.LayerCache.allocate(plan.layer, 4, max_positions=64)
    for name in quant:
        weights[name].data = weights[name].data.t()
    bound = runtime.bind(plan, weights, cache, within=within)
    bound.prepare()
    bound.release()
    assert _equal(h.step(bound, **EXTEND), h.step(twin, **EXTEND))
    assert weights["q_b_proj"].shape == (1536, 2 * 192)


def test_a_kernel_alone_brings_back_its_weight(h):
    """A host that owns its forward takes single kernels."""
    plan = h.plan(
        h.fused_layer(),
        role="prefill",
        host="sglang",
        phases=["extend"],
        promises=["role_switch"],
        restore=True,
    )
    twin, bound = h.bind(plan), h.bind(plan)
    for layer in (twin, bound):
        layer.prepare()
    bound.release()
    assert "w_vc" in bound.released
    x = torch.randn(3, 2, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    expected = twin.v_up_for(Phase.DECODE)(x)
    assert torch.equal(bound.v_up_for(Phase.DECODE)(x), expected)
    assert "w_vc" not in bound.released


def test_a_compiled_step_is_refused_by_name_and_brings_nothing_back(h):
    bound = _bound(h)
    bound.release()
    gone = bound.released
    torch._dynamo.reset()
    path = torch.compile(bound.path_for(Phase.EXTEND), backend="eager")
    hidden = torch.zeros(3, 1024, dtype=torch.bfloat16)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Dynamo's own, with ours in its chain
        path(hidden, torch.arange(3), torch.arange(3))
    chain, err = [], caught.value
    while err is not None:
        chain.append(err)
        err = err.__cause__ or err.__context__
    assert any(isinstance(e, WeightReleasedError) for e in chain) or any(
        "WeightReleasedError" in str(e) for e in chain
    )
    assert bound.released == gone


def test_a_callable_that_outlives_its_layer_meets_the_tombstone(h):
    bound = _bound(h)
    bound.release()
    path = bound.path_for(Phase.EXTEND)
    weights = bound.weights
    del bound
    gc.collect()
    with pytest.raises(WeightReleasedError):
        path(torch.zeros(3, 1024, dtype=torch.bfloat16), torch.arange(3), torch.arange(3))
    assert weights
