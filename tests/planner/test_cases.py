"""Public reports as test cases. Each test is named after its origin: SGL = sgl-project/sglang,
VA = vllm-project/vllm-ascend, SK = sgl-project/sgl-kernel-npu. Expected values are literal."""

from __future__ import annotations

import json

import pytest

from npu_backend import Deployment, Forbid, Indexer, MlaLayer, Offer, Reason, RequestUnmetError
from npu_backend.catalog import load_catalog
from npu_backend.model import nz_castable

T102 = "npu_transpose_batchmatmul[1,0,2]"
T012 = "npu_transpose_batchmatmul[0,1,2]"
BMT = "batch_matmul_transpose"


# --- 1: SGL PR 34715, VA PR 3578 -----------------------------------------------------------------


@pytest.mark.parametrize("cann", ["8.5.0", "9.0.0"])
def test_sgl_pr_34715_128_heads_never_take_the_transposing_kernel(plan, who, refusals, cann):
    layer = plan("deepseek-v3", role="decode", soc="A3", cann=cann, attn_tp_size=1).layers[0]
    assert who(layer, "v_up")[0][0] == T012
    assert who(layer, "v_up")[0][2] == (1, None)
    assert "65536" in refusals(layer, T102, "v_up")["bmm.bk_limit"]


def test_va_pr_3578_the_limit_is_on_heads_times_rank_and_not_on_rows(plan, who, make_layer):
    for heads, expected in ((127, T102), (128, T012), (129, T012)):
        layer = plan.layers([make_layer(num_heads=heads)], role="decode", cann="9.0.0").layers[0]
        assert who(layer, "v_up")[0][0] == expected, heads


# --- 2: by reading SGL 0.5.23 --------------------------------------------------------------------


def test_sgl_0_5_23_70000_tokens_are_no_limit_of_the_transposing_kernel(plan, who):
    layer = plan(
        "deepseek-v3", role="decode", soc="A3", cann="9.0.0", attn_tp_size=2, max_tokens=70000
    ).layers[0]
    assert who(layer, "v_up") == [(T102, ["decode", "target_verify", "idle"], (1, 70000))]


# --- 3: VA 8390, VA 5399 -------------------------------------------------------------------------


def test_va_8390_batch_matmul_transpose_ends_at_1024_rows_and_the_next_entry_serves(plan, who):
    layer = plan(
        "deepseek-v3", role="decode", cann="9.0.0", requests="v_up=batch_matmul_transpose"
    ).layers[0]
    assert who(layer, "v_up") == [
        (BMT, ["decode", "target_verify", "idle"], (1, 1024)),
        (T012, ["decode", "target_verify", "idle"], (1025, None)),
    ]


def test_va_5399_mlapo_ends_at_1024_rows_and_absorb_serves_1025(plan, who):
    layer = plan(
        "kimi-k2", read={"quant": "w8a8-static"}, role="decode", requests="path=mlapo"
    ).layers[0]
    phases = ["decode", "target_verify", "idle"]
    assert who(layer, "path") == [
        ("mlapo", phases, (1, 1024)),
        ("absorb", phases, (1025, None)),
    ]


# --- 4 and 15 are on BMM legality: see test_kernels.py too ----------------------------------------


def test_contracts_of_the_ops_fp32_is_declined_by_batch_matmul_transpose_only(plan, refusals):
    layer = plan("deepseek-v3", read={"dtype": "float32"}, role="decode", cann="9.0.0").layers[0]
    assert "dtype" in refusals(layer, BMT, "v_up")
    assert "dtype" not in refusals(layer, T012, "v_up")


def test_contracts_of_the_ops_mixed_dtypes_are_declined_by_every_kernel(plan, make_layer):
    from npu_backend import SelectionError

    with pytest.raises(SelectionError) as caught:
        plan.layers([make_layer(w_dtype="float8_e4m3fn")], role="decode", cann="9.1.0")
    for strategy in (T102, T012, BMT, "torch.bmm"):
        assert any(strategy in why and "dtype" in why for why in caught.value.why), strategy


# --- 5: SGL PR 19544 -----------------------------------------------------------------------------


