"""The planner's twelve rules (see docs/planner.md), one section a rule."""

from __future__ import annotations

import itertools
import json

import pytest

import npu_backend
from npu_backend import (
    Decline,
    Deployment,
    DeploymentError,
    Envelope,
    Forbid,
    Indexer,
    Keep,
    KvLayout,
    Offer,
    Phase,
    Reason,
    Release,
    RequestUnmetError,
    Role,
    SelectionError,
    Soc,
)
from npu_backend.api import Backend
from npu_backend.deployment import PROMISE_READERS, PROMISES
from npu_backend.offers import REASON_CODES

T102 = "npu_transpose_batchmatmul[1,0,2]"
T012 = "npu_transpose_batchmatmul[0,1,2]"
BMT = "batch_matmul_transpose"


# --- rule 1: reachable is per layer --------------------------------------------------------------


@pytest.mark.parametrize(
    "role, promises, main, mtp",
    [
        ("null", [], "extend decode target_verify idle", "extend decode draft_extend idle"),
        ("prefill", [], "extend idle", "extend idle"),
        ("decode", [], "decode target_verify idle", "decode draft_extend idle"),
        (
            "decode",
            ["local_prefill"],
            "extend decode target_verify idle",
            "extend decode draft_extend idle",
        ),
        (
            "prefill",
            ["role_switch"],
            "extend decode target_verify idle",
            "extend decode draft_extend idle",
        ),
        (
            "decode",
            ["role_switch"],
            "extend decode target_verify idle",
            "extend decode draft_extend idle",
        ),
    ],
)
def test_the_role_and_the_promises_say_what_a_layer_reaches(role, promises, main, mtp):
    deployment = Deployment(role=role, promises=promises)
    assert [p.value for p in deployment.reach(is_nextn=False)] == main.split()
    assert [p.value for p in deployment.reach(is_nextn=True)] == mtp.split()


@pytest.mark.parametrize("role", [None, "decoder", "", "DECODE"])
def test_a_role_that_is_unknown_or_not_yet_published_is_an_error(role):
    with pytest.raises(DeploymentError) as caught:
        Deployment(role=role)
    assert caught.value.code == "role.unknown"
    assert caught.value.remedy


def test_phases_replace_the_default_and_an_empty_reach_is_an_error(plan):
    assert list(Deployment(role="decode", phases="extend").reach(is_nextn=False)) == [Phase.EXTEND]
    with pytest.raises(DeploymentError, match="no phase of the layer is reachable"):
        plan("deepseek-v3", role="decode", phases=["target_verify"])  # the MTP layer is planned too
    only_main = plan(
        "deepseek-v3", read={"layers": "0-60"}, role="decode", phases=["target_verify"]
    )
    assert len(only_main.layers) == 61


def test_rows_start_at_1_and_a_bound_of_0_is_an_error():
    with pytest.raises(DeploymentError, match="rows start at 1"):
        Deployment(max_tokens={"decode": 0})
    with pytest.raises(ValueError, match="rows start at 1"):
        Envelope(tokens=(0, 5))


# --- rule 2: tables ------------------------------------------------------------------------------


def _path(strategy, **changes):
    values = {"reads": ["fused_qkv_a_proj", "q_b_proj"], "uses": ["q_absorb", "v_up"]}
    return Offer(strategy=strategy, impl="acme:path", **{**values, **changes})


def test_each_cell_goes_to_the_first_offer_that_covers_it_and_entries_show_what_they_serve(
    plan, who, make_layer
):
    def select_preprocess_path(layer, deployment):
        return [
            _path("mid", envelope=Envelope(phases=["decode"], tokens=(10, 20))),
            _path("late", envelope=Envelope(phases=["decode", "idle"], tokens=(15, None))),
        ]

    plan.vendor(select_preprocess_path)
    layer = plan.layers(
        [make_layer()], role="decode", cann="8.3.RC1", max_tokens=100, phases=["decode"]
    )
    assert who(layer.layers[0], "path") == [
        ("mid", ["decode"], (10, 20)),
        ("late", ["decode"], (21, 100)),
        ("absorb", ["decode"], (1, 9)),
    ]


def test_legal_offers_that_serve_nothing_stand_under_unused(plan):
    layer = plan("glm-5.2", role="decode", cann="9.1.0").layers[0]
    assert {(u.site, u.strategy) for u in layer.unused} == {
        (None, "absorb"),
        ("v_up", T012),
        ("v_up", BMT),
        ("v_up", "torch.bmm"),
    }


def test_what_nobody_serves_is_an_error_with_every_reason(plan, make_layer):
    def select_bmm_kernel(bmm, deployment):
        return [
            Forbid(strategy=s, reasons=Reason("acme.no", f"no {s}"))
            for s in (T102, T012, BMT, "torch.bmm")
        ]

    plan.vendor(select_bmm_kernel)
    with pytest.raises(SelectionError) as caught:
        plan.layers([make_layer()], role="decode")
    assert "v_up" in caught.value.whom
    for strategy in (T102, T012, BMT, "torch.bmm"):
        assert any(f"no {strategy}" in why for why in caught.value.why)


