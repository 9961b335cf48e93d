"""Planted faults: each must turn the right claim red, and nothing may be swallowed."""

from __future__ import annotations

import types

import pytest
import torch
from attrs import evolve

from npu_backend import Phase
from npu_backend.runtime.bound import BoundLayer
from npu_backend.runtime.ledger import Ledger
from npu_backend.runtime.prove import prove_layer, prove_model
from npu_backend.runtime.prove.records import LayerProof, RunResult
from npu_backend.runtime.prove.release_claims import prove_released, prove_unreachable
from npu_backend.runtime.prove.tolerance import relative_error, worst_token
from npu_backend_builtin.impl.absorb import Absorb


def red(proof):
    """Names of the claims that failed."""
    assert not proof.passed
    return {p.name for p in proof.failed}


# --- kernels -----------------------------------------------------------------------------------


def kernel_of(change):
    class Planted:
        calls = 0

        def prepare(self, weights):
            return None

        def bind(self, prepared, cache):
            w_vc = prepared.weights["w_vc"]

            def kernel(x):
                Planted.calls += 1
                return change(torch.einsum("thl,hlv->thv", x.float(), w_vc.float()), Planted.calls)

            return kernel

    return Planted


def prove_with_kernel(tiny, plan_of, plant, change, **kwargs):
    kernel = plant(kernel_of(change), reads=["w_vc"])
    plan = plan_of(tiny(), role="decode", kernels=[kernel]).layers[0]
    assert plan.v_up[0].strategy == "Planted"
    return prove_layer(plan, rows=(1, 4), **kwargs)


def test_a_kernel_that_is_right_passes(tiny, plan_of, plant):
    assert prove_with_kernel(tiny, plan_of, plant, lambda y, n: y.bfloat16()).passed


