"""``prepare()``: all or nothing, and what it made is what was declared."""

from __future__ import annotations

import pytest
import torch

from npu_backend import Envelope, Offer, PrepareError
from npu_backend.runtime import AliasWarning


def _failing(h, where):
    class Fails:
        def prepare(self, weights):
            if where == "prepare":
                raise ValueError("no room")
            return

        def bind(self, prepared, cache):
            if where == "bind":
                raise ValueError("no room")
            return

    h.plugin(Fails=Fails)
    return Offer(
        strategy="fails",
        impl="fake_plugin:Fails",
        reads=("q_b_proj",),
        uses=("v_up",),
    )


@pytest.mark.parametrize("where", ["prepare", "bind"])
def test_a_failure_leaves_the_layer_as_it_was(h, where):
    offer = _failing(h, where)
    needy = h.kernel(h.scaled(1), strategy="needy", envelope=Envelope(contiguous=True))
    layer = h.layer(w_vc_layout="strided")
    plan = h.plan(layer, answers=h.BuiltIns(paths=[offer], v_up=[needy]))
    weights = h.weights(layer)
    state = {n: (t.data_ptr(), t.stride(), t.clone()) for n, t in weights.items()}
    bound = h.bind(plan, weights)
    with pytest.raises(PrepareError) as caught:
        bound.prepare()
    text = str(caught.value)
    assert "ValueError: no room" in text
    assert "fake (fake-dist 1.0" in text
    assert "layer 7, path, fails" in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert not bound.prepared
    assert bound.plan == plan
    for name, tensor in weights.items():
        pointer, stride, values = state[name]
        assert (tensor.data_ptr(), tensor.stride()) == (pointer, stride)
        assert torch.equal(tensor, values)
    with pytest.raises(PrepareError, match=r"release\(\) came before prepare\(\)"):
        bound.release()


def test_an_interrupt_also_gives_strides_back(h):
    def interrupted(weights):
        raise KeyboardInterrupt

    needy = h.kernel(
        h.scaled(1), strategy="needy", envelope=Envelope(contiguous=True), prepare=interrupted
    )
    layer = h.layer(w_vc_layout="strided")
    weights = h.weights(layer)
    bound = h.bind(h.plan(layer, answers=h.BuiltIns(v_up=[needy])), weights)
    stride = weights["w_vc"].stride()
    with pytest.raises(KeyboardInterrupt):
        bound.prepare()
    assert weights["w_vc"].stride() == stride


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ([1], "returned list, not a mapping"),
        ({"a": 1}, "returned 'a': int"),
        ({1: torch.ones(1)}, "returned 1: Tensor"),
    ],
)
def test_what_prepare_returns_is_a_mapping_of_tensors(h, returned, why):
    offer = h.kernel(lambda p: lambda x: x, prepare=lambda weights: returned)
    with pytest.raises(PrepareError, match=why):
        h.bind(h.plan(answers=h.BuiltIns(v_up=[offer]))).prepare()


def test_what_bind_returns_can_be_called(h):
    offer = h.kernel(lambda prepared: 3)
    with pytest.raises(PrepareError, match="returned int, which cannot be called"):
        h.bind(h.plan(answers=h.BuiltIns(v_up=[offer]))).prepare()


def test_a_second_prepare_does_nothing(h):
    calls = []
    offer = h.kernel(lambda p: lambda x: x, prepare=lambda weights: calls.append(1))
    layer = h.bind(h.plan(answers=h.BuiltIns(v_up=[offer])))
    layer.prepare()
    first = layer.v_up
    layer.prepare()
    assert calls == [1]
    assert layer.v_up is first


@pytest.mark.parametrize("parameters", [False, True])
def test_case_4_a_kernel_that_ignores_strides_gets_its_weight_contiguous_in_place(h, parameters):
    """The same object, name and bytes: neither a copy nor a release."""
    layer = h.layer(w_vc_layout="strided")
    wish = "v_up=batch_matmul_transpose"
    weights = h.weights(layer, parameters)
    before, values = weights["w_vc"], weights["w_vc"].clone()
    assert not before.is_contiguous()
    bound = h.bind(h.plan(layer, requests=wish, max_tokens=64), weights)
    bound.prepare()
    assert weights["w_vc"] is before
    assert before.is_contiguous()
    assert torch.equal(before, values)
    assert isinstance(before, torch.nn.Parameter) == parameters
    assert before.untyped_storage().nbytes() == bound.plan.weight("w_vc").bytes
    assert bound.plan.totals.prepared == 0
    x = torch.randn(3, 2, 32, dtype=torch.bfloat16)
    expected = torch.einsum("thk,hkn->thn", x.float(), values.float())
    torch.testing.assert_close(bound.v_up(x).float(), expected, rtol=1e-2, atol=1e-2)


def test_prepared_copies_are_made_outside_of_inference_mode(h):
    """A host that loads under inference_mode can run steps outside of it."""
    layer = h.bind(h.plan(h.fused_layer()))
    with torch.inference_mode():
        layer.prepare()
    assert not any(
        cell.cell_contents.is_inference()
        for cell in layer.path_for("decode").__closure__
        if isinstance(cell.cell_contents, torch.Tensor)
    )


def _copying(h, returned, **offer):
    return h.kernel(
        h.scaled(1), strategy="copier", prepare=returned, **{"copies": ("w_vc",), **offer}
    )


def _plan(h, offer, **deployment):
    return h.plan(
        answers=h.BuiltIns(v_up=[offer], release=["w_vc"]), requests="v_up=copier", **deployment
    )