@pytest.mark.parametrize("role", ["null", "prefill"])
def test_a_legal_offer_that_ends_before_what_is_left_says_so(role):
    loaded = npu_backend.load(third_party=False, disable=["absorb"])
    with pytest.raises(SelectionError) as caught:
        Backend(loaded.registry, loaded.catalog).plan(
            npu_backend.read_model("deepseek-v3", layers=[0]), Deployment(role=role)
        )
    error = caught.value
    assert error.code == "phase"
    assert "extend rows 1..any" in error.what
    (prolog,) = (why for why in error.why if why.startswith("mlaprolog, "))
    assert prolog.endswith(
        ": phase: it serves decode, target_verify, draft_extend, idle, and not extend"
    )
    assert any(why.startswith("mlapo, ") and "quant.mode" in why for why in error.why)
    (off,) = (why for why in error.why if why.startswith("plugin absorb "))
    assert off.endswith("is blocked and was not asked")


def test_rows_that_no_kernel_takes_name_each_kernels_range(plan, make_layer):
    def select_bmm_kernel(bmm, deployment):
        return [
            Forbid(strategy=s, reasons=Reason("acme.no", f"no {s}"))
            for s in (T102, T012, "torch.bmm")
        ]

    plan.vendor(select_bmm_kernel)
    with pytest.raises(SelectionError) as caught:
        plan.layers([make_layer(w_kc_layout="contiguous")], role="decode", cann="9.0.0")
    assert caught.value.code == "tokens.limit"
    assert "rows 1025..any" in caught.value.what
    # batch_matmul_transpose: at most 1024 rows.
    (told,) = (why for why in caught.value.why if why.startswith(f"{BMT}, "))
    assert "tokens.limit: it serves rows 1..1024" in told


def test_two_offers_that_copy_what_the_other_reads_are_dropped_from_the_last_in_call_order(
    plan, who, make_layer, refusals
):
    # first copies q_b and serves decode; second reads q_b at idle rows and copies fused_qkv_a.
    def select_preprocess_path(layer, deployment):
        return [
            _path(
                "first",
                envelope=Envelope(phases=["decode"]),
                reads=[],
                copies=["fused_qkv_a_proj", "q_b_proj"],
            ),
            _path(
                "second",
                envelope=Envelope(phases=["idle"]),
                reads=["q_b_proj"],
                copies=["fused_qkv_a_proj"],
            ),
        ]

    plan.vendor(select_preprocess_path)
    layer = plan.layers(
        [make_layer()], role="decode", phases=["decode", "idle"], soc="310P"
    ).layers[0]
    # With both, first copies q_b that second reads. Only first offends: it is dropped; then absorb
    # serves decode and reads fused_qkv_a, so that second offends and is dropped as well.
    assert [entry[0] for entry in who(layer, "path")] == ["absorb"]
    assert "q_b_proj is read by second@idle" in refusals(layer, "first")["policy.duplicate"]
    assert (
        "fused_qkv_a_proj is read by absorb@decode" in refusals(layer, "second")["policy.duplicate"]
    )


# --- rule 3: extend ------------------------------------------------------------------------------


def test_fused_paths_never_serve_extend_even_when_requested(plan, who):
    layer = plan("glm-5.2", role="null", cann="9.1.0", requests="path=mlaprolog").layers[0]
    rows = who(layer, "path")
    assert rows[0][0] == "mlaprolog"
    assert "extend" not in rows[0][1]
    assert rows[1][:2] == ("absorb", ["extend"])


def test_without_indexer_kv_b_proj_is_read_by_the_hosts_mha_in_extend(plan):
    dense = plan("deepseek-v3", role="prefill", cann="9.1.0").layers[0]
    assert dense.weight("kv_b_proj").readers == ("host:mha@extend",)
    sparse = plan("deepseek-v3.2", role="prefill", cann="9.1.0").layers[0]
    assert sparse.weight("kv_b_proj").readers == ()


def test_with_sglang_a_dense_layers_extend_is_the_hosts_and_w_kc_w_vc_die_without_idle(plan, who):
    layer = plan(
        "deepseek-v3", role="prefill", cann="9.1.0", host="sglang", phases=["extend"]
    ).layers[0]
    assert who(layer, "path") == [("host:mha", ["extend"], (1, None))]
    assert who(layer, "v_up") == []
    assert who(layer, "q_absorb") == []
    assert [w.name for w in layer.released()] == ["w_kc", "w_vc"]
    # DeepSeek-V3 at attention TP 1: 2 x 16 MiB x 61 layers = 1.9 GiB (facts).
    whole = plan(
        "deepseek-v3",
        read={"layers": "0-60"},
        role="prefill",
        cann="9.1.0",
        host="sglang",
        phases=["extend"],
    )
    assert whole.totals.release == 2 * 16 * 1024 * 1024 * 61
    with_idle = plan("deepseek-v3", role="prefill", cann="9.1.0", host="sglang").layers[0]
    assert [w.name for w in with_idle.released()] == []