def test_sgl_pr_19544_mlapo_requested_without_static_w8a8_names_layers_request_and_reason(plan):
    with pytest.raises(RequestUnmetError) as caught:
        plan("deepseek-v3", role="decode", requests="path=mlapo")
    text = str(caught.value)
    assert "layers 0-60" in text
    assert "path=mlapo" in text
    assert "quant.mode" in text


def test_sgl_pr_19544_fused_without_any_fused_layer_is_an_error_too(plan):
    with pytest.raises(RequestUnmetError, match=r"dims\.q_lora_rank"):
        plan("deepseek-v2-lite", role="decode", requests="path=fused")


# --- 6: SGL PR 15381 -----------------------------------------------------------------------------


def test_sgl_pr_15381_a_float_mtp_layer_is_decided_by_its_own_tensors(plan, who):
    bounded = {"role": "decode", "max_tokens": 1024, "cann": "9.1.0"}
    quantized = plan("deepseek-v3", read={"quant": "w8a8-static"}, **bounded)
    assert len(quantized.layers) == 62
    assert {who(layer, "path")[0][0] for layer in quantized.layers[:61]} == {"mlapo"}
    mtp = quantized.layers[61]
    assert mtp.layer.is_nextn
    assert [entry[0] for entry in who(mtp, "path")] == ["mlaprolog"]
    alone = plan("deepseek-v3", read={"quant": "w8a8-static", "layers": "0-60"}, **bounded)
    assert [layer.to_dict() for layer in alone.layers] == [
        layer.to_dict() for layer in quantized.layers[:61]
    ]


def test_sgl_pr_15381_where_mlaprolog_is_not_legal_the_float_mtp_layer_takes_absorb(plan, who):
    quantized = plan(
        "deepseek-v3",
        read={"quant": "w8a8-static"},
        role="decode",
        max_tokens=1024,
        soc="A2",
        cann="9.0.0",
    )
    assert [entry[0] for entry in who(quantized.layers[61], "path")] == ["absorb"]


# --- 7 (first half), 8, 10: who may be freed -----------------------------------------------------


def test_va_11882_nothing_an_extend_reads_is_released_where_extend_is_reachable(plan):
    layer = plan("glm-5.2", role="decode", cann="9.1.0", promises=["local_prefill"]).layers[0]
    actions = {w.name: w.action for w in layer.weights}
    for name in ("fused_qkv_a_proj", "q_b_proj", "w_kc", "w_vc"):
        assert actions[name] == "keep", name


def test_va_pr_4774_role_null_releases_no_weight_that_any_phase_reads(plan):
    layer = plan("deepseek-v3", role="null", cann="9.1.0").layers[0]
    assert [w.name for w in layer.released()] == []


def test_va_pr_5192_null_with_decode_phases_only_still_keeps_what_an_extend_would_read(plan):
    layer = plan("deepseek-v3", role="null", cann="9.1.0", phases=["decode"]).layers[0]
    assert [w.name for w in layer.released()] == []
    assert "extend" in layer.weight("kv_b_proj").reasons[0]


def test_va_pr_17104_kv_b_proj_goes_on_decode_and_stays_without_disaggregation(plan):
    def action(**deployment):
        return plan("deepseek-v3", cann="9.1.0", **deployment).layers[0].weight("kv_b_proj").action

    assert action(role="decode") == "release"
    assert action(role="null") == "keep"
    assert action(role="decode", promises=["weight_update"]) == "keep"
    assert action(role="decode", promises=["weight_update"], restore=True) == "restore"


# --- 11: VA 4653, SK PR 316 ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernels, declined",
    [
        ("sgl-kernel-npu==2025.12.31", True),
        ("sgl-kernel-npu==2026.1.13", True),
        ("sgl-kernel-npu==2026.1.14", False),
        ("sgl-kernel-npu==2026.2.1", False),
        ("sgl-kernel-npu==v2026.1.2", True),
        ("sgl-kernel-npu==20251231", True),
        ("sgl-kernel-npu==2025.12.31+abc", True),
        ("sgl-kernel-npu==2026.dev1", False),
        ("sgl-kernel-npu==2026", False),
        ("sgl-kernel-npu", False),
    ],
)
def test_va_4653_batch_matmul_transpose_needs_the_mended_library(plan, refusals, kernels, declined):
    layer = plan("deepseek-v3", role="decode", cann="8.5.0", kernels=kernels).layers[0]
    assert ("library.version" in refusals(layer, BMT, "v_up")) is declined


