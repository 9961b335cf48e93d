"""Whatever a host hands the public API, what cannot be used is an error in four parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

import npu_backend
from npu_backend import (
    Deployment,
    DeploymentError,
    Indexer,
    KernelLibrary,
    KvLayout,
    MlaLayer,
    MlpParallel,
    ModelError,
    NpuBackendError,
)
from npu_backend.api import Backend

JUNK: list[Any] = [
    None, True, False, 0, -1, 1.5, float("nan"), "", "nope", "16", b"x", [], [5], [None], {},
    {1: 2}, (), ("a",), {"nope": "nope"}, object(), 10**30, Path("nope"), MlaLayer, "decode=1",
]  # fmt: skip

LAYER: dict[str, Any] = {
    "layer_id": 0, "hidden_size": 7168, "num_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def _four_parts(error: NpuBackendError) -> None:
    assert error.what
    assert error.whom
    assert error.why
    assert all(error.why)
    assert error.remedy


def _names(cls: type) -> list[str]:
    return [a.name for a in attrs.fields(cls) if a.init]


RECORDS = [
    (cls, given, name)
    for cls, given in ((Deployment, {}), (MlaLayer, LAYER), (KvLayout, {}), (Indexer, {}))
    for name in _names(cls)
] + [(MlpParallel, {}, name) for name in _names(MlpParallel)]


@pytest.mark.parametrize(
    ("cls", "given", "name"), RECORDS, ids=[f"{c.__name__}.{n}" for c, _, n in RECORDS]
)
def test_a_record_takes_a_value_or_says_in_four_parts_why_not(cls, given, name):
    for junk in JUNK:
        try:
            record = cls(**{**given, name: junk})
        except NpuBackendError as err:
            _four_parts(err)
        else:
            # What was taken is what the annotation says, so that it can be read again.
            assert attrs.evolve(record) == record


@pytest.mark.parametrize(
    ("name", "junk"),
    [
        ("cann", 9.1),
        ("torch_npu", 26),
        ("attn_tp_size", "16"),
        ("attn_tp_size", 0),
        ("attn_tp_size", True),
        ("tp_size", 0),
        ("tp_size", -8),
        ("context_parallel_size", True),
        ("context_parallel_size", 0),
        ("graph_capture", "no"),
        ("batch_invariant", 1),
        ("restore", None),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", {"decode": "5"}),
        ("phases", 5),
        ("promises", 5),
        ("promises", [5, "lora"]),
        ("requests", [5]),
        ("soc", 950),
        ("kernels", 5),
        ("catalog", None),
    ],
)
def test_a_deployment_refuses(name, junk):
    with pytest.raises(DeploymentError) as caught:
        Deployment(**{name: junk})
    _four_parts(caught.value)


@pytest.mark.parametrize(
    ("name", "junk"),
    [("hidden_size", True), ("hidden_size", "7168"), ("num_heads", 0), ("layer_id", -1),
     ("is_nextn", 1), ("use_rope", "yes"), ("quant", 5), ("quant", {"q_b": "none"}),
     ("quant", {"q_b_proj": "int7"}), ("kv_layout", "PA_BSND"), ("indexer", "own"),
     ("rms_norm_eps", 0), ("rms_norm_eps", True), ("measured", [1]), ("dtype", "int8")],
)  # fmt: skip
def test_a_layer_refuses(name, junk):
    with pytest.raises(ModelError) as caught:
        MlaLayer(**{**LAYER, name: junk})
    _four_parts(caught.value)


@pytest.mark.parametrize(
    "text",
    ["sgl-kernel-npu==abc", "sgl-kernel-npu==", "vllm-ascend==v", "none==1", "none==", "==1"],
)
def test_a_kernel_librarys_version_is_a_version(text):
    with pytest.raises(DeploymentError, match=r"library\.version") as caught:
        KernelLibrary.parse(text)
    _four_parts(caught.value)
    for good in ("sgl-kernel-npu==2026.2.1", "vllm-ascend==0.18.0rc1", "none", "vllm-ascend"):
        assert str(KernelLibrary.parse(good)) == good


@pytest.mark.parametrize("model", [None, 123, {}, [], b"glm-5.2", object(), True, 1.5])
@pytest.mark.parametrize("read", [npu_backend.read_model, npu_backend.read_mlp_layers])
def test_what_names_no_model_is_refused(read, model):
    with pytest.raises(ModelError) as caught:
        read(model)
    _four_parts(caught.value)


@pytest.mark.parametrize("layers", [5, {}, {"0": 1}, b"0", object(), [None], [True], ["x"], []])
def test_what_selects_no_layer_is_refused(layers):
    with pytest.raises(ModelError) as caught:
        npu_backend.read_model("deepseek-v3", layers=layers)
    _four_parts(caught.value)


@pytest.mark.parametrize("name", ["quant", "dtype", "block_size", "kv_dtype", "cache_mode", "host"])
def test_reading_a_model_takes_an_option_or_says_why_not(name):
    for junk in JUNK:
        try:
            npu_backend.read_model("deepseek-v3", layers=[0], **{name: junk})
        except NpuBackendError as err:
            _four_parts(err)


@pytest.mark.parametrize("layers", [None, 5, "x", "", {}, [1], [None], object(), b"", MlaLayer])
def test_what_is_no_layers_is_not_planned(backend: Backend, layers):
    with pytest.raises((ModelError, DeploymentError)) as caught:
        backend.plan(layers, Deployment())
    _four_parts(caught.value)


def test_one_layer_is_no_list_of_layers(backend: Backend):
    layer = MlaLayer(**LAYER)
    with pytest.raises(ModelError, match=r"it is a MlaLayer\n.*a list of MlaLayer records"):
        backend.plan(layer, Deployment())


@pytest.mark.parametrize("deployment", [None, "decode", {}, Deployment])
def test_what_is_no_deployment_is_not_planned_for(backend: Backend, deployment):
    with pytest.raises(DeploymentError) as caught:
        backend.plan([MlaLayer(**LAYER)], deployment)
    _four_parts(caught.value)
    with pytest.raises(NpuBackendError) as caught:
        backend.plan_bmm(None, Deployment())
    _four_parts(caught.value)


@pytest.mark.parametrize("name", ["enable", "disable", "strict", "third_party", "catalog"])
def test_loading_takes_an_option_or_says_why_not(name):
    for junk in JUNK:
        try:
            npu_backend.load(**{"third_party": False, name: junk})
        except NpuBackendError as err:
            _four_parts(err)