def test_with_sglang_a_q_proj_layer_is_read_by_the_host_through_q_proj(plan):
    layer = plan("deepseek-v2-lite", role="prefill", host="sglang", phases=["extend"]).layers[0]
    assert layer.weight("q_proj").readers == ("host:mha@extend",)
    assert layer.weight("kv_a_proj_with_mqa").readers == ("host:mha@extend",)
    assert [w.name for w in layer.released()] == ["w_kc", "w_vc"]


# --- rule 4: policy ------------------------------------------------------------------------------


def test_requested_an_offer_is_taken_though_it_duplicates(plan, who):
    layer = plan("glm-5.2", role="null", cann="9.1.0", requests="path=mlaprolog").layers[0]
    assert who(layer, "path")[0][0] == "mlaprolog"
    assert layer.totals.duplicate == sum(
        layer.weight(n).bytes for n in ("fused_qkv_a_proj", "q_b_proj", "w_kc")
    )
    unasked = plan("glm-5.2", role="null", cann="9.1.0").layers[0]
    assert who(unasked, "path")[0][0] == "absorb"
    assert unasked.totals.duplicate == 0


def test_a_kernel_that_multiplies_with_its_copy_leaves_the_original_without_reader(plan):
    def select_bmm_kernel(bmm, deployment):
        if bmm.site == "v_up":
            return Offer(strategy="acme_nz", impl="acme:k", copies=[bmm.weight])
        return None

    plan.vendor(select_bmm_kernel)
    layer = plan("glm-5.2", role="decode", cann="9.1.0").layers[0]
    assert layer.weight("w_vc").readers == ()
    assert layer.weight("w_vc").action == "release"
    assert layer.weight("acme_nz.w_vc").bytes == layer.weight("w_vc").bytes
    assert layer.weight("acme_nz.w_vc").readers[0] == "v_up@decode"


# --- rule 5: requests are contracts --------------------------------------------------------------


def test_path_binds_main_layers_and_nextn_binds_mtp_layers(plan, who):
    planned = plan("glm-5.2", role="decode", cann="9.1.0", requests="path=absorb")
    assert who(planned.layers[0], "path")[0][0] == "absorb"
    assert who(planned.layers[78], "path")[0][0] == "mlaprolog"
    planned = plan("glm-5.2", role="decode", cann="9.1.0", requests="path=absorb@nextn")
    assert who(planned.layers[0], "path")[0][0] == "mlaprolog"
    assert who(planned.layers[78], "path")[0][0] == "absorb"


def test_a_request_without_a_legal_part_is_an_error(plan):
    with pytest.raises(RequestUnmetError, match="phase"):
        plan("glm-5.2", role="prefill", cann="9.1.0", requests="path=mlaprolog")
    with pytest.raises(RequestUnmetError, match="binds no planned layer"):
        plan("kimi-k2", role="decode", requests="path=absorb@nextn")
    with pytest.raises(RequestUnmetError, match="batched matmul q_absorb"):
        plan("glm-5.2", role="decode", cann="9.1.0", requests="q_absorb=torch.bmm")


def test_fused_takes_mlaprolog_then_mlapo_then_absorb_by_layer(plan, who):
    planned = plan(
        "deepseek-v3",
        read={"quant": "w8a8-static"},
        role="decode",
        cann="9.1.0",
        requests=["path=fused", "path=fused@nextn"],
    )
    assert [e[0] for e in who(planned.layers[0], "path")] == ["mlapo", "absorb"]
    assert [e[0] for e in who(planned.layers[61], "path")] == ["mlaprolog"]


def test_an_unknown_strategy_is_an_error_with_a_suggestion(plan):
    with pytest.raises(RequestUnmetError, match="did you mean 'mlaprolog'"):
        plan("glm-5.2", role="decode", cann="9.1.0", requests="path=mlaprologue")


def test_dist_slash_name_chooses_between_two_plugins_of_one_name(plan, who):
    def select_bmm_kernel(bmm, deployment):
        return Offer(strategy="torch.bmm", impl="acme:k", reads=[bmm.weight])

    plan.vendor(select_bmm_kernel)
    for request, provider in (
        ("v_up=npu-backend/torch.bmm", "transpose_bmm (npu-backend"),
        ("v_up=acme-npu/torch.bmm", "acme (acme-npu 1.0)"),
        ("v_up=Acme_NPU/torch.bmm", "acme (acme-npu 1.0)"),
        ("v_up=torch.bmm", "acme (acme-npu 1.0)"),
    ):
        layer = plan("glm-5.2", role="decode", cann="9.1.0", requests=request).layers[0]
        assert layer.v_up[0].provider.startswith(provider), request
    with pytest.raises(RequestUnmetError):
        plan("glm-5.2", role="decode", cann="9.1.0", requests="v_up=nobody/torch.bmm")


