"""Layers that are right pass, in every kind that is executed, and the record says what was run."""

from __future__ import annotations

import json

import pytest

from npu_backend import Indexer, KvLayout
from npu_backend.errors import NpuBackendError
from npu_backend.runtime.prove import prove_layer, prove_model

CLAIMS = ["outputs", "cache", "q_lora", "padding", "bytes", "equality", "released", "unreachable"]


def check(proof):
    assert proof.passed, [p.text for p in proof.failed]
    assert [p.name for p in proof.proofs] == CLAIMS
    assert all(s.equal for s in proof.steps)
    return proof


@pytest.mark.parametrize("role", ["decode", "prefill", "null"])
def test_a_layer_passes_in_every_role(tiny, plan_of, role):
    plan = plan_of(tiny(), role=role).layers[0]
    proof = check(prove_layer(plan))
    assert {s.phase for s in proof.steps} == {p.value for p in plan.reach}
    assert {s.path for s in proof.steps} == {"absorb"}
    assert proof.proof("bytes").figures["freed"] == plan.totals.release > 0


LAYERS = {
    "fp32": {"dtype": "float32"},
    "fp16": {"dtype": "float16"},
    "PA_NZ": {"kv_layout": KvLayout("PA_NZ")},
    "interleaved": {"kv_layout": KvLayout(rope="interleaved")},
    "small blocks": {"kv_layout": KvLayout(block_size=16)},
    "q_proj": {"q_lora_rank": None, "indexer": Indexer("none")},
    "no rope": {"use_rope": False},
    "no rope part": {"qk_rope_head_dim": 0},
    "mtp": {"is_nextn": True, "layer_id": 7},
    "w_vc strided": {"w_vc_layout": "strided"},
    "w_kc contiguous": {"w_kc_layout": "contiguous"},
    "w8a8-dynamic": {"quant": "w8a8-dynamic"},
    "w8a8-static": {"quant": "w8a8-static"},
    "one head": {"num_heads": 1},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_executed_kind_of_layer_passes(tiny, plan_of, kind):
    check(prove_layer(plan_of(tiny(**LAYERS[kind]), role="null").layers[0], rows=(1, 3)))


def test_attention_tp_halves_the_heads(tiny, plan_of):
    plan = plan_of(tiny(), role="decode", attn_tp_size=2).layers[0]
    check(prove_layer(plan, rows=(2,)))


FUSED = {
    "mlaprolog": ({}, "mlaprolog"),
    "mlaprolog PA_NZ": ({"kv_layout": KvLayout("PA_NZ")}, "mlaprolog"),
    "mlaprolog int8": ({"quant": "w8a8-dynamic"}, "mlaprolog"),
    "mlaprolog int8 q_b": ({"quant": {"q_b_proj": "w8a8-dynamic"}}, "mlaprolog"),
    "mlapo": ({"quant": "w8a8-static", "hidden_size": 2048}, "mlapo"),
    "mlapo PA_NZ": (
        {"quant": "w8a8-static", "hidden_size": 2048, "kv_layout": KvLayout("PA_NZ")},
        "mlapo",
    ),
}


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_path_continues_the_cache_that_absorb_filled(fused, plan_of, kind):
    change, path = FUSED[kind]
    plan = plan_of(fused(**change), role="null", requests=[f"path={path}"]).layers[0]
    proof = check(prove_layer(plan, rows=(2,)))
    served = {s.phase: s.path for s in proof.steps}
    assert served["extend"] == "absorb"
    assert served["decode"] == path
    assert any("filled by extend steps" in note for note in proof.notes)


def test_what_steps_of_the_other_role_bring_back_goes_again(fused, plan_of):
    plan = plan_of(fused(), role="decode", promises=["role_switch"], restore=True).layers[0]
    proof = prove_layer(plan, rows=(2,))
    assert proof.passed, [p.text for p in proof.failed]
    again = proof.proof("again").figures
    assert again["freed"] == again["first"] == plan.totals.release + plan.totals.restore
    assert 0 < again["brought_back"] < again["first"]


def test_without_extend_the_record_says_who_filled_the_cache(tiny, plan_of):
    proof = prove_layer(plan_of(tiny(), role="decode").layers[0], rows=(1,))
    assert any("independent writer" in note for note in proof.notes)
    assert any("dense" in note for note in proof.notes)


def test_both_sides_of_the_1024_rows_of_a_kernel_run_when_asked(tiny, plan_of):
    layer = tiny(num_heads=2, kv_layout=KvLayout(block_size=16), indexer=Indexer("none"))
    plan = plan_of(
        layer, phases="decode", requests=["v_up=batch_matmul_transpose"], max_tokens=2000
    ).layers[0]
    assert [e.tokens for e in plan.v_up] == [(1, 1024), (1025, 2000)]
    proof = prove_layer(plan, rows=(1, 1024, 1025), row_cap=1025)
    assert proof.passed, [p.text for p in proof.failed]
    kernels = {s.rows: s.v_up for s in proof.steps}
    assert kernels[1024] == "batch_matmul_transpose"
    assert kernels[1025] == "npu_transpose_batchmatmul[1,0,2]"
    assert proof.skipped == ("decode with 2000 rows: more than the cap of 1025 rows",)


def test_where_the_host_serves_all_there_is_nothing_to_step(tiny, plan_of):
    plan = plan_of(
        tiny(indexer=Indexer("none")), role="prefill", host="sglang", phases="extend"
    ).layers[0]
    proof = prove_layer(plan)
    assert proof.passed, [p.text for p in proof.failed]
    assert proof.proof("outputs").skipped
    assert proof.proof("equality").skipped
    assert proof.skipped == ("extend: host:mha, the host's own code serves it",)
    # w_kc and w_vc are dead on such a worker.
    assert {r["name"] for r in proof.ledger["weights"]} == {"w_kc", "w_vc"}


def test_padded_rows_alone_are_run_too(tiny, plan_of):
    plan = plan_of(tiny(), phases="idle").layers[0]
    proof = prove_layer(plan, rows=(1, 5))
    assert proof.passed, [p.text for p in proof.failed]
    assert proof.proof("outputs").skipped
    assert [s.error for s in proof.steps] == [None, None]
    assert all(s.equal for s in proof.steps)


def test_a_plan_that_releases_nothing_still_passes(tiny, plan_of):
    plan = plan_of(tiny(), role="decode", promises=["weight_update"]).layers[0]
    proof = prove_layer(plan, rows=(1,))
    assert proof.passed
    assert proof.proof("bytes").figures["freed"] == 0
    assert proof.proof("released").skipped
    assert "BoundExceededError" in proof.proof("unreachable").text


def test_a_restorable_release_frees_too(tiny, plan_of):
    plan = plan_of(tiny(), role="decode", promises=["weight_update"], restore=True).layers[0]
    proof = check(prove_layer(plan, rows=(1,)))
    assert proof.proof("bytes").figures["freed"] == plan.totals.restore > 0


def test_a_model_is_proven_layer_by_layer(tiny, plan_of):
    plan = plan_of(tiny(), tiny(layer_id=1), tiny(layer_id=2, is_nextn=True), role="decode")
    seen = []
    result = prove_model(plan, rows=(1,), progress=lambda *args: seen.append(args))
    assert result.passed
    assert [s[:2] for s in seen] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [s[2].layer_id for s in seen[1:]] == [0, 1, 2]
    assert result.freed_bytes == result.planned_bytes == plan.totals.release
    # Two layers of one kind have other weights.
    assert result.layers[0].error != result.layers[1].error
    told = json.loads(json.dumps(result.to_dict()))
    assert told["passed"] is True
    assert told["layers"][0]["proofs"][0]["name"] == "outputs"
    assert told["bytes"] == {"planned": plan.totals.release, "freed": plan.totals.release}


def test_two_runs_give_the_same_record(tiny, plan_of):
    plan = plan_of(tiny(), role="decode")
    a, b = (prove_model(plan, rows=(2,), seed=3).to_dict() for _ in range(2))
    for record in (*a["layers"], *b["layers"]):
        del record["seconds"]
    assert a == b


def test_what_is_not_executed_is_an_error_before_anything_runs(tiny, plan_of):
    # 8-bit floats are of A5.
    plan = plan_of(tiny(), tiny(layer_id=1, quant="fp8-block"), role="decode", soc="A5")
    seen = []
    with pytest.raises(NpuBackendError, match="not executed yet"):
        prove_model(plan, progress=lambda *args: seen.append(args))
    assert not seen
    with pytest.raises(NpuBackendError, match="not executed yet"):
        prove_layer(plan.layers[1])


def test_another_dtype_than_the_plans_is_an_error(tiny, plan_of):
    plan = plan_of(tiny(), role="decode")
    with pytest.raises(NpuBackendError, match="planned in bfloat16"):
        prove_model(plan, dtype="float32")
    assert prove_model(plan, dtype="bfloat16", rows=(1,)).passed


def test_an_unknown_proof_is_a_key_error_that_names_the_known(tiny, plan_of):
    proof = prove_layer(plan_of(tiny(), role="decode").layers[0], rows=(1,))
    with pytest.raises(KeyError, match="outputs"):
        proof.proof("speed")
    assert proof.failed == ()
