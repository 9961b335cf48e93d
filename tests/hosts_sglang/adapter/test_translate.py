"""SGLang's objects as records: its own modules and its own published context."""

from __future__ import annotations

import types
from importlib import import_module
from typing import Any

import pytest
import torch
from sglang_world.model import attentions, build, config_of, published

from npu_backend.deployment import Phase
from npu_backend.errors import DeploymentError, ModelError
from npu_backend.hosts.sglang.environment import Environment
from npu_backend.hosts.sglang.settings import Machine, deployment_of, read_settings
from npu_backend.hosts.sglang.translate import layers_of, quantization

MACHINE = Machine(soc="Ascend910_9391", cann="9.2.0", torch_npu="2.13.0")


def settings(environ: dict[str, str] | None = None, **arguments: Any) -> Any:
    with published(**arguments) as context:
        return read_settings(context, environ or {})


def deployment(
    *, draft: bool = False, environ: dict[str, str] | None = None, **arguments: Any
) -> Any:
    own = Environment.read(environ or {})
    return deployment_of(settings(environ, **arguments), MACHINE, own, is_draft=draft)


@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
def test_the_role_is_the_published_one(world: Any, role: str) -> None:
    assert deployment(disaggregation_mode=role).role.value == role


def test_nothing_is_decided_before_the_context_is_published(world: Any) -> None:
    context = import_module("sglang.srt.runtime_context")
    with pytest.raises(DeploymentError, match="not published") as caught:
        read_settings(context, {})
    assert caught.value.code == "role.unknown"


def test_sglangs_own_role_read_raises_before_it_is_published(world: Any) -> None:
    """Why the plan is made after loading: the fact that the adapter relies on."""
    with pytest.raises(ValueError, match="not published"):
        import_module("sglang.srt.runtime_context").get_disagg()


@pytest.mark.parametrize(
    ("value", "main", "draft"),
    [("1", "path=fused", "path=fused@nextn"), (None, "path=absorb", "path=absorb@nextn")],
)
def test_mlapo_is_the_request(world: Any, value: str | None, main: str, draft: str) -> None:
    environ = {} if value is None else {"SGLANG_NPU_USE_MLAPO": value}
    assert [str(r) for r in deployment(environ=environ).requests] == [main]
    assert [str(r) for r in deployment(environ=environ, draft=True).requests] == [draft]


def test_the_machine_is_told_by_its_runtime(world: Any) -> None:
    adapters = import_module("npu_backend.hosts.sglang.adapter")
    machine = adapters.machine_of_this_process()
    simulated = world.simulation.settings
    assert machine.soc == simulated.soc
    assert machine.cann == simulated.cann
    assert machine.torch_npu is not None


BOUNDS = [
    # arguments; is_draft; what each phase may have at most
    ({"chunked_prefill_size": 4096}, False, {"extend": 4096}),
    ({"chunked_prefill_size": -1}, False, {}),
    ({"max_running_requests": 48}, False, {"decode": 48, "target_verify": 48, "idle": 48}),
    (
        {"chunked_prefill_size": 4096, "max_running_requests": 48, "enable_mixed_chunk": True},
        False,
        {"extend": 4144, "decode": 48},
    ),
    # Without a bound on requests a mixed chunk has none either.
    ({"chunked_prefill_size": 4096, "enable_mixed_chunk": True}, False, {"extend": None}),
    (
        {
            "max_running_requests": 48,
            "speculative_algorithm": "EAGLE",
            "speculative_num_draft_tokens": 4,
            "speculative_eagle_topk": 2,
        },
        False,
        {"decode": 48, "target_verify": 192, "draft_extend": 192},
    ),
    (
        {
            "max_running_requests": 48,
            "speculative_algorithm": "EAGLE",
            "speculative_num_draft_tokens": 4,
            "speculative_eagle_topk": 2,
        },
        True,
        {"decode": 96, "draft_extend": 192},
    ),
    # Rows are padded to a multiple of the attention-TP size.
    ({"tp_size": 16, "max_running_requests": 33}, False, {"decode": 48}),
    # An attention replica has its share of requests, and is padded to what another one runs.
    (
        {
            "tp_size": 4,
            "dp_size": 4,
            "enable_dp_attention": True,
            "attn_dp_size": 4,
            "max_running_requests": 64,
            "chunked_prefill_size": 512,
        },
        False,
        {"extend": 512, "decode": 512, "idle": 512},
    ),
]