def test_declared_copies_are_the_bytes_declared(h):
    offer = _copying(h, lambda w: {"a": w["w_vc"][:1].clone(), "b": w["w_vc"][1:].clone()})
    layer = h.bind(_plan(h, offer))
    layer.prepare()
    assert layer.plan.weight("copier.w_vc").bytes == 3072


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda w: {"a": torch.cat([w["w_vc"], w["w_vc"]])}, 6144),
        (lambda w: {"a": w["w_vc"][:1].clone()}, 1536),
        (lambda w: None, 0),
        (lambda w: {"a": w["w_vc"].clone()[:1]}, None),
    ],
)
def test_other_bytes_than_declared_are_an_error(h, returned, found):
    """A view of a larger storage holds all of it, so that one counts whole."""
    layer = h.bind(_plan(h, _copying(h, returned)))
    if found is None:
        layer.prepare()
        return
    with pytest.raises(PrepareError) as caught:
        layer.prepare()
    assert f"the copies made are {found} bytes, declared are 3072" in str(caught.value)
    assert "copier.w_vc 3072" in str(caught.value)


def test_a_copy_of_another_size_can_be_declared(h):
    offer = _copying(h, lambda w: {"a": w["w_vc"].float()}, copies={"w_vc": 6144})
    layer = h.bind(_plan(h, offer))
    layer.prepare()
    assert layer.plan.totals.prepared == 6144


def test_an_undeclared_copy_is_an_error(h):
    offer = h.kernel(h.scaled(1), prepare=lambda w: {"mine": w["w_vc"].clone()})
    with pytest.raises(PrepareError, match="declared: no copy"):
        h.bind(h.plan(answers=h.BuiltIns(v_up=[offer]))).prepare()


def test_a_copy_that_is_the_original_is_kept_and_counts_no_bytes(h):
    """A cast that returned its input; releasing the original would kill the prepared one."""
    offer = _copying(h, lambda w: {"a": w["w_vc"].contiguous()}, reads=(), reads_once=("w_vc",))

    def make(prepared):
        weight = prepared["a"]
        return lambda x: torch.einsum("thk,hkn->thn", x, weight)

    __import__("fake_plugin").Impl_copier.bind = lambda s, p, c: make(p)
    plan = _plan(h, offer)
    assert plan.weight("w_vc").action == "release"
    layer = h.bind(plan)
    layer.prepare()
    row = layer.plan.weight("w_vc")
    assert row.action == "keep"
    assert row.reasons[0] == "weight.aliased: shares its storage with copier.a"
    assert layer.plan.weight("copier.w_vc").bytes == 0
    assert layer.plan.fingerprint != plan.fingerprint
    before = h.step(layer)
    assert "w_vc" not in [r.name for r in layer.release().rows]
    assert all(torch.equal(a, b) for a, b in zip(before, h.step(layer), strict=True))


def test_a_half_copied_weight_counts_what_was_copied(h):
    offer = _copying(h, lambda w: {"a": w["w_vc"][:1], "b": w["w_vc"][1:].clone()})
    layer = h.bind(_plan(h, offer))
    layer.prepare()
    assert layer.plan.weight("copier.w_vc").bytes == 1536
    assert layer.plan.weight("w_vc").action == "keep"


def test_a_declared_alias_is_as_planned(h):
    offer = h.kernel(
        h.scaled(1), prepare=lambda w: {"a": w["w_vc"].transpose(1, 2)}, aliases={"a": "w_vc"}
    )
    plan = h.plan(answers=h.BuiltIns(v_up=[offer]))
    layer = h.bind(plan)
    layer.prepare()
    assert layer.plan == plan


def test_a_declared_alias_that_is_a_copy_is_told_and_counted(h):
    offer = h.kernel(h.scaled(1), prepare=lambda w: {"a": w["w_vc"].clone()}, aliases={"a": "w_vc"})
    layer = h.bind(h.plan(answers=h.BuiltIns(v_up=[offer])))
    with pytest.warns(AliasWarning, match="declared to share the storage of w_vc and is a copy"):
        layer.prepare()
    row = layer.plan.weight("fast.a")
    assert (row.bytes, row.copy_of, row.dtype) == (3072, "w_vc", "bfloat16")


def test_mlaprolog_prepares_the_bytes_that_its_offer_declares(h):
    for layout in ("strided", "contiguous"):
        layer = h.fused_layer(w_kc_layout=layout)
        bound = h.bind(h.plan(layer))
        bound.prepare()
        copies = {r.name: r.bytes for r in bound.plan.weights if r.copy_of}
        assert set(copies) == {"mlaprolog.fused_qkv_a_proj", "mlaprolog.q_b_proj"} | (
            {"mlaprolog.w_kc"} if layout == "strided" else set()
        )
        made = {id(c.cell_contents): c for c in bound.path_for("decode").__closure__}
        assert made
        assert bound.plan.totals.prepared == sum(copies.values())


def test_case_w_kc_that_is_contiguous_by_accident_is_not_freed(h):
    """The plan expects a strided w_kc and a copy; the "copy" turns out to be the same storage."""
    plan = h.plan(h.fused_layer())
    assert plan.weight("w_kc").action == "release"
    weights = h.weights(plan.layer)
    weights["w_kc"] = weights["w_kc"].contiguous()
    layer = h.bind(plan, weights)
    layer.prepare()
    assert layer.plan.weight("w_kc").action == "keep"
    assert "mlaprolog.weight_uk" in layer.plan.weight("w_kc").reasons[0]
    before = h.step(layer)
    layer.release()
    assert all(torch.equal(a, b) for a, b in zip(before, h.step(layer), strict=True))
