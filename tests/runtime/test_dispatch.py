"""Tables become callables: the bound object itself, or one comparison of rows."""

from __future__ import annotations

import pytest
import torch

from npu_backend import (
    BoundExceededError,
    DeploymentError,
    Envelope,
    Indexer,
    Phase,
    PlanMismatchError,
    PrepareError,
    WeightReleasedError,
)
from npu_backend.runtime.dispatch import Segment, route


def _latent(rows):
    return torch.randn(rows, 2, 32, dtype=torch.bfloat16)


def test_one_unconditional_entry_is_the_very_object_that_bind_returned(h):
    class Callable:
        def __call__(self, x):
            return x

    bound = Callable()
    offer = h.kernel(lambda prepared: bound)
    layer = h.bind(h.plan(answers=h.BuiltIns(v_up=[offer])))
    layer.prepare()
    assert layer.v_up is bound
    assert layer.v_up_for(Phase.DECODE) is bound
    assert layer.v_up_for("idle") is bound


def test_a_path_with_one_unconditional_entry_is_unwrapped_too(h):
    layer = h.bind()
    layer.prepare()
    assert layer.path_for("decode") is layer.path_for("target_verify")
    assert layer.path_for("decode").__module__ == "npu_backend_builtin.impl.absorb"


@pytest.mark.parametrize(("rows", "factor"), [(1, 2), (1024, 2), (1025, 3), (4000, 3)])
def test_two_entries_meet_at_the_last_row_of_the_first(h, rows, factor):
    """Case 3: legal at 1024; at 1025 the next entry, no error."""
    two = h.kernel(h.scaled(2), strategy="two", envelope=h.rows(1024))
    three = h.kernel(h.scaled(3), strategy="three")
    layer = h.bind(h.plan(answers=h.BuiltIns(v_up=[two, three])))
    layer.prepare()
    x = _latent(rows)
    expected = torch.einsum("thk,hkn->thn", x, layer.weights["w_vc"]) * factor
    assert torch.equal(layer.v_up(x), expected)


def test_three_entries_are_nested_comparisons():
    calls = [Segment(8, lambda x: "a"), Segment(64, lambda x: "b"), Segment(None, lambda x: "c")]
    call = route(calls, where="here", phases=[Phase.DECODE], path=False)
    found = [call(torch.empty(rows, 1)) for rows in (1, 8, 9, 64, 65, 1000)]
    assert found == ["a", "a", "b", "b", "c", "c"]


def test_entries_of_one_strategy_side_by_side_need_no_comparison(h):
    plan = h.plan()
    (entry,) = plan.v_up
    from attrs import evolve

    split = plan.evolve(v_up=(evolve(entry, tokens=(1, 9)), evolve(entry, tokens=(10, None))))
    layer = h.bind(split)
    layer.prepare()
    assert layer.v_up.__qualname__.startswith("Transposing.")


def test_rows_above_the_planned_bound_are_an_error_before_anything_is_read(h):
    read = []

    def make(prepared):
        def call(x):
            read.append(x.shape[0])
            return x

        return call

    layer = h.bind(h.plan(answers=h.BuiltIns(v_up=[h.kernel(make)]), max_tokens=16))
    layer.prepare()
    layer.v_up(_latent(16))
    with pytest.raises(BoundExceededError) as caught:
        layer.v_up(_latent(17))
    assert read == [16]
    assert "17 rows in a step that was planned for at most 16" in str(caught.value)
    assert "decode" in str(caught.value)
    with pytest.raises(BoundExceededError, match="layer 7, path"):
        h.step(layer, rows=17)


def test_phases_with_different_bounds_need_the_phase(h):
    layer = h.bind(h.plan(max_tokens={"decode": 8}))
    layer.prepare()
    x = _latent(9)
    with pytest.raises(PlanMismatchError, match="v_up needs phase= in this plan"):
        layer.v_up(x)
    with pytest.raises(BoundExceededError):
        layer.v_up(x, phase=Phase.DECODE)
    out = layer.v_up(x, phase=Phase.TARGET_VERIFY)
    assert out.shape == (9, 2, 24)
    assert torch.equal(layer.v_up_for("target_verify")(x), out)


def test_q_absorb_is_bound_for_each_phase_of_a_path(h):
    """A path is bound once for each q_absorb that its phases have."""
    two = h.kernel(
        h.scaled(2), strategy="two", weight="w_kc", envelope=Envelope(phases=("decode",))
    )
    layer = h.bind(h.plan(answers=h.BuiltIns(q_absorb=[two])))
    layer.prepare()
    decode = h.step(layer)[0]
    verify = h.step(layer, phase=Phase.TARGET_VERIFY)[0]
    torch.testing.assert_close(decode, verify * 2, rtol=2e-2, atol=1e-2)
    q = torch.randn(3, 2, 16, dtype=torch.bfloat16)
    assert not torch.equal(layer.q_absorb_for("decode")(q), layer.q_absorb_for("idle")(q))
    with pytest.raises(PlanMismatchError, match="q_absorb needs phase="):
        layer.q_absorb(q)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_word_that_is_no_phase_is_told_with_the_phases(h, rows):
    layer = h.bind(h.plan(max_tokens={"decode": 8}))
    layer.prepare()
    x, at = torch.zeros(rows, 32, dtype=torch.bfloat16), torch.arange(rows)
    with pytest.raises(DeploymentError, match=r"'decod' is not a phase; did you mean 'decode'"):
        layer.preprocess(x, at, at, phase="decod")
    with pytest.raises(DeploymentError, match="the phases are extend, decode"):
        layer.v_up(_latent(rows), phase="nope")
    assert layer.preprocess(x[:0], at[:0], at[:0], phase="decode").q_nope.shape[0] == 0