@pytest.mark.parametrize(("arguments", "draft", "bounds"), BOUNDS)
def test_row_bounds_follow_from_the_scheduler_s_arguments(
    world: Any, arguments: dict[str, Any], draft: bool, bounds: dict[str, int | None]
) -> None:
    found = dict(deployment(draft=draft, **arguments).max_tokens)
    for phase, rows in bounds.items():
        assert found.get(Phase(phase)) == rows, phase
    if not bounds:
        assert found == {}


def test_captured_batches_bound_decode_rows(world: Any) -> None:
    """Graphs are captured up to a size that may be larger than the number of requests."""
    with published(max_running_requests=8) as context:
        graph = context.get_exec().graph
        config = types.SimpleNamespace(
            decode=types.SimpleNamespace(backend="full", bs=[1, 8, 16], max_bs=16),
            prefill=types.SimpleNamespace(backend="disabled"),
        )
        with graph.override(cuda_graph_config=config):
            read = read_settings(context, {})
    made = deployment_of(read, MACHINE, Environment())
    assert made.graph_capture
    assert dict(made.max_tokens)[Phase.DECODE] == 16


@pytest.mark.parametrize(
    ("arguments", "promise"),
    [
        ({"enable_lora": True}, "lora"),
        ({"enable_pd_role_switch": True}, "role_switch"),
        ({"custom_weight_loader": ["x.y"]}, "weight_update"),
        ({"checkpoint_engine_wait_weights_before_ready": True}, "weight_update"),
        ({"enable_memory_saver": True}, "weight_update"),
    ],
)
def test_arguments_become_promises(world: Any, arguments: dict[str, Any], promise: str) -> None:
    assert deployment(**arguments).promises == {promise}


def test_weights_that_a_sleep_keeps_are_no_promise(world: Any) -> None:
    made = deployment(enable_memory_saver=True, enable_weights_cpu_backup=True)
    assert made.promises == frozenset()


@pytest.mark.parametrize(
    ("arguments", "environ", "word"),
    [
        ({"weight_cache_mode": "client"}, {}, "weight_cache_mode"),
        ({"cpu_offload_gb": 4}, {}, "cpu_offload_gb"),
        ({"remote_instance_weight_loader_start_seed_via_transfer_engine": True}, {}, "addresses"),
        ({}, {"SGLANG_USE_AG_AFTER_QLORA": "1"}, "SGLANG_USE_AG_AFTER_QLORA"),
        ({"enable_attn_tp_input_scattered": True}, {}, "input_scattered"),
    ],
)
def test_what_is_not_translated_is_refused_by_name(
    world: Any, arguments: dict[str, Any], environ: dict[str, str], word: str
) -> None:
    with pytest.raises(DeploymentError, match="not translated") as caught:
        deployment(environ=environ, **arguments)
    assert word in str(caught.value)


# --- layers ---------------------------------------------------------------------------------------


def layers(read: Any = None, **options: Any) -> list[Any]:
    with published(disaggregation_mode="decode") as context:
        found = read or read_settings(context, {})
        is_nextn = options.pop("is_nextn", False)
        config = config_of(**options)
        model = build(config, is_nextn=is_nextn)
        return [layer for _, layer in layers_of(model, found, config=config)]


def test_a_layer_is_described_as_its_module_is(world: Any) -> None:
    one, two = layers(layers=2)
    assert (one.layer_id, two.layer_id) == (0, 1)
    assert (one.hidden_size, one.num_heads) == (7168, 8)
    assert (one.q_lora_rank, one.kv_lora_rank) == (1536, 512)
    assert (one.qk_nope_head_dim, one.qk_rope_head_dim, one.v_head_dim) == (128, 64, 128)
    assert (one.w_kc_layout, one.w_vc_layout) == ("strided", "contiguous")
    assert one.quant_of("q_b_proj") == "none"
    assert one.indexer.kind == "none"
    assert one.kv_layout.rope == "half"
    assert one.kind is two.kind or one.kind == two.kind