# --- 12: VA PR 6451 ------------------------------------------------------------------------------


def test_va_pr_6451_null_static_w8a8_unasked_is_absorb(plan, who, refusals):
    layer = plan("kimi-k2", read={"quant": "w8a8-static"}, role="null", soc="A3").layers[0]
    assert [entry[0] for entry in who(layer, "path")] == ["absorb"]
    assert "policy.duplicate" in refusals(layer, "mlapo")


# --- 13 (VA 13904) is proved with an installed distribution; here in process ----------------------


def test_va_13904_a_vendor_replaces_one_kernel_with_one_hook(plan, who):
    def select_bmm_kernel(bmm, deployment):
        if bmm.site == "v_up" and bmm.shape == (64, 512, 256):
            return Offer(strategy="acme_bmm", impl="acme:kernel", reads=[bmm.weight])
        return None

    before = plan("glm-5.2", role="decode", cann="9.1.0")
    plan.vendor(select_bmm_kernel)
    after = plan("glm-5.2", role="decode", cann="9.1.0")
    assert who(after.layers[0], "v_up")[0][0] == "acme_bmm"
    assert after.layers[0].v_up[0].provider == "acme (acme-npu 1.0)"
    assert after.layers[0].path == before.layers[0].path
    assert after.fingerprint != before.fingerprint


# --- 14: VA PR 16198 -----------------------------------------------------------------------------


def test_va_pr_16198_k_192_is_aligned_to_16_on_cann_9_0_and_not_to_128_on_8_5(plan, who, refusals):
    def q_absorb(cann):
        return plan("glm-5.2", role="null", cann=cann).layers[0]

    on_85 = q_absorb("8.5.0")
    assert "multiple of 128" in refusals(on_85, T102, "q_absorb")["bmm.alignment"]
    assert "multiple of 128" in refusals(on_85, T012, "q_absorb")["bmm.alignment"]
    assert who(q_absorb("9.0.0"), "q_absorb")[0][0] == T102


# --- 16: SGL PR 30265 ----------------------------------------------------------------------------


def test_sgl_pr_30265_an_ignore_pattern_by_checkpoint_name_meets_the_mtp_layer(plan, tmp_path):
    catalog = load_catalog()
    config = dict(catalog.models["glm-5.2"])
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": ["re:model\\.layers\\.78\\..*", "re:.*kv_b_proj"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = plan(str(tmp_path / "config.json"), role="decode", cann="9.1.0").layers
    assert layers[77].layer.quant_of("q_b_proj") == "w8a8-dynamic"
    assert layers[78].layer.is_nextn
    assert layers[78].layer.quant_of("q_b_proj") == "none"
    assert layers[77].path[0].offer.mode == "weight_quant_mode=2"
    assert layers[78].path[0].offer.mode == "weight_quant_mode=0"


# --- 17: SGL 27371 -------------------------------------------------------------------------------


def test_sgl_27371_without_q_lora_the_layer_takes_absorb_through_q_proj(plan, who, refusals):
    layer = plan("deepseek-v2-lite", role="decode", cann="9.1.0").layers[0]
    assert [entry[0] for entry in who(layer, "path")] == ["absorb"]
    assert layer.path[0].offer.reads == {"q_proj", "kv_a_proj_with_mqa"}
    for strategy in ("mlaprolog", "mlapo"):
        assert "dims.q_lora_rank" in refusals(layer, strategy)


# --- 18: SGL PR 21209 ----------------------------------------------------------------------------


