"""Every built-in passes the suites that a vendor's plugin has to pass."""

from __future__ import annotations

from attrs import evolve

from npu_backend import Indexer, MlaLayer
from npu_backend.testing import (
    BmmKernelConformance,
    PreprocessPathConformance,
    ReleasePolicyConformance,
)
from npu_backend_builtin import absorb, mlapo, mlaprolog, role_release, transpose_bmm

LAYER = MlaLayer(
    layer_id=0,
    hidden_size=64,
    num_heads=4,
    q_lora_rank=32,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=24,
    indexer=Indexer("own"),
)
FUSED = evolve(
    LAYER,
    hidden_size=7168,
    num_heads=2,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
"""The smallest layer that the fused ops take on every line."""
STATIC = evolve(
    FUSED,
    hidden_size=2048,
    quant={"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"},
)


class TestTransposing(BmmKernelConformance):
    plugin = transpose_bmm
    strategy = transpose_bmm.TRANSPOSING
    sites = ("v_up", "q_absorb")
    shapes = ((4, 128, 256),)


class TestTransposingOverTheOldLimit(BmmKernelConformance):
    """B x K = 65536 of DeepSeek-V3, attention TP 1: from CANN 9.1 on A2 and A3, always on A5."""

    plugin = transpose_bmm
    strategy = transpose_bmm.TRANSPOSING
    shapes = ((128, 512, 128),)
    layouts = ("contiguous",)


class TestExplicit(BmmKernelConformance):
    plugin = transpose_bmm
    strategy = transpose_bmm.EXPLICIT
    sites = ("v_up", "q_absorb")
    shapes = ((4, 128, 256),)
    dtypes = ("float16",)


class TestCustom(BmmKernelConformance):
    plugin = transpose_bmm
    strategy = transpose_bmm.CUSTOM
    sites = ("v_up", "q_absorb")
    shapes = ((4, 128, 256),)
    socs = ("A2", "A3")


class TestPlain(BmmKernelConformance):
    plugin = transpose_bmm
    strategy = transpose_bmm.PLAIN
    sites = ("v_up", "q_absorb")
    shapes = ((3, 40, 56),)
    dtypes = ("float32",)


class TestRoleRelease(ReleasePolicyConformance):
    plugin = role_release


class TestAbsorb(PreprocessPathConformance):
    plugin = absorb
    layers = (LAYER, evolve(LAYER, q_lora_rank=None))


class TestMlaProlog(PreprocessPathConformance):
    plugin = mlaprolog
    layers = (FUSED,)
    refused = (LAYER,)


class TestMlapo(PreprocessPathConformance):
    plugin = mlapo
    # sgl-kernel-npu's schema returns what it is given, and functionalization takes no such op.
    backends = ("eager",)
    layers = (STATIC,)
    refused = (LAYER, FUSED)