def test_two_requests_that_exclude_each_other_are_an_error(plan):
    with pytest.raises(RequestUnmetError, match="serves decode"):
        plan("glm-5.2", role="decode", cann="9.1.0", requests=["path=absorb", "path=mlaprolog"])


# --- rule 6: one KV layout per layer -------------------------------------------------------------


def test_an_offer_that_cannot_write_the_layers_layout_is_declined(plan, refusals, make_layer):
    interleaved = make_layer(kv_layout=KvLayout(rope="interleaved"))
    layer = plan.layers([interleaved], role="decode", cann="9.1.0").layers[0]
    assert "kv.layout" in refusals(layer, "mlaprolog")
    assert [e.strategy for e in layer.path] == ["absorb"]


@pytest.mark.parametrize(
    "name, canonical",
    [
        ("PA", "PA_BSND"),
        ("krope_ctkv", "PA_BSND"),
        ("PA_BSND", "PA_BSND"),
        ("nzcache", "PA_NZ"),
        ("PA_NZ", "PA_NZ"),
    ],
)
def test_cache_modes_have_one_canonical_name(name, canonical):
    assert KvLayout(cache_mode=name).cache_mode == canonical


@pytest.mark.parametrize(
    "block, legal",
    [(15, False), (16, True), (17, False), (1008, True), (1024, True), (1040, False)],
)
def test_mlaprolog_takes_block_sizes_16_to_1024_in_steps_of_16(plan, refusals, block, legal):
    layer = plan("deepseek-v3", read={"block_size": block}, role="decode", cann="9.1.0").layers[0]
    assert ("kv.layout" not in refusals(layer, "mlaprolog")) is legal


def test_fused_paths_decline_layers_without_rope(plan, refusals):
    for model in ("kimi-k3", "glm-5.3-flash"):
        layer = plan(model, role="decode", cann="9.1.0").layers[0]
        assert layer.kv_layout.rope == "none"
        for strategy in ("mlaprolog", "mlapo"):
            assert "rope.layout" in refusals(layer, strategy)


# --- rule 7: the indexer -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "qkv, q_b, wq_b, soc, reads",
    [
        ("none", "none", "none", "A3", False),
        ("none", "none", "w8a8-dynamic", "A3", False),
        ("none", "w8a8-dynamic", "none", "A3", True),
        ("w8a8-dynamic", "w8a8-dynamic", "none", "A3", True),
        ("w8a8-dynamic", "w8a8-dynamic", "w8a8-dynamic", "A3", False),
        ("w8a8-dynamic", "w8a8-dynamic", "w8a8-static", "A3", True),
        ("mxfp8", "mxfp8", "none", "A5", True),
        ("mxfp8", "mxfp8", "mxfp8", "A5", False),
        ("mxfp8", "mxfp8", "w8a8-dynamic", "A5", True),
    ],
)
def test_the_indexer_reads_the_projection_where_q_lora_is_not_in_its_format(
    plan, make_layer, qkv, q_b, wq_b, soc, reads
):
    layer = make_layer(
        indexer=Indexer("own", wq_b), quant={"fused_qkv_a_proj": qkv, "q_b_proj": q_b}
    )
    planned = plan.layers(
        [layer], role="decode", cann="9.1.0", soc=soc, requests="path=mlaprolog"
    ).layers[0]
    readers = planned.weight("fused_qkv_a_proj").readers
    assert ("indexer@decode" in readers) is reads


def test_mlapo_of_sgl_kernel_npu_never_hands_q_lora_over_and_vllm_ascends_does(plan, make_layer):
    layer = make_layer(
        indexer=Indexer("own"), quant={"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"}
    )
    for kernels, reads in (("sgl-kernel-npu", True), ("vllm-ascend", False)):
        planned = plan.layers(
            [layer],
            role="decode",
            cann="9.1.0",
            kernels=kernels,
            max_tokens=1024,
            requests="path=mlapo",
        ).layers[0]
        readers = planned.weight("fused_qkv_a_proj").readers
        assert ("indexer@decode" in readers) is reads, kernels


VLLM = {"kernels": "vllm-ascend", "role": "decode", "requests": "path=mlapo"}
STATIC = {"quant": {"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"}}