def test_sgl_pr_21209_a_360_wide_int8_weight_is_not_castable_and_nz_strategies_decline(
    plan, refusals
):
    from npu_backend import Envelope

    def select_preprocess_path(layer, deployment):
        return Offer(
            strategy="acme_nz",
            impl="acme:path",
            envelope=Envelope(phases=["decode"], format="nz"),
            copies=["fused_qkv_a_proj"],
            uses=["q_absorb", "v_up"],
        )

    assert nz_castable(load_catalog(), "int8", 1024, 360) == (
        "N = 360 is not a multiple of 32 (int8)"
    )
    for wide, castable in ((352, True), (359, False), (360, False), (384, True)):
        assert (nz_castable(load_catalog(), "int8", 1024, wide) is None) is castable, wide
    plan.vendor(select_preprocess_path)
    layer = MlaLayer(  # q_lora + kv_lora + rope = 360
        layer_id=0,
        hidden_size=1024,
        num_heads=4,
        q_lora_rank=232,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        quant="w8a8-dynamic",
    )
    planned = plan.layers([layer], role="decode", cann="9.1.0").layers[0]
    assert "N = 360" in refusals(planned, "acme_nz")["format.nz"]


# --- 20: SGL 29838 -------------------------------------------------------------------------------


def test_sgl_29838_the_plan_tells_what_each_role_would_free_by_weight_and_layer(plan):
    freed = {}
    for role in ("null", "prefill", "decode"):
        planned = plan("glm-5.2", read={"layers": "0-77"}, role=role, cann="9.1.0")
        assert all(w.bytes > 0 for layer in planned.layers for w in layer.weights)
        freed[role] = planned.totals.release
    mib = 1024 * 1024
    # kv_b_proj is read by nobody on DSA layers: 28 MiB x 78 (facts: 2.1 GiB).
    assert freed["null"] == freed["prefill"] == 28 * mib * 78
    # decode: also fused_qkv_a (2624 x 6144), q_b (16384 x 2048) and w_kc (12 MiB), bf16.
    assert freed["decode"] == (28 * mib + 2624 * 6144 * 2 + 16384 * 2048 * 2 + 12 * mib) * 78


# --- kinds that belong to more than one row ------------------------------------------------------


def test_model_numerics_kimi_k3_never_multiplies_with_batch_matmul_transpose(plan, refusals):
    for cann in ("8.5.0", "9.0.0", "9.2.0"):
        for layer in plan("kimi-k3", role="null", cann=cann).layers:
            strategies = [e.strategy for site in ("q_absorb", "v_up") for e in layer.table(site)]
            assert BMT not in strategies
            assert "model.numerics" in refusals(layer, BMT, "v_up")


def test_a_request_against_a_forbid_is_an_error(plan):
    with pytest.raises(RequestUnmetError, match=r"model\.numerics"):
        plan("kimi-k3", role="null", requests="v_up=batch_matmul_transpose")


def test_a_vendors_forbid_binds_every_plugins_offer(plan, refusals, who):
    def select_bmm_kernel(bmm, deployment):
        return Forbid(strategy=T102, reasons=Reason("acme.broken", "broken on our boards"))

    plan.vendor(select_bmm_kernel)
    layer = plan("glm-5.2", role="decode", cann="9.1.0").layers[0]
    assert who(layer, "v_up")[0][0] == T012
    assert "broken on our boards" in refusals(layer, T102, "v_up")["plugin.forbidden"]


def test_a_shared_indexer_reads_nothing(make_layer, plan):
    def readers(kind):
        quant = dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), "w8a8-dynamic")
        layer = make_layer(indexer=Indexer(kind, "w8a8-dynamic"), quant=quant)
        row = plan.layers([layer], role="decode", cann="9.1.0").layers[0].weight("fused_qkv_a_proj")
        return set(row.readers)

    assert readers("shared") == set()
    assert readers("own") == set()  # mode 2 hands over int8, which a dynamic int8 wq_b takes
    quant = dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), "w8a8-dynamic")
    float_wq_b = make_layer(indexer=Indexer("own"), quant=quant)
    deployment = Deployment(role="decode", cann="9.1.0", requests="path=mlaprolog")
    row = plan.backend.plan([float_wq_b], deployment).layers[0].weight("fused_qkv_a_proj")
    assert set(row.readers) == {"indexer@decode", "indexer@target_verify", "indexer@idle"}