KERNEL_FAULTS = {
    "two per cent off": lambda y, n: (y * 1.02).bfloat16(),
    "heads swapped": lambda y, n: y.flip(1).bfloat16(),
    "rows swapped": lambda y, n: y.flip(0).bfloat16(),
    "one value off": lambda y, n: y.index_put(
        (torch.tensor(0), torch.tensor(0), torch.tensor(0)), torch.tensor(9.0)
    ).bfloat16(),
    "not a number": lambda y, n: torch.full_like(y, torch.nan).bfloat16(),
    "shorter": lambda y, n: y[..., 1:].bfloat16(),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_a_wrong_kernel_turns_outputs_red(tiny, plan_of, plant, fault):
    proof = prove_with_kernel(tiny, plan_of, plant, KERNEL_FAULTS[fault])
    assert red(proof) == {"outputs"}
    assert "too far" in proof.proof("outputs").text
    assert "Planted" in proof.proof("outputs").text


def test_a_kernel_that_changes_its_mind_turns_equality_red(tiny, plan_of, plant):
    steps = 6
    proof = prove_with_kernel(
        tiny,
        plan_of,
        plant,
        lambda y, n: (y * (1 if n <= steps else 1 + 2**-7)).bfloat16(),
    )
    assert "equality" in red(proof)
    assert "out of decode with 1 rows" in proof.proof("equality").text
    assert not any(s.equal for s in proof.steps if s.phase == "decode")


def test_a_kernel_that_raises_is_a_failed_claim_with_its_error(tiny, plan_of, plant):
    def broken(y, n):
        raise RuntimeError("tiling failed 0xdead")

    proof = prove_with_kernel(tiny, plan_of, plant, broken)
    assert red(proof) == {"layer"}
    assert "steps before release failed: RuntimeError: tiling failed 0xdead" in (
        proof.proof("layer").text
    )


def test_a_kernel_that_fails_only_after_the_release_is_told(tiny, plan_of, plant):
    def later(y, n):
        if n > 6:
            raise RuntimeError("gone")
        return y.bfloat16()

    proof = prove_with_kernel(tiny, plan_of, plant, later)
    assert red(proof) == {"layer"}
    assert "steps after release failed" in proof.proof("layer").text
    assert proof.proof("outputs").passed
    assert proof.proof("bytes").passed


# --- paths -------------------------------------------------------------------------------------


def path_of(change):
    class PlantedPath(Absorb):
        def bind(self, prepared, cache):
            right = super().bind(prepared, cache)
            return lambda hidden, positions, slots: change(right, cache, hidden, positions, slots)

    return PlantedPath


def prove_with_path(tiny, plan_of, plant, change, **layer):
    offer = plant(
        path_of(change),
        reads=["fused_qkv_a_proj", "q_b_proj"],
        uses=("q_absorb", "v_up"),
        q_lora="float",
    )
    plan = plan_of(tiny(**layer), role="decode", paths=[offer]).layers[0]
    assert plan.path[0].strategy == "PlantedPath"
    return prove_layer(plan, rows=(1, 4))


def test_a_path_that_is_right_passes(tiny, plan_of, plant):
    proof = prove_with_path(tiny, plan_of, plant, lambda right, cache, h, p, s: right(h, p, s))
    assert proof.passed, [x.text for x in proof.failed]


def _half_against_interleaved(right, cache, h, p, s):
    result = right(h, p, s)
    half = result.q_pe.shape[-1] // 2
    back = torch.stack((result.q_pe[..., :half], result.q_pe[..., half:]), -1).flatten(-2)
    return result._replace(q_pe=back)


def _stray(right, cache, h, p, s):
    result = right(h, p, s)
    cache.k_nope.view(-1, cache.k_nope.shape[-1])[-1] += 1
    return result


PATH_FAULTS = {
    "slots off by one": (
        lambda right, c, h, p, s: right(h, p, (s + 1) % c.num_slots),
        {"outputs", "cache"},
    ),
    "positions off by one": (
        lambda right, c, h, p, s: right(h, (p - 1).clamp(min=0), s),
        {"outputs", "cache"},
    ),
    "no rotation": (
        lambda right, c, h, p, s: right(h, torch.zeros_like(p), s),
        {"outputs", "cache"},
    ),
    "queries in the other rope layout": (_half_against_interleaved, {"outputs"}),
    "queries not absorbed": (
        lambda right, c, h, p, s: (r := right(h, p, s))._replace(q_nope=r.q_nope.flip(-1)),
        {"outputs"},
    ),
    "q_lora not normed": (
        lambda right, c, h, p, s: (r := right(h, p, s))._replace(q_lora=r.q_lora * 1.1),
        {"q_lora"},
    ),
    "writes into a foreign slot": (_stray, {"cache", "padding"}),
    "hidden states of the neighbour": (
        lambda right, c, h, p, s: right(h.roll(1, 0), p, s),
        {"outputs", "cache", "q_lora"},
    ),
}


@pytest.mark.parametrize("fault", PATH_FAULTS)
def test_wrong_wiring_in_a_path_turns_claims_red(tiny, plan_of, plant, fault):
    change, expected = PATH_FAULTS[fault]
    proof = prove_with_path(tiny, plan_of, plant, change)
    assert red(proof) >= expected, {p.name: p.text for p in proof.proofs}


def test_a_path_that_writes_nothing_cannot_live_on_what_was_there(tiny, plan_of, plant):
    def reads_only(right, cache, h, p, s):
        kept = cache.k_nope.clone(), cache.k_rope.clone()
        result = right(h, p, s)
        cache.k_nope.copy_(kept[0])
        cache.k_rope.copy_(kept[1])
        return result

    proof = prove_with_path(tiny, plan_of, plant, reads_only)
    assert red(proof) >= {"outputs", "cache"}
    assert proof.proof("outputs").figures["error"] == float("inf")


# --- release -----------------------------------------------------------------------------------


@pytest.fixture
def plan(tiny, plan_of):
    return plan_of(tiny(), role="decode").layers[0]


def with_row(plan, name, **changes):
    rows = tuple(evolve(w, **changes) if w.name == name else w for w in plan.weights)
    return plan.evolve(weights=rows)


@pytest.mark.parametrize("weight", ["q_b_proj", "fused_qkv_a_proj", "w_kc", "w_vc"])
def test_a_weight_released_although_it_is_read_is_found(plan, weight):
    wrong = with_row(plan, weight, action="release", reasons=("planted",))
    proof = prove_layer(wrong, rows=(1,))
    assert "layer" in red(proof)
    text = proof.proof("layer").text
    assert "steps after release failed: WeightReleasedError" in text
    assert weight in text
    # What was measured before stands in the record all the same.
    assert proof.proof("outputs").passed
    assert proof.proof("bytes").passed


def test_a_byte_count_that_is_wrong_in_the_plan_is_found(plan):
    proof = prove_layer(with_row(plan, "kv_b_proj", bytes=1), rows=(1,))
    assert red(proof) == {"layer"}
    assert "PlanMismatchError" in proof.proof("layer").text


def patched_release(monkeypatch, change):
    real = BoundLayer.release

    def release(self):
        return change(self, real(self)) or self.ledger

    monkeypatch.setattr(BoundLayer, "release", release)


def test_an_extra_byte_freed_turns_bytes_red(plan, monkeypatch):
    def more(layer, ledger):
        layer.weights["kv_a_layernorm"].untyped_storage().resize_(0)

    patched_release(monkeypatch, more)
    proof = prove_layer(plan, rows=(1,))
    assert "bytes" in red(proof)
    assert "kv_a_layernorm: planned 0, freed 128" in proof.proof("bytes").text


def test_a_weight_that_dies_unplanned_turns_bytes_red(plan, monkeypatch):
    def more(layer, ledger):
        layer.weights["w_vc"].data = torch.empty(0, dtype=torch.bfloat16)

    patched_release(monkeypatch, more)
    proof = prove_layer(plan, rows=(1,))
    assert "bytes" in red(proof)
    assert "w_vc: planned 0" in proof.proof("bytes").text


def test_a_storage_that_lives_on_turns_bytes_red(plan, monkeypatch):
    held = []
    real = BoundLayer.prepare

    def prepare(self):
        real(self)
        held.append(self.weights["kv_b_proj"].untyped_storage())

    monkeypatch.setattr(BoundLayer, "prepare", prepare)
    proof = prove_layer(plan, rows=(1,))
    assert red(proof) == {"bytes"}
    assert "kv_b_proj: planned 16384, freed 0" in proof.proof("bytes").text


def test_a_release_that_became_a_keep_turns_bytes_red(plan, monkeypatch):
    held = []
    real = BoundLayer.prepare

    def prepare(self):
        real(self)
        held.append(self.weights["kv_b_proj"].view(-1))

    monkeypatch.setattr(BoundLayer, "prepare", prepare)
    proof = prove_layer(plan, rows=(1,))
    assert "bytes" in red(proof)
    assert "kv_b_proj was kept: weight.aliased" in proof.proof("bytes").text


def test_a_ledger_that_lies_turns_bytes_red(plan, monkeypatch):
    def lie(layer, ledger):
        rows = tuple(evolve(r, freed=r.freed + 1) for r in ledger.rows)
        layer.ledger = Ledger(ledger.layer_id, rows)

    patched_release(monkeypatch, lie)
    proof = prove_layer(plan, rows=(1,))
    assert red(proof) == {"bytes"}
    assert "the ledger says 16385 freed of 16384" in proof.proof("bytes").text


def test_a_release_that_spoils_a_kept_weight_turns_equality_red(plan, monkeypatch):
    def spoil(layer, ledger):
        layer.weights["q_b_proj"].mul_(1.05)

    patched_release(monkeypatch, spoil)
    assert red(prove_layer(plan, rows=(1,))) == {"equality"}


def test_a_released_weight_that_can_be_read_turns_released_red(plan):
    weights = {"kv_b_proj": torch.ones(2)}
    proof = prove_released(plan, weights)
    assert not proof.passed
    assert "kv_b_proj: was read without an error" in proof.text


def test_another_error_than_ours_turns_released_red(plan):
    class Odd:
        def sum(self):
            raise RuntimeError("segment violation")

    proof = prove_released(plan, {"kv_b_proj": Odd()})
    assert not proof.passed
    assert "RuntimeError: segment violation" in proof.text


def test_an_unreachable_phase_that_runs_turns_unreachable_red(plan):
    def runs(hidden, positions, slots, *, phase):
        if phase is not Phase.EXTEND:
            raise KeyError(phase)

    layer = types.SimpleNamespace(plan=plan, device=torch.device("cpu"), preprocess=runs)
    proof = prove_unreachable(layer)
    assert not proof.passed
    assert "extend: ran without an error" in proof.text
    assert "draft_extend: KeyError" in proof.text


# --- results -----------------------------------------------------------------------------------


def test_one_failed_layer_fails_the_run_and_the_others_go_on(tiny, plan_of, plan):
    model = plan_of(tiny(), tiny(layer_id=1), role="decode")
    wrong = with_row(model.layers[0], "kv_b_proj", bytes=1)
    result = prove_model(evolve(model, layers=(wrong, model.layers[1])), rows=(1,))
    assert [layer.passed for layer in result.layers] == [False, True]
    assert not result.passed


def test_nothing_proven_is_not_passed():
    assert not LayerProof(layer_id=0).passed
    assert not RunResult(device="cpu", seed=0, layers=()).passed


def test_errors_of_what_cannot_be_compared_are_infinite():
    one = torch.ones(2, 2)
    assert relative_error(one, torch.ones(3)) == float("inf")
    assert relative_error(one * torch.nan, one) == float("inf")
    assert relative_error(one, one) == 0.0
    assert relative_error(one, torch.zeros(2, 2)) == 2.0
    assert worst_token(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [1.0]])) == 1.0