@pytest.mark.parametrize(
    ("size", "value", "code"),
    [
        ("hidden_size", 1024, "dims.hidden_size"),
        ("hidden_size", 8224, "dims.hidden_size"),
        ("q_lora_rank", 2048, "dims.q_lora_rank"),
        ("qk_nope_head_dim", 192, "dims.qk_nope_head_dim"),
        ("kv_layout", KvLayout(block_size=512), "kv.layout"),
    ],
)
def test_mlapo_of_vllm_ascend_takes_its_sizes_from_the_tensors(
    plan, make_layer, refusals, size, value, code
):
    # vllm-ascend csrc/mla_preprocess at commit 182b75ea; sgl-kernel-npu's op has them built in.
    layer = make_layer(**STATIC, **{size: value})
    assert plan.layers([layer], **VLLM).layers[0].path[0].strategy == "mlapo"
    assert code in refusals(plan.layers([layer], role="decode").layers[0], "mlapo")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"kv_lora_rank": 256}, "dims.kv_lora_rank"),
        ({"qk_rope_head_dim": 32}, "dims.qk_rope_head_dim"),
        ({"hidden_size": 7184}, "dims.hidden_size"),
        ({"q_lora_rank": 1552}, "dims.q_lora_rank"),
        ({"kv_layout": KvLayout("PA_NZ", dtype="int8")}, "kv.layout"),
        ({"dtype": "float16", "kv_layout": KvLayout("PA_NZ", dtype="float16")}, "kv.layout"),
    ],
)
def test_what_mlapo_of_vllm_ascend_has_no_kernel_for_is_declined(
    plan, make_layer, refusals, changes, code
):
    layer = make_layer(**STATIC, **changes)
    declined = plan.layers([layer], role="decode", kernels="vllm-ascend").layers[0]
    assert code in refusals(declined, "mlapo")


def test_float16_has_no_inner_out(plan, make_layer):
    # The op's cases with enable_inner_out are of bfloat16 only.
    for dtype, hands in (("bfloat16", False), ("float16", True)):
        layer = make_layer(**STATIC, dtype=dtype, indexer=Indexer("own", "none"))
        row = plan.layers([layer], **VLLM, max_tokens=64).layers[0].weight("fused_qkv_a_proj")
        assert ("indexer@decode" in row.readers) is hands


# --- rule 8: promises ----------------------------------------------------------------------------


def test_promises_are_readers_and_restore_lets_the_weights_come_back(plan):
    for promise, reader in (
        ("weight_update", "update"),
        ("draft_sharing", "draft"),
        ("parallel_copies", "peers"),
        ("export", "export"),
    ):
        kept = plan("glm-5.2", role="decode", cann="9.1.0", promises=[promise]).layers[0]
        assert kept.path[0].strategy == "absorb"
        assert kept.weight("q_b_proj").action == "keep"
        assert reader in kept.weight("q_b_proj").readers
        back = plan(
            "glm-5.2", role="decode", cann="9.1.0", promises=[promise], restore=True
        ).layers[0]
        assert back.path[0].strategy == "mlaprolog"
        assert back.weight("q_b_proj").action == "restore"
        assert reader in back.weight("q_b_proj").readers
    assert back.weight("w_kc").action == "restore"


def test_a_role_switch_keeps_what_the_other_role_reads_or_restores_it(plan):
    kept = plan("glm-5.2", role="decode", cann="9.1.0", promises=["role_switch"]).layers[0]
    assert kept.weight("w_kc").action == "keep"
    back = plan(
        "glm-5.2", role="decode", cann="9.1.0", promises=["role_switch"], restore=True
    ).layers[0]
    assert back.path[0].strategy == "mlaprolog"
    assert back.weight("w_kc").action == "restore"
    assert "q_absorb@extend" in back.weight("w_kc").readers