def test_dsa_layers_have_their_indexer_and_shared_ones_none_of_their_own(world: Any) -> None:
    own, shared = layers(layers=2, dsa=True, index_topk_pattern="FS")
    assert own.indexer.kind == "own"
    assert own.indexer.quant == "none"
    assert shared.indexer.kind == "shared"


def test_a_draft_model_s_layers_follow_the_last_layer(world: Any) -> None:
    (layer,) = layers(layers=61, is_nextn=True)
    assert layer.is_nextn
    assert layer.layer_id == 61


def test_without_yarn_keys_stand_in_pairs_unless_a_dsa_layer_is_preprocessed(world: Any) -> None:
    with published() as context:
        off = read_settings(context, {})
        on = read_settings(context, {"SGLANG_NPU_USE_MLAPO": "1"})
    plain = {"rope_scaling": None, "layers": 1}
    assert layers(off, **plain)[0].kv_layout.rope == "interleaved"
    assert layers(on, **plain)[0].kv_layout.rope == "interleaved"
    assert layers(off, dsa=True, **plain)[0].kv_layout.rope == "interleaved"
    assert layers(on, dsa=True, **plain)[0].kv_layout.rope == "half"


def test_the_cache_follows_the_arguments(world: Any) -> None:
    with published(page_size=64, kv_cache_dtype="bfloat16") as context:
        read = read_settings(context, {"SGLANG_USE_FIA_NZ": "1"})
    (layer,) = layers(read, layers=1)
    assert (layer.kv_layout.block_size, layer.kv_layout.dtype) == (64, "bfloat16")
    assert layer.kv_layout.cache_mode == "PA_NZ"


def test_a_bias_is_refused_for_no_path_adds_one(world: Any) -> None:
    with published() as context:
        model = build(config_of(layers=1))
        norm = attentions(model)[0].kv_a_layernorm
        norm.bias = torch.nn.Parameter(torch.ones(512, device="npu"), requires_grad=False)
        with pytest.raises(ModelError, match="bias") as caught:
            layers_of(model, read_settings(context, {}), config=model.config)
    assert caught.value.code == "model.numerics"


KINDS = {
    "NPUW8A8Int8DynamicLinearMethod": "w8a8-dynamic",
    "NPUMXFP8LinearMethod": "mxfp8",
    "NPUW8A8Int8LinearMethod": "w8a8-static",
}


@pytest.mark.parametrize("held", ["scheme", "method"])
@pytest.mark.parametrize("name", KINDS)
def test_quantization_is_told_by_sglang_s_own_classes(world: Any, name: str, held: str) -> None:
    module = import_module("sglang.srt.hardware_backend.npu.quantization.linear_method_npu")
    kernel = getattr(module, name)()
    linear = types.SimpleNamespace(
        input_scale=1, input_offset=0, deq_scale=1, quant_bias=0, quant_method=object()
    )
    if held == "scheme":
        linear.scheme = types.SimpleNamespace(kernel=kernel)
    else:
        linear.quant_method = kernel
    assert quantization(linear, "layer 0") == KINDS[name]


def test_a_static_projection_without_an_offset_is_symmetric(world: Any) -> None:
    module = import_module("sglang.srt.hardware_backend.npu.quantization.linear_method_npu")
    linear = types.SimpleNamespace(quant_method=module.NPUW8A8Int8LinearMethod())
    assert quantization(linear, "layer 0") == "w8a8-static-symmetric"


def test_a_method_that_is_not_known_is_refused_with_its_name(world: Any) -> None:
    module = import_module("sglang.srt.hardware_backend.npu.quantization.linear_method_npu")
    linear = types.SimpleNamespace(quant_method=module.NPU_W4A4DynamicLinearMethod())
    with pytest.raises(ModelError, match="NPU_W4A4DynamicLinearMethod"):
        quantization(linear, "layer 0, q_b_proj")
