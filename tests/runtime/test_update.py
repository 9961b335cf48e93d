"""New weights under a prepared layer: rebuilt, or refused; never silently old (case 19)."""

from __future__ import annotations

import pytest
import torch

from npu_backend import Phase, PrepareError, WeightReleasedError
from npu_backend.runtime import bind

STEP = {"rows": 3, "phase": Phase.DECODE}


def _bound(h, **deployment):
    plan = h.plan(h.fused_layer(), role="decode", **deployment)
    weights = h.weights(plan.layer)
    bound = h.bind(plan, weights)
    bound.prepare()
    return bound, weights


def _write(weights, seed):
    """Write every weight in place, as a loader does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in weights.values():
            values = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensor.copy_(values.to(tensor.dtype))


def _fresh(h, weights, **deployment):
    """The outputs of a layer that was bound to these weights and never to others."""
    plan = h.plan(h.fused_layer(), role="decode", **deployment)
    twin = h.bind(plan, {n: t.detach().clone() for n, t in weights.items()})
    twin.prepare()
    return h.step(twin, **STEP)


def _equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("restore", [False, True])
def test_after_an_update_outputs_are_those_of_the_new_weights(h, restore):
    more = {"promises": ["weight_update"], "restore": restore, "requests": ["path=mlaprolog"]}
    bound, weights = _bound(h, **more)
    ledger = bound.release()
    assert bool(ledger.freed) is restore
    old = h.step(bound, **STEP)
    brought = bound.before_update()
    assert bool(brought) is restore
    _write(weights, 7)
    again = bound.after_update()
    new = h.step(bound, **STEP)
    assert not _equal(old, new)
    if restore:
        assert again.freed == again.planned == ledger.freed
        bound.before_update()
    assert _equal(new, _fresh(h, weights, **more))


def test_between_before_and_after_no_step_runs(h):
    bound, _ = _bound(h, promises=["weight_update"], requests=["path=mlaprolog"])
    bound.before_update()
    with pytest.raises(PrepareError, match="being updated"):
        h.step(bound, **STEP)
    bound.after_update()
    h.step(bound, **STEP)
    assert bound.generation == 1


def test_a_write_without_the_hooks_is_refused_at_the_next_step(h):
    bound, weights = _bound(h, promises=["weight_update"], requests=["path=mlaprolog"])
    h.step(bound, **STEP)
    _write(weights, 7)
    with pytest.raises(PrepareError, match=r"fused_qkv_a_proj.* changed after it was prepared"):
        h.step(bound, **STEP)
    bound.before_update()
    bound.after_update()
    assert _equal(h.step(bound, **STEP), _fresh(h, weights, promises=["weight_update"],
                                                requests=["path=mlaprolog"]))  # fmt: skip


def test_new_memory_behind_a_parameter_is_seen_too(h):
    bound, weights = _bound(h, promises=["weight_update"], requests=["path=mlaprolog"])
    weights["q_b_proj"].data = weights["q_b_proj"].data.clone()
    with pytest.raises(PrepareError, match="q_b_proj changed after it was prepared"):
        h.step(bound, **STEP)


def test_what_was_released_for_good_cannot_be_updated(h):
    bound, weights = _bound(h)
    assert bound.release().freed
    before = h.step(bound, **STEP)
    with pytest.raises(PrepareError, match="released for good"):
        bound.before_update()
    with pytest.raises(WeightReleasedError):
        weights["q_b_proj"].copy_(torch.zeros(1))
    assert _equal(before, h.step(bound, **STEP))


def test_copies_keep_their_addresses(h):
    """So that captured graphs, and callables that somebody kept, read the new values."""
    bound, weights = _bound(h, promises=["weight_update"], requests=["path=mlaprolog"])
    kept = bound.path_for(Phase.DECODE)
    before = {
        (key, name): tensor.data_ptr()
        for key, tensors in bound._made.made.items()
        for name, tensor in tensors.items()
    }
    bound.before_update()
    _write(weights, 7)
    bound.after_update()
    after = {
        (key, name): tensor.data_ptr()
        for key, tensors in bound._made.made.items()
        for name, tensor in tensors.items()
    }
    assert before == after
    assert before
    assert callable(kept)


def test_an_update_that_fails_leaves_steps_refused_and_can_be_repeated(h, monkeypatch):
    bound, weights = _bound(h, promises=["weight_update"], requests=["path=mlaprolog"])
    bound.before_update()
    _write(weights, 7)
    unit = next(u for u in bound._units.values() if u.site is None)
    right = type(unit.strategy).prepare

    def failing(self, given):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(unit.strategy), "prepare", failing)
    with pytest.raises(PrepareError, match="out of memory"):
        bound.after_update()
    with pytest.raises(PrepareError, match="being updated"):
        h.step(bound, **STEP)
    monkeypatch.setattr(type(unit.strategy), "prepare", right)
    bound.after_update()
    h.step(bound, **STEP)


def test_after_without_before_is_refused(h):
    bound, _ = _bound(h)
    with pytest.raises(PrepareError, match="without before_update"):
        bound.after_update()


# --- a layer whose cache comes later ---


def test_weights_go_before_the_cache_exists(h):
    plan = h.plan(h.fused_layer(), role="decode")
    weights = h.weights(plan.layer)
    expected = h.step(_prepared(h, plan, weights), **STEP)
    bound = bind(plan, weights)
    bound.prepare()
    ledger = bound.release()
    assert ledger.agrees
    assert ledger.freed == sum(r.bytes for r in plan.released())
    with pytest.raises(PrepareError, match="before attach"):
        bound.preprocess(
            torch.zeros(1, 1024, dtype=torch.bfloat16),
            torch.tensor([0]),
            torch.tensor([0]),
            phase=Phase.DECODE,
        )
    bound.attach(_cache(plan))
    assert _equal(h.step(bound, **STEP), expected)
    with pytest.raises(PrepareError, match="has its cache already"):
        bound.attach(_cache(plan))


def _prepared(h, plan, weights):
    twin = h.bind(plan, {n: t.detach().clone() for n, t in weights.items()})
    twin.prepare()
    return twin


def _cache(plan):
    from npu_backend.runtime import LayerCache

    return LayerCache.allocate(plan.layer, 4, max_positions=64)
