"""What engines free by themselves, and what a plan frees beside it.

Literal bytes are worked out from dims: a weight's rows times columns times its dtype's size.
"""

from __future__ import annotations

import json

import pytest

import npu_backend
from npu_backend import Deployment, DeploymentError, Phase
from npu_backend.baseline import BASELINES, baseline_of
from npu_backend.cli import main
from npu_backend.hbm import kv_bytes_per_token, kv_tokens, parse_bytes

MIB, GIB = 1 << 20, 1 << 30

CASES = [
    ("glm-5.2", "mxfp8", "A5", None),
    ("deepseek-v3.2", "w8a8-dynamic", "A3", None),
    ("deepseek-v3.2", "none", "A3", None),
    ("kimi-k2", "w8a8-static", "A3", 1024),
]


def _plan(backend, model, quant="none", **deployment):
    layers = npu_backend.read_model(model, quant=quant)
    given = {"cann": "9.2.0", "soc": "A3", **deployment}
    if (bound := given.pop("rows", None)) is not None:
        given["max_tokens"] = dict.fromkeys(Phase, bound)
    return backend.plan(layers, Deployment(**given))


def _dead(plan):
    return [
        (layer.layer_id, row.name)
        for layer in plan.layers
        for row in layer.weights
        if row.copy_of is None and row.action == "keep" and not row.readers
    ]


@pytest.mark.parametrize(("model", "quant", "soc", "rows"), CASES)
@pytest.mark.parametrize("tp", [1, 16])
def test_a_decode_worker_frees_more_and_holds_less_than_sglang(
    backend, model, quant, soc, rows, tp
):
    plan = _plan(backend, model, quant, soc=soc, rows=rows, role="decode", attn_tp_size=tp)
    ours, theirs = plan.totals, baseline_of(plan, "sglang-0.5.23")
    if theirs.freed and tp == 1:
        assert ours.release / theirs.freed >= 2
    assert ours.resident_after / theirs.resident_after < 1
    assert ours.release >= theirs.freed
    assert _dead(plan) == []


def test_sglang_frees_the_source_of_qkv_a_and_w_kc_of_mlaprolog(backend):
    """facts: qkv_a when role != null and mode != 2; w_kc when decode, mlaprolog and mode != 2."""
    plan = _plan(backend, "glm-5.2", "mxfp8", soc="A5", role="decode")
    found = baseline_of(plan, "sglang-0.5.23")
    qkv_a, w_kc = (2048 + 512 + 64) * 6144, 12 * MIB
    # 78 layers in MXFP8, one MTP layer in bf16.
    assert found.freed_by_weight() == {
        "fused_qkv_a_proj": 78 * qkv_a + 2 * qkv_a,
        "w_kc": 79 * w_kc,
    }
    assert found.unsafe() == {}
    assert {layer.path for layer in found.layers} == {"mlaprolog"}


def test_sglang_frees_nothing_in_mode_2_and_nothing_without_a_role(backend):
    dynamic = _plan(backend, "deepseek-v3.2", "w8a8-dynamic", role="decode")
    assert baseline_of(dynamic, "sglang-0.5.23").freed == 0
    alone = _plan(backend, "glm-5.2", "mxfp8", soc="A5", role="null")
    assert baseline_of(alone, "sglang-0.5.23").freed == 0


def test_sglang_mlapo_frees_qkv_a_alone(backend):
    plan = _plan(backend, "kimi-k2", "w8a8-static", role="decode")
    found = baseline_of(plan, "sglang-0.5.23")
    assert found.freed_by_weight() == {"fused_qkv_a_proj": 61 * (1536 + 512 + 64) * 7168}


def test_what_sglang_frees_though_extend_reads_it_is_marked(backend):
    """A prefill worker's idle steps run the preprocess object, which frees what extend reads."""
    plan = _plan(backend, "deepseek-v3", "mxfp8", soc="A5", role="prefill")
    layers, readers = baseline_of(plan, "sglang-0.5.23").unsafe()["fused_qkv_a_proj"]
    assert len(layers) == 61  # the MTP layer is float: absorb, which frees nothing
    assert readers == ("extend",)
    assert plan.totals.release == 0


def test_sglang_as_first_merged_tries_mlapo_first(backend):
    plan = _plan(backend, "deepseek-v3.2", "w8a8-dynamic", role="decode")
    merged, now = (baseline_of(plan, name) for name in ("sglang-38807", "sglang-0.5.23"))
    assert {layer.path for layer in merged.layers[:61]} == {"mlapo"}
    assert {layer.path for layer in now.layers[:61]} == {"mlaprolog"}