@pytest.mark.parametrize(
    ("promise", "reason"),
    [
        ("weight_update", "promise.weight_update: read by update"),
        ("export", "promise.export: read by export"),
        ("lora", "promise.lora: read by lora"),
        ("draft_sharing", "weight.aliased: read by draft"),
        ("parallel_copies", "weight.read: read by peers"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode", "null"])
def test_what_only_a_promise_reads_is_kept_with_its_reason_or_restored(plan, role, promise, reason):
    # On a DSA layer nobody reads kv_b_proj once w_kc and w_vc are made of it.
    def row(**more):
        return plan("glm-5.2", role=role, cann="9.1.0", **more).layers[0].weight("kv_b_proj")

    assert row().action == "release"
    kept = row(promises=[promise])
    assert (kept.action, kept.readers) == ("keep", (reason.rpartition(" ")[2],))
    assert reason in kept.reasons
    back = row(promises=[promise], restore=True)
    assert (back.action, back.readers) == ("restore", kept.readers)
    assert any(why == f"{reason}, brought back before that" for why in back.reasons)


@pytest.mark.parametrize("quant", ["none", "w8a8-dynamic"])
@pytest.mark.parametrize("q_lora_rank", [None, 1536])
def test_lora_reads_what_deltas_are_applied_to_with_its_scales(
    plan, make_layer, quant, q_lora_rank
):
    layer = make_layer(quant=quant, q_lora_rank=q_lora_rank)
    planned = plan.layers([layer], role="decode", promises=["lora"]).layers[0]
    for row in planned.weights:
        target = row.name.removesuffix(".scale") not in ("w_kc", "w_vc")
        assert ("lora" in row.readers) is target, row.name


def test_every_promise_but_phases_has_its_reader():
    assert set(PROMISES) - set(PROMISE_READERS.values()) == {"role_switch", "local_prefill"}


def test_lora_and_context_parallelism_decline_the_fused_paths(plan, refusals):
    lora = plan("glm-5.2", role="decode", cann="9.1.0", promises=["lora"]).layers[0]
    assert "promise.lora" in refusals(lora, "mlaprolog")
    assert lora.weight("kv_b_proj").action == "keep"
    cp = plan("glm-5.2", role="decode", cann="9.1.0", context_parallel_size=2).layers[0]
    assert "parallel.context" in refusals(cp, "mlaprolog")


# --- rule 9: versions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "torch_npu, cann, line, limits",
    [
        (None, None, "26.2", "9.2.0"),
        (None, "9.0.0", "26.0", "9.0.0"),
        (None, "8.5.2", "7.3", "8.5.0"),
        ("2.8.0.post4", None, "26.0", "9.0.0"),
        ("2.9.0", "9.1.0", "7.3", "8.5.0"),
        ("2.9.0.post6", "9.0.0", "26.1", "9.0.0"),
        ("26.1", "9.2.0", "26.1", "9.1.0"),
        ("2.13.0+git1234", None, "26.2", "9.2.0"),
    ],
)
def test_limits_follow_the_lower_of_line_and_cann(torch_npu, cann, line, limits):
    deployment = Deployment(torch_npu=torch_npu, cann=cann)
    assert (deployment.line, deployment.limits_cann) == (line, limits)


def test_a_newer_cann_takes_the_newest_limits_with_a_warning_and_an_older_one_is_an_error():
    (other,) = Deployment(cann="9.9.1", torch_npu="2.9.0").warnings
    assert "the limits of CANN 8.5.0 are used" in other
    (warning,) = Deployment(cann="9.9.1").warnings
    assert "9.9.1" in warning
    assert "9.2.0" in warning
    with pytest.raises(DeploymentError, match="older than the catalog"):
        Deployment(cann="8.0.0")
    with pytest.raises(DeploymentError, match="not in the table"):
        Deployment(torch_npu="2.9.0.post99")


@pytest.mark.parametrize(
    "name, family",
    [
        ("Ascend910B3", "A2"),
        ("Ascend910B4-1", "A2"),
        ("Ascend910_9391", "A3"),
        ("Ascend910_9363", "A3"),
        ("Ascend950PR", "A5"),
        ("Ascend910_9599", "A5"),
        ("Ascend310P3", "310P"),
        ("Ascend910B", "910"),
        ("Ascend910A", "910"),
        ("a3", "A3"),
    ],
)
def test_chips_are_known_by_family_and_runtime_name(name, family):
    assert Soc.parse(name).family == family


def test_an_unknown_chip_is_an_error_with_a_suggestion():
    with pytest.raises(DeploymentError, match="did you mean 'Ascend910B4-1'"):
        Deployment(soc="Ascend910B4_1")


def test_not_documented_for_a_chip_is_a_reason(plan, refusals):
    on_a2 = plan("deepseek-v3", role="decode", soc="A2", cann="9.0.0").layers[0]
    assert "soc.undocumented" in refusals(on_a2, "mlaprolog")
    assert "soc.undocumented" not in refusals(
        plan("deepseek-v3", role="decode", soc="A2", cann="9.1.0").layers[0], "mlaprolog"
    )
    on_310p = plan("deepseek-v3", role="decode", soc="310P", cann="9.1.0").layers[0]
    assert "soc.unsupported" in refusals(on_310p, T102, "v_up")
    assert [e.strategy for e in on_310p.v_up] == ["torch.bmm"]


def test_figures_by_line_follow_the_lower_of_line_and_cann_as_well(plan, refusals):
    newer_line = {"role": "decode", "torch_npu": "26.1"}
    on_a2 = plan("deepseek-v3", soc="A2", cann="9.0.0", **newer_line).layers[0]
    assert "soc.undocumented" in refusals(on_a2, "mlaprolog")
    on_82 = plan("deepseek-v3", soc="A3", cann="8.2.RC1", **newer_line).layers[0]
    assert "soc.undocumented" in refusals(on_82, "mlaprolog")


def test_heads_that_do_not_divide_are_the_users_and_no_plugins_fault(plan, recwarn):
    from npu_backend import ModelError

    with pytest.raises(ModelError, match="128 heads do not divide") as caught:
        plan("deepseek-v3", attn_tp_size=3)
    assert caught.value.code == "dims.heads"
    assert not [w for w in recwarn if "failed" in str(w.message)]


def test_a_layer_is_planned_once(plan, make_layer):
    with pytest.raises(DeploymentError, match="more than once"):
        plan.layers([make_layer(), make_layer()])


def test_a_kernel_may_only_read_the_weight_of_its_site(plan, refusals):
    def select_bmm_kernel(bmm, deployment):
        return Offer(strategy="greedy", impl="acme:k", reads=[bmm.weight, "fused_qkv_a_proj"])

    plan.vendor(select_bmm_kernel)
    layer = plan("glm-5.2", role="decode", cann="9.1.0").layers[0]
    assert "fused_qkv_a_proj" in refusals(layer, "greedy", "v_up")["plugin.failed"]


@pytest.mark.parametrize("name", ["fused", "host", "host:mha", "a/b", "a@nextn", "a b", ""])
def test_words_of_requests_and_hosts_are_no_strategys_name(name):
    with pytest.raises(ValueError, match="strategy's name"):
        Offer(strategy=name, impl="acme:k", reads=["w_vc"])


def test_a_kernel_request_binds_mtp_layers_as_well_and_nextn_them_alone(plan, who):
    both = plan("glm-5.2", role="decode", cann="9.1.0", requests="v_up=torch.bmm")
    assert {who(layer, "v_up")[0][0] for layer in both.layers} == {"torch.bmm"}
    mtp = plan("glm-5.2", role="decode", cann="9.1.0", requests="v_up=torch.bmm@nextn")
    assert who(mtp.layers[0], "v_up")[0][0] == T102
    assert who(mtp.layers[78], "v_up")[0][0] == "torch.bmm"


def test_static_int8_without_offset_and_bias_is_not_mlapos(plan, refusals, make_layer):
    quant = dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), "w8a8-static-symmetric")
    layer = plan.layers([make_layer(quant=quant)], role="decode", max_tokens=1024).layers[0]
    assert "quant_bias" in refusals(layer, "mlapo")["quant.layout"]


