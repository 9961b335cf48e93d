"""Two bound layers on the same parameters: what one still reads, the other does not free."""

from __future__ import annotations

import gc

import pytest
import torch

from npu_backend import WeightReleasedError
from npu_backend.runtime import is_tombstone


def _two(h, **second):
    layer = h.fused_layer()
    first, other = h.plan(layer), h.plan(layer, **second)
    weights = h.weights(layer, parameters=True)
    return h.bind(first, weights), h.bind(other, weights), weights


def test_what_another_layer_reads_is_kept_and_named(h):
    fused, absorb, weights = _two(h, requests=["path=absorb"])
    fused.prepare()
    absorb.prepare()
    before = h.step(absorb)
    ledger = fused.release()
    assert ledger.agrees
    # absorb reads all but kv_b_proj at every step.
    assert [r.name for r in ledger.rows] == ["kv_b_proj"]
    for name in ("fused_qkv_a_proj", "q_b_proj", "w_kc"):
        assert "another bound layer" in fused.plan.weight(name).reasons[0]
        assert not is_tombstone(weights[name])
    assert all(torch.equal(a, b) for a, b in zip(before, h.step(absorb), strict=True))


def test_a_layer_that_is_not_prepared_yet_still_needs_its_originals(h):
    one, two, weights = _two(h)
    one.prepare()
    assert one.release().rows == ()
    two.prepare()
    # Nobody needs them now but the first, which kept them for the second.
    assert two.release().rows == ()
    assert not any(is_tombstone(t) for t in weights.values())


def test_two_of_the_same_plan_release_once(h):
    one, two, _ = _two(h)
    one.prepare()
    two.prepare()
    before = h.step(two)
    assert {r.name for r in one.release().rows} == {r.name for r in two.plan.released()}
    assert all(torch.equal(a, b) for a, b in zip(before, h.step(two), strict=True))
    with pytest.raises(WeightReleasedError, match=r"release\(\) came after another bound layer"):
        two.release()
    assert two.ledger is None


def test_preparing_after_the_release_is_refused_by_name(h):
    one, _, weights = _two(h)
    del _
    gc.collect()
    one.prepare()
    assert one.release().rows
    with pytest.raises(Exception, match="was released before"):
        h.bind(h.plan(h.fused_layer()), weights)


def test_a_layer_that_is_gone_needs_nothing(h):
    one, two, _ = _two(h, requests=["path=absorb"])
    one.prepare()
    two.prepare()
    del two
    gc.collect()
    assert {r.name for r in one.release().rows} > {"q_b_proj", "w_kc"}
