"""A weight whose storage something keeps alive is kept; a release may become a keep, no more."""

from __future__ import annotations

import pytest
import torch

from npu_backend.runtime import LayerCache
from npu_backend.runtime.storages import StorageWatch, holders, shares, unnamed_holders


def _action(layer, name="kv_b_proj"):
    row = layer.plan.weight(name)
    return row.action, row.reasons[0]


def test_weights_with_storages_of_their_own_are_released_as_planned(h):
    plan = h.plan()
    layer = h.bind(plan)
    assert layer.plan is plan
    assert _action(layer)[0] == "release"


def test_another_given_weight_on_the_same_storage(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    weights["w_vc"] = torch.as_strided(weights["kv_b_proj"], (2, 32, 24), (768, 24, 1))
    layer = h.bind(plan, weights)
    assert _action(layer) == ("keep", "weight.aliased: shares its storage with w_vc")


def test_one_object_under_two_names(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    weights["tied"] = weights["kv_b_proj"]
    layer = h.bind(plan, weights)
    assert _action(layer) == ("keep", "weight.aliased: shares its storage with tied")


@pytest.mark.parametrize(
    "alias",
    [
        lambda t: t[:1],
        lambda t: t.t(),
        lambda t: t.data,
        lambda t: t.contiguous().view(-1),
        lambda t: t.to(t.dtype).detach(),
        lambda t: torch.from_dlpack(t[1:]),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
    ],
)
@pytest.mark.parametrize("how", ["by name", "in a list", "not at all"])
def test_whatever_shares_the_storage_keeps_the_weight(h, alias, how):
    plan = h.plan()
    weights = h.weights(plan.layer)
    other = alias(weights["kv_b_proj"])
    options = {
        "by name": {"also_alive": {"draft.kv_b": other}},
        "in a list": {"also_alive": [other]},
        "not at all": {},
    }[how]
    layer = h.bind(plan, weights, **options)
    action, reason = _action(layer)
    assert action == "keep"
    told = {"by name": "draft.kv_b", "in a list": "also_alive[0]"}.get(how)
    assert (told or "nobody named") in reason
    layer.prepare()
    layer.release()
    assert torch.isfinite(other.float()).all()


def test_the_cache_counts_as_alive(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    cache = LayerCache.allocate(plan.layer, 4)
    flat = cache.k_nope.view(-1)[: 80 * 32]
    weights["kv_b_proj"] = flat.view(80, 32)
    layer = h.bind(plan, weights, cache)
    assert _action(layer) == ("keep", "weight.aliased: shares its storage with cache.k_nope")


def test_the_weight_itself_among_the_living_is_no_alias(h):
    plan = h.plan()
    weights = h.weights(plan.layer, parameters=True)
    layer = h.bind(plan, weights, also_alive={"module.kv_b": weights["kv_b_proj"]})
    assert layer.plan is plan


def test_a_view_whose_base_nobody_else_holds_is_its_own(h):
    """As a loader leaves w_kc: transposed, made contiguous, transposed back."""
    plan = h.plan(h.fused_layer())
    weights = h.weights(plan.layer)
    weights["w_kc"] = weights["w_kc"].transpose(1, 2).clone().transpose(1, 2)
    assert weights["w_kc"]._base is not None
    assert h.bind(plan, weights).plan is plan
    base = weights["w_kc"]._base
    assert h.bind(plan, weights).plan.weight("w_kc").action == "keep"
    del base


def test_a_holder_that_only_waits_for_the_cycle_collector_does_not_count(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    ring = [weights["kv_b_proj"].view(-1)]
    ring.append(ring)
    del ring
    assert h.bind(plan, weights).plan is plan


def test_what_the_host_keeps_in_its_own_code_is_expected_there(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    other = weights["kv_b_proj"].untyped_storage()
    assert h.bind(plan, weights, host_keeps_storage=True).plan is plan
    assert other.nbytes()


def test_what_python_sees_on_the_bytes_is_no_code_of_the_hosts(h):
    """Reading a view of a storage that was resized to zero would end the process."""
    plan = h.plan()
    weights = h.weights(plan.layer)
    other = weights["kv_b_proj"].detach()
    unnamed = h.bind(plan, weights, host_keeps_storage=True)
    assert _action(unnamed)[0] == "keep"
    named = h.bind(plan, weights, host_keeps_storage=True, also_alive=[other])
    assert _action(named)[0] == "keep"


def test_a_keep_never_becomes_a_release(h):
    plan = h.plan(promises="export")
    assert plan.weight("kv_b_proj").action == "keep"
    assert h.bind(plan).plan is plan


def test_an_alias_that_appears_after_bind_is_respected_too(h):
    layer = h.bind()
    layer.prepare()
    late = layer.weights["kv_b_proj"].view(-1)
    ledger = layer.release()
    assert ledger.rows == ()
    assert "1 living tensor that nobody named" in _action(layer)[1]
    assert late.shape == (80 * 32,)


def test_the_ranks_compare_the_amended_fingerprint(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    weights["tied"] = weights["kv_b_proj"]
    assert h.bind(plan, weights).plan.fingerprint != plan.fingerprint


def test_storages_are_compared_by_address_too():
    one = torch.zeros(64)
    same = torch.frombuffer(memoryview(one.numpy()), dtype=torch.float32, offset=128)
    assert one.untyped_storage()._cdata != same.untyped_storage()._cdata
    assert shares(one, same)
    assert not shares(one, torch.zeros(64))
    assert holders(one, {"a": same, "b": torch.zeros(1)}) == ("a",)


def test_a_tensor_without_bytes_shares_nothing():
    assert not shares(torch.empty(0), torch.empty(0))
    assert unnamed_holders(torch.empty(0)) == 0
    assert not shares(torch.empty(2, device="meta"), torch.empty(2, device="meta"))


def test_a_watch_sees_a_storage_die():
    tensor = torch.zeros(8)
    view = tensor[2:]
    watch = StorageWatch(tensor)
    assert (watch.nbytes, watch.dead) == (32, False)
    del tensor
    assert not watch.dead
    del view
    assert watch.dead
