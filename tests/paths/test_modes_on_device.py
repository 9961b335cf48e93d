"""Every op call of every path on the simulated NPU: each mode, cache and quantization once.

Small enough to run on every torch_npu package of the matrix, where each call meets the schema that
the package registers. On lines without an op the plan refuses the path, and that is what is seen;
lines before 26.0 have no op for what A5 adds, and the oldest do not know the chip.
"""

from __future__ import annotations

import pytest

import npu_backend
from npu_backend import KvLayout

CACHES = [
    ("none", "none", "bfloat16", "PA_BSND"),
    ("none", "none", "bfloat16", "PA_NZ"),
    ("none", "w8a8-dynamic", "bfloat16", "PA_BSND"),
    ("none", "w8a8-dynamic", "int8_channel", "PA_BSND"),
    ("none", "w8a8-dynamic", "int8_channel", "PA_NZ"),
    ("none", "w8a8-dynamic", "int8_packed", "PA_BSND"),
    ("w8a8-dynamic", "w8a8-dynamic", "int8", "PA_BSND"),
    ("w8a8-dynamic", "w8a8-dynamic", "int8", "PA_NZ"),
    ("w8a8-dynamic", "w8a8-dynamic", "int8_packed", "PA_BSND"),
    ("mxfp8", "mxfp8", "fp8", "PA_BSND"),
    ("mxfp8", "mxfp8", "fp8", "PA_NZ"),
    ("mxfp8", "mxfp8", "fp8_packed", "PA_BSND"),
    ("fp8", "fp8", "fp8", "PA_BSND"),
    ("fp8", "fp8", "fp8_packed", "PA_BSND"),
]
"""(qkv_a, q_b, cache, cache mode): the triples of npu_mla_prolog_v3 beside the plain bf16 ones."""


@pytest.mark.npu(soc="A5")
@pytest.mark.needs_line("26.0")
@pytest.mark.parametrize(("qkv_a", "q_b", "cache", "mode"), CACHES)
def test_every_cache_that_mlaprolog_writes(
    npu_device, internal_formats, make_layer, prove_path, qkv_a, q_b, cache, mode
):
    layer = make_layer(
        quant={"fused_qkv_a_proj": qkv_a, "q_b_proj": q_b},
        kv_layout=KvLayout(mode, dtype=cache),
        indexer=npu_backend.Indexer("own"),
    )
    prove_path(layer, "mlaprolog", "A5")


@pytest.mark.npu(soc="A3")
@pytest.mark.parametrize("library", ["sgl-kernel-npu", "vllm-ascend"])
@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
def test_both_caches_of_both_mlapos(
    npu_device, internal_formats, make_layer, prove_path, mode, library
):
    quant = dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), "w8a8-static")
    indexer = npu_backend.Indexer("own")
    layer = make_layer(quant=quant, kv_layout=KvLayout(mode), indexer=indexer)
    prove_path(layer, "mlapo", "A3", kernels=library)


@pytest.mark.npu(soc="A3")
def test_mlapo_of_vllm_ascend_takes_sizes_from_the_tensors(
    npu_device, internal_formats, make_layer, prove_path
):
    quant = dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), "w8a8-static")
    sizes = {"hidden_size": 1024, "q_lora_rank": 768, "qk_nope_head_dim": 192}
    layer = make_layer(quant=quant, kv_layout=KvLayout(block_size=512), **sizes)
    prove_path(layer, "mlapo", "A3", kernels="vllm-ascend")


@pytest.mark.npu(soc="A3")
@pytest.mark.parametrize("rank", [1536, None], ids=lambda r: f"q_lora_rank {r}")
@pytest.mark.parametrize("kind", ["none", "w8a8-static", "w8a8-dynamic"])
def test_absorb_in_every_quantization_of_a3(
    npu_device, internal_formats, make_layer, prove_path, kind, rank
):
    prove_path(make_layer(quant=kind if kind != "none" else {}, q_lora_rank=rank), "absorb", "A3")


@pytest.mark.npu(soc="A5")
@pytest.mark.needs_line("26.0")
@pytest.mark.parametrize("rank", [1536, None], ids=lambda r: f"q_lora_rank {r}")
@pytest.mark.parametrize("kind", ["mxfp8", "fp8"])
def test_absorb_in_every_quantization_of_a5(
    npu_device, internal_formats, make_layer, prove_path, kind, rank
):
    prove_path(make_layer(quant=kind, q_lora_rank=rank), "absorb", "A5")


@pytest.mark.npu(soc="A3")
def test_absorb_without_rope(npu_device, internal_formats, make_layer, prove_path):
    prove_path(make_layer(use_rope=False), "absorb", "A3")
