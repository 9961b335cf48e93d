"""The column "0.5.23" of docs/sglang.md, by SGLang's own predicate, router and constructor."""

from __future__ import annotations

import importlib.util
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_world.start import NPU_MODULE, PRE_MODULE

_SPEC = importlib.util.spec_from_file_location(
    "truth_table", Path(__file__).parents[2] / "hosts" / "test_hosts_truth_table.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
truth = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(truth)

PATHS = {
    "forward_mlapo": "mlapo",
    "forward_mlaprolog": "mlaprolog",
    "forward_absorb_prepare_npu_rms_norm_cache": "absorb",
}


def projection(kind: str, *, modelslim: bool, size: int) -> Any:
    """A projection as far as the constructor and the router look at it."""
    methods = import_module("sglang.srt.hardware_backend.npu.quantization.linear_method_npu")
    kernels = {
        "w8a8-dynamic": "NPUW8A8Int8DynamicLinearMethod",
        "w8a8-static": "NPUW8A8Int8LinearMethod",
        "mxfp8": "NPUMXFP8LinearMethod",
    }
    dtypes = {"none": torch.bfloat16, "mxfp8": torch.float8_e4m3fn}
    kernel = getattr(methods, kernels[kind])() if kind in kernels else None
    method = types.SimpleNamespace()
    if modelslim:
        method.quantization_config = types.SimpleNamespace(get_name=lambda: "modelslim")
    return types.SimpleNamespace(
        weight=torch.empty(0, dtype=dtypes.get(kind, torch.int8)),
        weight_scale=torch.ones(1) if kind != "none" else None,
        quant_method=method,
        scheme=types.SimpleNamespace(kernel=kernel) if kernel is not None else None,
        input_size=size,
    )


@pytest.fixture
def routed(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``routed(key) -> path``: which of its three methods SGLang's router calls."""
    pre = import_module(PRE_MODULE)
    ran: list[str] = []
    for name, path in PATHS.items():

        def method(self: Any, positions: Any, states: Any, *rest: Any, path: str = path) -> Any:
            ran.append(path)
            return (None,) * (8 if path == "mlaprolog" else 7)

        monkeypatch.setattr(pre.NPUFusedMLAPreprocess, name, method)

    def parts(key: tuple[str, str, str]) -> dict[str, Any]:
        chip, kind, quant = key
        qkv_a, q_b, modelslim, ignored = truth.QUANTS[quant]
        monkeypatch.setattr(pre, "is_npu_arch35", lambda: chip == "A5")
        pool = types.SimpleNamespace(index_head_dim=128 if kind == "DSA" else None)
        monkeypatch.setattr(pre, "get_token_to_kv_pool", lambda: pool)
        config = types.SimpleNamespace()
        if ignored:
            config.ignore = ["model.layers.0.mlp.gate", "model.layers.0.self_attn.kv_b_proj"]
        return {
            "fused_qkv_a_proj_with_mqa": projection(qkv_a, modelslim=modelslim, size=7168),
            "q_b_proj": projection(q_b, modelslim=modelslim, size=1536),
            "quant_config": config,
        }

    def route(key: tuple[str, str, str]) -> str:
        made = parts(key)
        norm = types.SimpleNamespace(hidden_size=512)
        preprocess = pre.NPUFusedMLAPreprocess(
            made["fused_qkv_a_proj_with_mqa"],
            *(norm, norm, made["q_b_proj"], torch.empty(1), None, 0, 8, 128, 64, 128),
            made["quant_config"],
        )
        preprocess.forward(None, None, None, None)
        return ran[-1]

    route.parts = parts  # type: ignore[attr-defined]
    route.ran = ran  # type: ignore[attr-defined]
    return route


@pytest.mark.parametrize("key", truth.KEYS, ids=", ".join)
def test_sglang_s_router_gives_its_column(routed: Any, key: tuple[str, str, str]) -> None:
    assert routed(key) == truth.TABLE[key][1].rstrip("*")


@pytest.mark.parametrize(
    "key", [k for k in truth.KEYS if truth.TABLE[k][1].endswith("*")], ids=", ".join
)
def test_on_an_mla_layer_its_mlaprolog_never_runs(
    routed: Any, key: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``*``: the constructor is called without one argument, so no ignore list is seen."""
    functions = import_module(NPU_MODULE)
    monkeypatch.setattr(functions, "is_mla_preprocess_enabled", lambda: True)
    norm = types.SimpleNamespace(hidden_size=512)
    module = types.SimpleNamespace(
        **routed.parts(key),
        q_a_layernorm=norm,
        kv_a_layernorm=norm,
        w_kc=torch.empty(1),
        rotary_emb=None,
        layer_id=0,
        num_local_heads=8,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    functions.forward_mla_prepare_npu(module, None, None, None, None, False)
    assert module.mla_preprocess.quant_config is None
    assert module.mla_preprocess.v_head_dim is module.quant_config
    assert routed.ran == ["absorb"]