def test_a_step_before_prepare_says_so(h):
    layer = h.bind()
    with pytest.raises(PrepareError, match=r"call layer\.prepare\(\) once after bind"):
        h.step(layer)
    with pytest.raises(PrepareError):
        layer.v_up(_latent(2))
    with pytest.raises(PrepareError):
        layer.q_absorb_for("decode")(_latent(2))


def test_an_unreachable_phase_before_a_release_breaks_a_bound(h):
    layer = h.bind()
    layer.prepare()
    with pytest.raises(BoundExceededError, match="a step in phase extend, which was not planned"):
        h.step(layer, phase=Phase.EXTEND)


def test_case_7_extend_after_a_decode_release_is_named_and_the_process_lives(h):
    layer = h.bind(h.plan(h.fused_layer()))
    layer.prepare()
    before = h.step(layer)
    layer.release()
    with pytest.raises(WeightReleasedError) as caught:
        h.step(layer, phase=Phase.EXTEND)
    assert caught.value.layer == 7
    assert "fused_qkv_a_proj" in caught.value.weight
    assert "extend is not among them" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, h.step(layer), strict=True))


def test_case_7_extend_that_was_said_to_be_reachable_is_served_after_the_release(h):
    layer = h.bind(h.plan(h.fused_layer(), promises="local_prefill"))
    layer.prepare()
    layer.release()
    h.step(layer, phase=Phase.EXTEND)
    h.step(layer)


def test_phases_that_the_host_serves_are_left_to_it(h):
    layer = h.bind(h.plan(role="null", host="sglang"))
    layer.prepare()
    with pytest.raises(PlanMismatchError, match="the host serves extend of this layer"):
        h.step(layer, phase=Phase.EXTEND)
    with pytest.raises(PlanMismatchError, match="host:mha, by sglang"):
        layer.v_up_for("extend")(_latent(2))
    h.step(layer)


def test_a_site_that_no_path_uses_has_no_kernel(h):
    layer = h.bind(h.plan(h.fused_layer()))
    layer.prepare()
    with pytest.raises(PlanMismatchError, match="no path uses q_absorb"):
        layer.q_absorb(torch.empty(2, 2, 128))
    with pytest.raises(PlanMismatchError, match="no path in decode uses q_absorb"):
        layer.q_absorb_for("decode")(torch.empty(2, 2, 128))


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.DECODE])
def test_a_step_without_rows_calls_nothing_and_returns_empty_results(h, phase):
    layer = h.bind()
    layer.prepare()
    layer._paths[phase] = None
    result = layer.preprocess(
        torch.empty(0, 64, dtype=torch.bfloat16), torch.arange(0), torch.arange(0), phase=phase
    )
    assert result.q_nope.shape == (0, 2, 32)
    assert result.q_pe.shape == (0, 2, 8)
    assert result.q_lora is None
    assert layer.v_up(result.q_nope).shape == (0, 2, 24)
    assert layer.v_up(result.q_nope).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("quant", "dtype"), [("none", torch.bfloat16), ("w8a8-dynamic", torch.int8)]
)
def test_a_step_without_rows_has_the_q_lora_of_its_path(h, quant, dtype):
    projections = {"fused_qkv_a_proj": quant, "q_b_proj": quant}
    layer = h.fused_layer(quant=projections, indexer=Indexer("own", quant))
    bound = h.bind(h.plan(layer, requests="path=mlaprolog"))
    bound.prepare()
    hidden = torch.empty(0, 1024, dtype=torch.bfloat16)
    result = bound.preprocess(hidden, torch.arange(0), torch.arange(0), phase=Phase.DECODE)
    assert (tuple(result.q_lora.shape), result.q_lora.dtype) == ((0, 1536), dtype)
    assert (result.q_lora_scale is None) == (quant == "none")


@pytest.mark.parametrize("name", ["Transposing", "Explicit", "Custom", "Plain"])
def test_built_in_kernels_take_no_rows_to_their_op(h, name):
    from npu_backend_builtin import transpose_bmm

    request = {
        "Transposing": transpose_bmm.TRANSPOSING,
        "Explicit": transpose_bmm.EXPLICIT,
        "Custom": transpose_bmm.CUSTOM,
        "Plain": transpose_bmm.PLAIN,
    }[name]
    layer = h.bind(h.plan(requests=f"v_up={request}", max_tokens=64))
    layer.prepare()
    assert layer.v_up(_latent(0)).shape == (0, 2, 24)


@pytest.mark.parametrize("name", ["TRANSPOSING", "EXPLICIT", "CUSTOM", "PLAIN"])
def test_every_built_in_kernel_multiplies_head_by_head(h, name):
    from npu_backend_builtin import transpose_bmm

    layer = h.layer(w_vc_layout="strided")
    wish = getattr(transpose_bmm, name)
    plan = h.plan(layer, requests=[f"v_up={wish}", f"q_absorb={wish}"], max_tokens=64)
    bound = h.bind(plan)
    bound.prepare()
    weights = h.weights(layer)
    x = _latent(5)
    expected = torch.einsum("thk,hkn->thn", x.double(), weights["w_vc"].double())
    torch.testing.assert_close(bound.v_up(x).double(), expected, rtol=1e-2, atol=1e-2)
    # At q_absorb the activation is a slice of q, so strided.
    q = torch.randn(5, 2, 24, dtype=torch.bfloat16)[..., :16]
    expected = torch.einsum("thk,hkn->thn", q.double(), weights["w_kc"].double())
    found = bound.q_absorb(q)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