def test_an_op_that_the_line_lacks_is_missing(plan, refusals):
    layer = plan("deepseek-v3", role="decode", cann="8.3.RC1").layers[0]
    assert "line 7.3" in refusals(layer, "mlaprolog")["op.missing"]
    old = plan("deepseek-v3", role="decode", cann="8.1.RC1").layers[0]
    assert "line 7.1" in refusals(old, T102, "v_up")["op.missing"]
    bare = plan("deepseek-v3", role="decode", cann="8.1.RC1", kernels="none").layers[0]
    assert [e.strategy for e in bare.v_up] == ["torch.bmm"]


# --- rule 10: graph capture ----------------------------------------------------------------------


def test_under_capture_one_shape_holds_the_slot_of_batch_matmul_transpose(plan, who, refusals):
    kwargs = {"role": "null", "cann": "8.5.0", "requests": "q_absorb=batch_matmul_transpose"}
    free = plan("glm-5.2", **kwargs).layers[0]
    assert who(free, "q_absorb")[0][0] == BMT
    captured = plan("glm-5.2", graph_capture=True, **kwargs)
    for layer in captured.layers:
        assert who(layer, "q_absorb")[0][0] == BMT
    both = {"role": "null", "cann": "8.5.0", "graph_capture": True}
    with pytest.raises(RequestUnmetError, match=r"capture\.slot"):
        plan("glm-5.2", requests=[f"q_absorb={BMT}", f"v_up={BMT}"], **both)


def test_the_first_in_layer_order_keeps_the_slot(plan, refusals, make_layer):
    # K = 192 is not legal for npu_transpose_batchmatmul on CANN 8.5, so that q_absorb takes
    # batch_matmul_transpose unasked; a layer of another shape comes second and must not.
    first = make_layer(layer_id=0, num_heads=64, qk_nope_head_dim=192)
    second = make_layer(layer_id=1, num_heads=32, qk_nope_head_dim=192)
    planned = plan.layers([first, second], role="null", cann="8.5.0", graph_capture=True)
    assert planned.layers[0].q_absorb[0].strategy == BMT
    assert [e.strategy for e in planned.layers[1].q_absorb] == ["torch.bmm"]
    assert "(64, 192, 512)" in refusals(planned.layers[1], BMT, "q_absorb")["capture.slot"]
    free = plan.layers([first, second], role="null", cann="8.5.0")
    assert free.layers[1].q_absorb[0].strategy == BMT


# --- rule 11: fingerprint ------------------------------------------------------------------------


def test_equal_inputs_give_equal_bytes(plan):
    texts = {plan("glm-5.2", role="decode", cann="9.1.0").to_json() for _ in range(3)}
    assert len(texts) == 1


def test_the_fingerprint_is_of_decisions_catalog_and_soc_family_only(plan):
    base = plan("glm-5.2", role="decode", cann="9.1.0", soc="A3").fingerprint
    same = plan("glm-5.2", role="decode", cann="9.1.0", soc="Ascend910_9362").fingerprint
    other = plan("glm-5.2", role="decode", cann="9.1.0", soc="A2").fingerprint
    role = plan("glm-5.2", role="prefill", cann="9.1.0").fingerprint
    assert base == same
    assert len({base, other, role}) == 3


