"""``bind()`` holds the plan against the tensors before anything is prepared."""

from __future__ import annotations

import pytest
import torch

from npu_backend import Envelope, Offer, PlanMismatchError, PrepareError
from npu_backend.runtime import LayerCache, bind


def test_every_difference_between_plan_and_tensors_is_told_at_once(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    del weights["q_b_proj"]
    weights["w_vc"] = weights["w_vc"].float()
    weights["kv_b_proj"] = weights["kv_b_proj"].t().contiguous()
    with pytest.raises(PlanMismatchError) as caught:
        h.bind(plan, weights)
    text = str(caught.value)
    assert "q_b_proj is missing" in text
    assert "w_vc is float32, the plan says bfloat16" in text
    assert "w_vc is 6144 bytes, the plan says 3072" in text
    assert "kv_b_proj is (32, 80), the plan says (80, 32)" in text
    assert "layer 7" in text


def test_a_value_that_is_no_tensor_is_refused(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    weights["w_kc"] = [1.0]
    with pytest.raises(PlanMismatchError, match="w_kc is a list, not a tensor"):
        h.bind(plan, weights)


def test_the_cache_must_be_in_the_layout_of_the_plan(h):
    plan = h.plan()
    other = LayerCache.allocate(h.layer(dtype="float32"), 4)
    with pytest.raises(PlanMismatchError, match="the cache is PA_BSND float32"):
        h.bind(plan, cache=other)


def test_a_rotating_layer_needs_tables(h):
    plan = h.plan()
    whole = LayerCache.allocate(plan.layer, 4)
    bare = LayerCache(layout=whole.layout, k_nope=whole.k_nope, k_rope=whole.k_rope)
    with pytest.raises(PlanMismatchError, match="the cache has no cos table"):
        h.bind(plan, cache=bare)


def test_what_stands_beside_the_plan_is_passed_on(h):
    seen = {}

    def make(prepared):
        seen.update(prepared.weights)
        return lambda x: x

    plan = h.plan(answers=h.BuiltIns(v_up=[h.kernel(make)]))
    weights = h.weights(plan.layer) | {"vendor_table": torch.ones(3)}
    h.bind(plan, weights).prepare()
    assert set(seen) == {"w_vc", "vendor_table", "q_a_layernorm", "kv_a_layernorm"}


@pytest.mark.parametrize(
    ("norm", "given", "told"),
    [
        ("kv_a_layernorm", None, r"kv_a_layernorm is missing: the norm's weight, \(32,\)"),
        ("q_a_layernorm", None, r"q_a_layernorm is missing: the norm's weight, \(48,\)"),
        ("q_a_layernorm", torch.ones(47), r"float32 \(47,\), the layer's is float \(48,\)"),
        ("q_a_layernorm", torch.ones(49), r"float32 \(49,\)"),
        ("kv_a_layernorm", torch.ones(32, dtype=torch.int8), r"int8 \(32,\)"),
        ("kv_a_layernorm", [1.0], "kv_a_layernorm is a list, not a tensor"),
    ],
)
def test_a_norm_that_is_not_the_layers_is_told_before_anything_is_prepared(h, norm, given, told):
    plan = h.plan()
    weights = h.weights(plan.layer)
    del weights[norm]
    if given is not None:
        weights[norm] = given
    with pytest.raises(PlanMismatchError, match=told):
        h.bind(plan, weights)


@pytest.mark.parametrize(
    ("impl", "why"),
    [
        ("no_such_module:Kernel", "No module named 'no_such_module'"),
        ("fake_plugin:Nowhere", "has no attribute 'Nowhere'"),
        ("fake_plugin:Half", "has no bind"),
        ("fake_plugin:Needs", "missing 1 required positional argument"),
    ],
)
def test_an_implementation_that_cannot_be_had_names_its_plugin(h, impl, why):
    class Half:
        def prepare(self, weights):
            return None

    class Needs:
        def __init__(self, argument):
            pass

    h.plugin(Half=Half, Needs=Needs)
    offer = Offer(strategy="fast", impl=impl, reads=("w_vc",))
    with pytest.raises(PrepareError) as caught:
        h.bind(h.plan(answers=h.BuiltIns(v_up=[offer])))
    assert why in str(caught.value)
    assert 'fake (fake-dist 1.0, entry point "fake = fake_plugin")' in str(caught.value)
    assert caught.value.remedy


def test_an_object_is_taken_as_it_is_and_a_class_is_made(h):
    made = []

    class Kernel:
        def __init__(self):
            made.append(self)

        def prepare(self, weights):
            return {}

        def bind(self, prepared, cache):
            return lambda x: x

    instance = Kernel()
    h.plugin(Kernel=Kernel, instance=instance)
    for impl, count in (("fake_plugin:instance", 1), ("fake_plugin:Kernel", 2)):
        offer = Offer(strategy="fast", impl=impl, reads=("w_vc",))
        h.bind(h.plan(answers=h.BuiltIns(v_up=[offer]))).prepare()
        assert len(made) == count


def test_weights_carry_their_context(h):
    seen = {}

    def prepare(weights):
        seen.update(vars(weights), heads=weights.local_heads)
        assert dict(weights)  # an ordinary mapping
        assert "w_vc" in weights
        assert weights.get("nothing") is None

    offer = h.kernel(lambda prepared: lambda x: x, prepare=prepare)
    plan = h.plan(answers=h.BuiltIns(v_up=[offer]))
    h.bind(plan).prepare()
    assert seen["layer"] is plan.layer
    assert seen["deployment"] is plan.deployment
    assert seen["offer"] == offer
    assert seen["site"] == "v_up"
    assert seen["ops"].name == "cpu reference"
    assert seen["device"] == torch.device("cpu")
    assert seen["heads"] == 2


def test_what_an_offer_does_not_declare_it_does_not_see(h):
    offer = h.kernel(lambda p: lambda x: x, prepare=lambda weights: {"a": weights["w_kc"]})
    layer = h.bind(h.plan(answers=h.BuiltIns(v_up=[offer])))
    with pytest.raises(PrepareError, match="does not declare w_kc in reads, reads_once, copies"):
        layer.prepare()


def test_a_path_without_preparation_gets_only_what_it_reads_each_step(h):
    seen = {}

    class Path:
        def prepare(self, weights):
            return {"mine": weights["fused_qkv_a_proj"].clone()}

        def bind(self, prepared, cache):
            seen["prepared"] = set(prepared)
            seen["weights"] = set(prepared.weights)
            seen["q_absorb"] = prepared.q_absorb
            return lambda hidden, positions, slots: None

    h.plugin(Path=Path)
    offer = Offer(
        strategy="mine",
        impl="fake_plugin:Path",
        reads=("q_b_proj",),
        reads_once=("kv_b_proj",),
        copies=("fused_qkv_a_proj",),
        uses=("v_up",),
        envelope=Envelope(phases=("decode", "target_verify", "idle")),
    )
    layer = h.bind(h.plan(answers=h.BuiltIns(paths=[offer])))
    layer.prepare()
    assert seen["prepared"] == {"mine"}
    assert seen["weights"] == {"q_b_proj", "q_a_layernorm", "kv_a_layernorm"}
    assert seen["q_absorb"] is None


def test_weights_of_another_device_than_the_cache_are_refused(h):
    plan = h.plan()
    weights = {n: t.to("meta") for n, t in h.weights(plan.layer).items()}
    with pytest.raises(PlanMismatchError, match="weights and cache are on cpu, meta"):
        h.bind(plan, weights)
    cache = LayerCache.allocate(plan.layer, 4, device="meta")
    with pytest.raises(PlanMismatchError, match="no backend for tensors on meta"):
        bind(plan, weights, cache)


def test_a_released_weight_cannot_be_bound_again(h):
    plan = h.plan()
    weights = h.weights(plan.layer)
    layer = h.bind(plan, weights)
    layer.prepare()
    layer.release()
    with pytest.raises(PlanMismatchError, match="kv_b_proj was released before"):
        h.bind(plan, weights)


def test_an_edited_plan_that_serves_nobody_is_refused(h):
    with pytest.raises(PlanMismatchError, match="serves nobody in decode"):
        h.bind(h.plan().evolve(path=()))
