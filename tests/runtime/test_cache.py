"""The paged latent cache and its RoPE tables."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve

from npu_backend import KvLayout, PrepareError
from npu_backend.runtime import LayerCache, rope_tables


def test_a_cache_has_the_shapes_of_its_layout(h):
    layer = h.layer(kv_layout=KvLayout(block_size=16))
    cache = LayerCache.allocate(layer, 3, max_positions=20)
    assert cache.k_nope.shape == (3, 16, 1, 32)
    assert cache.k_rope.shape == (3, 16, 1, 8)
    assert cache.cos.shape == cache.sin.shape == (20, 8)
    assert cache.num_slots == 48
    assert {t.dtype for t in cache.tensors().values()} == {torch.bfloat16}
    assert cache.problems(layer) == []


def test_a_layer_without_rope_has_no_tables(h):
    layer = h.layer(use_rope=False)
    cache = LayerCache.allocate(layer, 1)
    assert (cache.cos, cache.sin) == (None, None)
    assert set(cache.tensors()) == {"cache.k_nope", "cache.k_rope"}
    with pytest.raises(PrepareError, match="the cache has no RoPE tables"):
        cache.tables()


def test_both_halves_of_a_table_hold_the_angle_of_the_pair():
    cos, sin = rope_tables(8, 5, theta=100.0, dtype=torch.float64)
    for position in range(5):
        for column in range(8):
            angle = position * 100.0 ** (-2 * (column % 4) / 8)
            assert cos[position, column].item() == pytest.approx(math.cos(angle))
            assert sin[position, column].item() == pytest.approx(math.sin(angle))


def test_a_host_brings_its_own_tables(h):
    cos, sin = torch.ones(3, 8), torch.zeros(3, 8)
    cache = LayerCache.allocate(h.layer(), 1, cos=cos, sin=sin)
    assert cache.tables() == (cos, sin)


QUANTIZED = {
    # latent dtype and width, key dtype and width, shapes of the factors (facts: npu_mla_prolog_v3)
    "int8": (torch.int8, 512, torch.bfloat16, 64, (1,), None, None),
    "fp8": (torch.float8_e4m3fn, 512, torch.bfloat16, 64, (1,), None, None),
    "int8_channel": (torch.int8, 512, torch.int8, 64, (1, 512), (1, 64), None),
    "int8_packed": (torch.int8, 656, torch.bfloat16, 0, None, None, (1,)),
    "fp8_packed": (torch.float8_e4m3fn, 656, torch.bfloat16, 0, None, None, None),
}


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_quantized_cache_has_the_ops_dtypes_and_widths(h, dtype):
    layer = h.layer(kv_lora_rank=512, qk_rope_head_dim=64, kv_layout=KvLayout(dtype=dtype))
    cache = LayerCache.allocate(layer, 2)
    factors = (cache.latent_factor, cache.key_factor, cache.clip_alpha)
    shapes = [None if f is None else tuple(f.shape) for f in factors]
    assert (
        cache.k_nope.dtype,
        cache.k_nope.shape[-1],
        cache.k_rope.dtype,
        cache.k_rope.shape[-1],
        *shapes,
    ) == QUANTIZED[dtype]
    assert cache.problems(layer) == []


def test_missing_and_needless_factors_are_told(h):
    layer = h.layer(kv_layout=KvLayout(dtype="int8"))
    good = LayerCache.allocate(layer, 1)
    bare = evolve(good, latent_factor=None)
    assert bare.problems(layer) == ["latent_factor is missing, and a cache of int8 needs it"]
    more = evolve(good, key_factor=torch.ones(1, 8))
    assert more.problems(layer) == ["key_factor is given, and a cache of int8 has none"]
    wrong = evolve(good, latent_factor=torch.ones(2))
    assert wrong.problems(layer) == ["latent_factor is (2,) torch.float32, not (1,) float32"]


def test_every_difference_is_told(h):
    layer = h.layer()
    good = LayerCache.allocate(layer, 2)
    bad = LayerCache(
        layout=good.layout,
        k_nope=good.k_nope.float(),
        k_rope=good.k_rope[..., :4],
        cos=good.cos[:, :4],
    )
    assert bad.problems(layer) == [
        "k_nope is torch.float32, the layout says bfloat16",
        "k_rope is (2, 128, 1, 4), not (blocks, 128, 1, 8)",
        "k_rope is not contiguous (strides (1024, 8, 8, 1))",
        "cos is (4096, 4), not (positions, 8)",
        "the layer rotates, and the cache has no sin table",
    ]