@pytest.mark.parametrize(("rows", "freed"), [(1023, 1), (1024, 1), (1025, 0), (None, 0)])
def test_vllm_ascend_releases_up_to_1024_rows(backend, rows, freed):
    """facts: consumer and max_num_batched_tokens <= 1024; dense layers keep kv_b_proj."""
    plan = _plan(backend, "kimi-k2", "w8a8-static", role="decode", rows=rows)
    found = baseline_of(plan, "vllm-ascend").freed_by_weight()
    qkv_a, q_b = (1536 + 576) * 7168, 1536 * 64 * 192
    assert found == ({"fused_qkv_a_proj": 61 * qkv_a, "q_b_proj": 61 * q_b} if freed else {})


def test_vllm_ascend_disposes_kv_b_of_sparse_layers_always(backend):
    plan = _plan(backend, "deepseek-v3.2", role="null")
    kv_b = 128 * (128 + 128) * 512 * 2
    assert baseline_of(plan, "vllm-ascend").freed_by_weight() == {"kv_b_proj": 62 * kv_b}


def test_a_worker_that_does_both_with_few_rows_reads_what_vllm_ascend_freed(backend):
    """facts: kv_both with <= 1024 tokens frees what a prefill needs."""
    plan = _plan(backend, "deepseek-v3.2", "w8a8-static", role="null", rows=1024)
    unsafe = baseline_of(plan, "vllm-ascend").unsafe()
    assert set(unsafe) == {"fused_qkv_a_proj", "q_b_proj"}
    assert unsafe["q_b_proj"][1] == ("extend",)


def test_an_unknown_baseline_is_an_error_with_a_suggestion(backend):
    plan = _plan(backend, "deepseek-v2-lite", role="decode")
    with pytest.raises(DeploymentError, match=r"did you mean .?sglang-0\.5\.23"):
        baseline_of(plan, "sglang-0.5.2")
    assert set(BASELINES) == {"sglang-0.5.23", "sglang-38807", "vllm-ascend"}


# --- what it buys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_dtype", "expected"),
    [("bfloat16", 576 * 2), ("int8", 512 + 128), ("int8_channel", 576), ("fp8_packed", 656)],
)
def test_bytes_of_a_token(kv_dtype, expected):
    (layer, *_) = npu_backend.read_model("deepseek-v3", kv_dtype=kv_dtype)
    assert kv_bytes_per_token(layer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64GiB", 64 * GIB), ("1.5 GiB", 3 * GIB // 2), ("61GB", 61 * 10**9), ("512", 512),
     ("2mib", 2 * MIB)],
)  # fmt: skip
def test_sizes(text, expected):
    assert parse_bytes(text, "--hbm") == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "64 bananas", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(DeploymentError, match="is not a size"):
        parse_bytes(text, "--hbm")


def test_tokens_gained_are_the_released_bytes_by_the_bytes_of_a_token(backend):
    plan = _plan(backend, "kimi-k2", "w8a8-static", role="decode", rows=1024)
    found = kv_tokens(plan, 64 * GIB, 0.8, 40 * GIB)
    per_token = 61 * 576 * 2
    left = int(64 * GIB * 0.8) - 40 * GIB
    assert found.per_token == per_token
    assert found.without == (left - plan.totals.prepared) // per_token
    assert found.planned == (left - plan.totals.prepared + plan.totals.release) // per_token
    assert abs(found.gained - plan.totals.release / per_token) <= 1


def test_no_memory_left_is_no_token(backend):
    plan = _plan(backend, "kimi-k2", role="decode")
    assert kv_tokens(plan, GIB, 0.8, 40 * GIB).planned == 0
    for fraction in (0, 1.01, -1):
        with pytest.raises(DeploymentError, match="is not a part of a memory"):
            kv_tokens(plan, GIB, fraction)


def test_the_command_shows_both_columns_and_the_tokens(capsys):
    args = ["plan", "kimi-k2", "--quant", "w8a8-static", "--role", "decode", "--max-tokens", "1024",
            "--baseline", "sglang-0.5.23", "--hbm", "64GiB", "--loaded-bytes", "40GiB"]  # fmt: skip
    assert main(args) == 0
    text = capsys.readouterr().out
    assert "freed / theirs" in text
    assert "gained in role decode" in text
    assert "dead and kept by this plan: 0 bytes" in text
    assert main([*args, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["baselines"][0]["totals"]["freed"] == 61 * (1536 + 512 + 64) * 7168
    assert told["dead_after"] == 0
    assert told["kv"]["gained"] == told["kv"]["tokens"] - told["kv"]["tokens_without_release"] > 0
    assert told["kv"]["tokens"] > told["baselines"][0]["kv_tokens"]


def test_a_plan_without_these_options_has_none_of_their_keys(capsys):
    assert main(["plan", "deepseek-v2-lite", "--layers", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not {"baselines", "kv", "dead_after"} & set(told)