# --- rule 12: reason codes -----------------------------------------------------------------------


CODES = """role.unknown soc.unsupported soc.undocumented op.missing library.version
dims.hidden_size dims.heads dims.q_lora_rank dims.kv_lora_rank dims.qk_nope_head_dim
dims.qk_rope_head_dim dtype quant.mode quant.layout tokens.limit bmm.bk_limit bmm.k_limit
bmm.alignment layout.contiguous format.nz kv.layout rope.layout phase policy.duplicate promise.lora
promise.weight_update promise.role_switch promise.export parallel.context request.unmet
model.numerics capture.slot weight.read weight.aliased plugin.failed plugin.forbidden"""


def test_every_reason_code_of_the_core_is_described():
    assert list(REASON_CODES) == CODES.split()
    assert all(text.endswith(".") for text in REASON_CODES.values())


def test_a_code_without_a_prefix_that_the_core_does_not_know_is_refused():
    with pytest.raises(ValueError, match="no plugin's name as prefix"):
        Reason("mystery", "?")
    with pytest.raises(ValueError, match="at least one reason"):
        Decline(strategy="x", reasons=[])


# --- release votes -------------------------------------------------------------------------------


def test_one_keep_is_enough_and_without_a_release_vote_nothing_goes(plan, backend):
    def release_weights(layer, deployment, readers):
        return Keep("q_b_proj", "acme's draft model shares it")

    plan.vendor(release_weights)
    layer = plan("glm-5.2", role="decode", cann="9.1.0").layers[0]
    assert layer.weight("q_b_proj").action == "keep"
    assert "acme's draft model shares it" in layer.weight("q_b_proj").reasons[0]
    assert layer.weight("kv_b_proj").action == "release"


def test_a_release_vote_never_beats_a_reader(plan):
    def release_weights(layer, deployment, readers):
        return [Release(name, "acme is sure") for name in ("w_vc", "nonsense")]

    plan.vendor(release_weights)
    layer = plan("glm-5.2", role="decode", cann="9.1.0").layers[0]
    assert layer.weight("w_vc").action == "keep"
    failed = [d for d in layer.declined if d.hook == "release_weights"]
    assert len(failed) == 1
    assert "nonsense" in failed[0].reasons[0].message


def test_an_offer_with_a_misspelt_weight_is_not_trusted(plan, refusals):
    def select_bmm_kernel(bmm, deployment):
        return Offer(strategy="typo", impl="acme:k", reads=["w_cv"])

    plan.vendor(select_bmm_kernel)
    layer = plan("glm-5.2", role="decode", cann="9.1.0").layers[0]
    assert "w_cv" in refusals(layer, "typo", "v_up")["plugin.failed"]


# --- batch invariance ----------------------------------------------------------------------------


def test_batch_invariance_takes_one_strategy_for_all_row_counts(plan, refusals, make_layer):
    layer = plan.layers(
        [make_layer(qk_nope_head_dim=192)], role="null", cann="8.5.0", batch_invariant=True
    ).layers[0]
    assert [e.strategy for e in layer.q_absorb] == ["torch.bmm"]
    assert "batch invariance" in refusals(layer, BMT, "q_absorb")["tokens.limit"]
    with pytest.raises(RequestUnmetError, match="batch invariance"):
        plan.layers([make_layer()], role="decode", batch_invariant=True, requests=f"v_up={BMT}")


def test_json_holds_the_schema_of_the_design(plan):
    data = json.loads(plan("glm-5.2", role="decode", cann="9.1.0").to_json())
    assert data["schema"] == 1
    assert list(data) == [
        "schema",
        "model",
        "deployment",
        "fingerprint",
        "plugins",
        "layers",
        "totals",
        "warnings",
    ]
    assert list(data["layers"][0]) == [
        "layer_id",
        "is_nextn",
        "kv_layout",
        "path",
        "q_absorb",
        "v_up",
        "declined",
        "unused",
        "weights",
    ]
    assert list(data["layers"][0]["weights"][0]) == [
        "name",
        "dtype",
        "bytes",
        "action",
        "reasons",
        "readers",
    ]
    assert set(data["totals"]["bytes"]) == {
        "loaded",
        "prepared",
        "release",
        "restore",
        "duplicate",
        "resident_after",
    }
    assert {tuple(p) for p in data["plugins"]} == {("name", "dist", "version", "status")}
    totals = data["totals"]["bytes"]
    rows = list(itertools.chain.from_iterable(layer["weights"] for layer in data["layers"]))
    assert totals["release"] == sum(r["bytes"] for r in rows if r["action"] == "release")
    assert totals["resident_after"] == (
        totals["loaded"] + totals["prepared"] - totals["release"] - totals["restore"]
    )


def test_roles_are_enum_members_too():
    assert Deployment(role=Role.DECODE).role is Role.DECODE
