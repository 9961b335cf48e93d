"""Seeded weights: deterministic, of the plan's shapes and bytes, each alone on its storage."""

from __future__ import annotations

import pytest
import torch

from npu_backend import KvLayout
from npu_backend.errors import NpuBackendError
from npu_backend.model.weights import loaded_weights
from npu_backend.runtime.prove import check_executable, seeded_weights

QUANTS = ["none", "w8a8-dynamic", "w8a8-static"]


def storage_of(tensor):
    return tensor.untyped_storage()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("q_lora_rank", [32, None])
def test_weights_are_those_of_the_plan_to_the_byte(tiny, quant, tp, q_lora_rank):
    layer = tiny(quant=quant, q_lora_rank=q_lora_rank)
    loaded = seeded_weights(layer, tp).loaded
    specs = loaded_weights(layer, tp)
    assert list(loaded) == [s.name for s in specs]
    for spec in specs:
        tensor = loaded[spec.name]
        assert tuple(tensor.shape) == spec.shape, spec.name
        assert str(tensor.dtype) == f"torch.{spec.dtype}", spec.name
        assert storage_of(tensor).nbytes() == spec.bytes, spec.name


@pytest.mark.parametrize("quant", QUANTS)
def test_every_weight_is_alone_on_its_storage(tiny, quant):
    weights = seeded_weights(tiny(quant=quant, w_kc_layout="strided", w_vc_layout="strided"), 1)
    given = {**weights.loaded, **weights.gammas}
    assert len({storage_of(t).data_ptr() for t in given.values()}) == len(given)
    for name, tensor in given.items():
        assert tensor._base is None, f"{name} is a view, and its base would keep the bytes"


def test_same_seed_same_bits_other_layer_other_bits(tiny):
    def of(seed=4, **changes):
        return seeded_weights(tiny(**changes), 1, seed=seed).loaded

    first, again = of(), of()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["q_b_proj"], of(layer_id=1)["q_b_proj"])
    assert not torch.equal(first["q_b_proj"], of(is_nextn=True)["q_b_proj"])
    assert not torch.equal(first["q_b_proj"], of(seed=5)["q_b_proj"])


@pytest.mark.parametrize(
    ("kc", "vc", "strides"),
    [
        ("strided", "contiguous", ((16 * 64, 1, 16), (64 * 16, 16, 1))),
        ("contiguous", "strided", ((16 * 64, 64, 1), (64 * 16, 1, 64))),
    ],
)
def test_absorbed_weights_are_split_of_kv_b_in_the_declared_layout(tiny, kc, vc, strides):
    loaded = seeded_weights(tiny(w_kc_layout=kc, w_vc_layout=vc), 1).loaded
    assert (loaded["w_kc"].stride(), loaded["w_vc"].stride()) == strides
    halves = loaded["kv_b_proj"].view(4, 32, 64)
    assert torch.equal(loaded["w_kc"], halves[:, :16])
    assert torch.equal(loaded["w_vc"], halves[:, 16:].transpose(1, 2))


def test_activations_stay_of_the_order_of_one(tiny):
    loaded = seeded_weights(tiny(hidden_size=2048, q_lora_rank=512), 1).loaded
    x = torch.randn(8, 2048, generator=torch.Generator().manual_seed(0))
    for name, source in (("fused_qkv_a_proj", x), ("q_b_proj", x[:, :512])):
        out = source @ loaded[name].float().t()
        assert 0.8 < float(out.std()) < 1.2, name
        assert abs(float(loaded[name].float().mean())) < 1e-3


def test_a_quantized_kv_b_gives_absorbed_weights_of_its_dense_values(tiny):
    weights = seeded_weights(tiny(quant={"kv_b_proj": "w8a8-dynamic"}), 1)
    kv_b, scale = weights.loaded["kv_b_proj"], weights.channel_scales["kv_b_proj"]
    assert torch.equal(weights.loaded["kv_b_proj.scale"], scale)
    dense = (kv_b.float() * scale[:, None]).bfloat16().view(4, 32, 64)
    assert torch.equal(weights.loaded["w_kc"], dense[:, :16])


def test_static_scales_are_packed_as_the_plan_counts_them(tiny):
    weights = seeded_weights(tiny(quant="w8a8-static"), 1)
    name = "q_b_proj"
    packed, weight = weights.loaded[f"{name}.scale"], weights.loaded[name]
    rows = weight.shape[0]
    bias = packed[rows : 2 * rows].view(torch.int32)
    offset = packed[2 * rows + 1 :].view(torch.int32)
    assert packed.shape == (2 * rows + 2,)
    torch.testing.assert_close(packed[:rows], weights.channel_scales[name] * packed[2 * rows])
    assert torch.equal(bias, -offset * weight.sum(-1, dtype=torch.int32))


def test_gammas_are_there_for_the_norms_that_the_layer_has(tiny):
    assert set(seeded_weights(tiny(), 1).gammas) == {"q_a_layernorm", "kv_a_layernorm"}
    assert set(seeded_weights(tiny(q_lora_rank=None), 1).gammas) == {"kv_a_layernorm"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"quant": {"q_b_proj": "hif8"}}, "q_b_proj is hif8"),
        ({"quant": {"kv_b_proj": "fp8-block"}}, "kv_b_proj is fp8-block"),
        ({"w_dtype": "float8_e4m3fn"}, "w_kc and w_vc of float8_e4m3fn"),
        ({"kv_layout": KvLayout("PA_BLK_NZ")}, "PA_BLK_NZ"),
    ],
)
def test_what_is_planned_only_says_so(tiny, change, word):
    with pytest.raises(NpuBackendError, match="not executed yet") as caught:
        check_executable(tiny(**change))
    assert word in str(caught.value)
    with pytest.raises(NpuBackendError, match="not executed yet"):
        seeded_weights(tiny(**change), 1)
