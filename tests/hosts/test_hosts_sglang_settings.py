"""SGLang's arguments as a Deployment: bounds, promises, requests, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace as Record

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_backend import DeploymentError, Phase
from npu_backend.hosts.sglang.environment import Environment
from npu_backend.hosts.sglang.settings import Machine, Settings, deployment_of, read_settings

MACHINE = Machine(soc="Ascend910_9391", cann="9.2.0", torch_npu="2.13.0")


def deployment(settings, environment=None, **more):
    return deployment_of(settings, MACHINE, environment or Environment(), **more)


def test_the_defaults_are_read(make_context):
    settings = read_settings(make_context(), {})
    assert settings == Settings(role="null")


def test_nothing_is_planned_before_the_context_is_published(make_context):
    context = make_context()

    def unpublished():
        raise ValueError("config namespace 'disagg' not published")

    context.get_disagg = unpublished
    with pytest.raises(DeploymentError, match="not published") as caught:
        read_settings(context, {})
    assert caught.value.code == "role.unknown"


@given(
    requests=st.integers(1, 512),
    chunk=st.none() | st.integers(1, 16384),
    graph=st.none() | st.integers(1, 512),
    prefill=st.none() | st.integers(1, 16384),
    draft=st.integers(1, 8),
    attn_tp=st.sampled_from([1, 2, 4, 8, 16]),
    replicas=st.sampled_from([1, 2, 4]),
    is_draft=st.booleans(),
    topk=st.integers(1, 4),
)
def test_no_step_of_the_scheduler_has_more_rows_than_its_bound(
    requests, chunk, graph, prefill, draft, attn_tp, replicas, is_draft, topk
):
    """A replica's rows: at most its requests or a captured size, times what one request brings;
    padded to a multiple of attention TP, and beside other replicas to the largest of them."""
    settings = Settings(
        role="null",
        tp_size=attn_tp * replicas,
        attn_tp_size=attn_tp,
        attn_dp_size=replicas,
        max_running_requests=requests,
        chunk=chunk,
        graph_rows=graph,
        prefill_graph_rows=prefill,
        draft_tokens=draft,
        draft_topk=topk,
    )
    bounds = dict(deployment(settings, is_draft=is_draft).max_tokens)

    def padded(rows):
        return -(-rows // attn_tp) * attn_tp

    batch = max(max(1, requests // replicas), graph or 0)
    rows = {
        Phase.DECODE: batch * (topk if is_draft else 1),
        Phase.TARGET_VERIFY: batch * draft,
        Phase.DRAFT_EXTEND: batch * draft,
        Phase.IDLE: batch * draft,
    }
    if chunk is not None:
        rows[Phase.EXTEND] = max(chunk, prefill or 0)
    for phase, most in rows.items():
        if replicas == 1:
            assert bounds[phase] == padded(most)
        elif chunk is None:
            assert phase not in bounds, "another replica may extend without a bound"
        else:
            assert bounds[phase] == padded(max(rows.values()))


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({"chunked_prefill_size": -1}, None),
        ({"chunked_prefill_size": 4096}, 4096),
        # Only a pipeline's chunks grow: SGLang's bound is 1.25 times, or max_prefill_tokens.
        ({"chunked_prefill_size": 4096, "enable_dynamic_chunking": True}, 4096),
        (
            {"chunked_prefill_size": 4096, "enable_dynamic_chunking": True, "pp_size": 2},
            16384,
        ),
        (
            {
                "chunked_prefill_size": 4097,
                "max_prefill_tokens": 1,
                "enable_dynamic_chunking": True,
                "pp_size": 2,
            },
            5122,
        ),
    ],
)
def test_chunks(make_context, changes, chunk):
    assert read_settings(make_context(**changes), {}).chunk == chunk


def test_adaptive_drafts_are_bound_by_the_most_they_may_become(make_context):
    context = make_context(
        speculative_algorithm="EAGLE",
        speculative_num_draft_tokens=2,
        max_speculative_num_draft_tokens=6,
        speculative_eagle_topk=3,
    )
    settings = read_settings(context, {})
    assert (settings.draft_tokens, settings.draft_topk) == (6, 3)


def test_captured_sizes_count_where_their_graphs_are_on(make_context):
    on = Record(backend="full", bs=[1, 8, 24], max_bs=16)
    off = Record(backend="disabled", bs=[1, 8, 24], max_bs=16)
    context = make_context(graph=Record(cuda_graph_config=Record(decode=on, prefill=off)))
    settings = read_settings(context, {})
    assert (settings.graph_rows, settings.prefill_graph_rows) == (24, None)
    assert deployment(settings).graph_capture


@pytest.mark.parametrize("value", ["1", "true", "True", " 1 "])
def test_mlapo_on_is_fused(make_context, value):
    settings = read_settings(make_context(), {"SGLANG_NPU_USE_MLAPO": value})
    assert [str(r) for r in deployment(settings).requests] == ["path=fused"]
    assert [str(r) for r in deployment(settings, is_draft=True).requests] == ["path=fused@nextn"]


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_mlapo_off_is_absorb(make_context, value):
    environ = {} if value is None else {"SGLANG_NPU_USE_MLAPO": value}
    assert [str(r) for r in deployment(read_settings(make_context(), environ)).requests] == [
        "path=absorb"
    ]


@pytest.mark.parametrize("mlapo", [True, False])
def test_a_prefill_worker_is_asked_for_nothing_unless_its_role_may_flip(mlapo):
    """It only extends: no fused path serves that, and the variable does not steer it."""
    settings = Settings(role="prefill", use_mlapo=mlapo)
    assert deployment(settings).requests == ()
    flips = Settings(role="prefill", use_mlapo=mlapo, role_switch=True)
    assert [str(r) for r in deployment(flips).requests] == [
        "path=fused" if mlapo else "path=absorb"
    ]
    promised = Environment.read({"NPU_BACKEND_SGLANG_PROMISES": "role_switch"})
    assert len(deployment(settings, promised).requests) == 1


def test_own_requests_stand_beside_it_and_a_path_replaces_it():
    settings = Settings(role="null", use_mlapo=True)
    beside = Environment.read({"NPU_BACKEND_SGLANG_REQUESTS": "v_up=torch.bmm"})
    assert [str(r) for r in deployment(settings, beside).requests] == [
        "path=fused",
        "v_up=torch.bmm",
    ]
    instead = Environment.read({"NPU_BACKEND_SGLANG_REQUESTS": "path=mlaprolog, v_up=torch.bmm"})
    assert [str(r) for r in deployment(settings, instead).requests] == [
        "path=mlaprolog",
        "v_up=torch.bmm",
    ]


def test_promises_are_those_of_the_arguments_and_of_the_environment(make_context):
    context = make_context(enable_lora=True, enable_pd_role_switch=True)
    own = Environment.read({"NPU_BACKEND_SGLANG_PROMISES": "export, local_prefill"})
    made = deployment(read_settings(context, {}), own)
    assert made.promises == {"lora", "role_switch", "export", "local_prefill"}


def test_a_promise_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(DeploymentError, match="moon: no such promise") as caught:
        Environment.read({"NPU_BACKEND_SGLANG_PROMISES": "moon,export"})
    assert "weight_update" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "environ", "word"),
    [
        ({"attn_cp_size": 2}, {}, "attn_cp_size"),
        ({"dcp_size": 2}, {}, "dcp_size"),
        ({"enable_attn_tp_input_scattered": True}, {}, "scattered"),
        ({"weight_cache_mode": "daemon"}, {}, "weight_cache_mode"),
        ({"offload": Record(cpu_offload_gb=0, offload_group_size=4)}, {}, "offload_group_size"),
        ({}, {"SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD": "1"}, "SPARSE_KV_OFFLOAD"),
        ({}, {"SGLANG_USE_AG_AFTER_QLORA": "true"}, "AG_AFTER_QLORA"),
    ],
)
def test_what_is_not_translated_is_refused_by_name(make_context, changes, environ, word):
    settings = read_settings(make_context(**changes), environ)
    with pytest.raises(DeploymentError, match="not translated") as caught:
        deployment(settings)
    assert word in str(caught.value)


def test_the_variables_are_read():
    on = Environment.read(
        {
            "NPU_BACKEND_SGLANG": "off",
            "NPU_BACKEND_SGLANG_SHADOW": "1",
            "NPU_BACKEND_SGLANG_ANY_VERSION": "yes",
            "NPU_BACKEND_SGLANG_RESTORE": "true",
            "NPU_BACKEND_STRICT": "1",
        }
    )
    assert (on.off, on.shadow, on.any_version, on.restore, on.strict) == (True,) * 5
    assert Environment.read({}) == Environment()
