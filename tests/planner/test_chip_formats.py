"""A plan holds only what its chip can compute with: no path's linear or cache in foreign formats.

Facts: 8-bit floats and MXFP8 exist on A5 only (npu_dynamic_quant, npu_dynamic_mx_quant,
npu_quant_matmul by chip; weight_quant_mode 3 to 5 of npu_mla_prolog_v3).
"""

from __future__ import annotations

import itertools

import pytest

from npu_backend import KvLayout, ModelError, SelectionError

FLOAT8 = ("fp8", "fp8-block", "mxfp8", "hif8")
INT8 = ("w8a8-static", "w8a8-static-symmetric", "w8a8-dynamic")
Q_LORA = ("fused_qkv_a_proj", "q_b_proj")
DIRECT = ("q_proj", "kv_a_proj_with_mqa")


def _layer(make_layer, name, kind, **more):
    rank = {} if name in Q_LORA else {"q_lora_rank": None}
    return make_layer(quant={name: kind}, **rank, **more)


@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
@pytest.mark.parametrize("soc", ["A2", "A3", "310P", "910", "310B"])
@pytest.mark.parametrize(("name", "kind"), list(itertools.product(Q_LORA + DIRECT, FLOAT8)))
def test_no_path_multiplies_in_8_bit_floats_outside_a5(plan, make_layer, role, soc, name, kind):
    with pytest.raises(SelectionError) as caught:
        plan.layers([_layer(make_layer, name, kind)], role=role, soc=soc)
    told = [why for why in caught.value.why if why.startswith("absorb, ")]
    assert told
    assert all(f"{name} is {kind}" in why for why in told)
    assert all("quant.mode" in why or "soc.undocumented" in why for why in told)


@pytest.mark.parametrize(("name", "kind"), list(itertools.product(Q_LORA + DIRECT, FLOAT8)))
def test_a5_has_them(plan, make_layer, name, kind):
    assert plan.layers([_layer(make_layer, name, kind)], soc="A5").layers[0].path


def test_mxfp8_needs_a_line_with_its_op(plan, make_layer):
    # npu_dynamic_mx_quant is registered since line 26.0, CANN 9.0; 8.5 is line 7.3.
    layer = make_layer(quant="mxfp8")
    assert plan.layers([layer], soc="A5", cann="9.0.0").layers[0].path
    with pytest.raises(SelectionError, match=r"op\.missing.*npu_dynamic_mx_quant"):
        plan.layers([layer], soc="A5", cann="8.5.0")


@pytest.mark.parametrize("soc", ["A2", "A3", "310P", "A5"])
@pytest.mark.parametrize("kind", INT8)
def test_int8_stays_where_it_is_documented(plan, make_layer, soc, kind):
    assert plan.layers([make_layer(quant=kind)], soc=soc).layers[0].path


@pytest.mark.parametrize("kind", ["w8a8-dynamic", "w8a8-static"])
@pytest.mark.parametrize("soc", ["910", "310B"])
def test_an_undocumented_product_is_refused(plan, make_layer, soc, kind):
    # npu_quant_matmul is documented for A2, A3, 310P and A5.
    with pytest.raises(SelectionError, match=r"soc\.undocumented.*npu_quant_matmul"):
        plan.layers([make_layer(quant=kind)], soc=soc)


def test_dynamic_quantization_takes_16_bit_activations(plan, make_layer):
    assert plan.layers([make_layer(quant="w8a8-dynamic", dtype="float16")]).layers[0].path
    with pytest.raises(SelectionError, match=r"dtype: .*not float32"):
        plan.layers([make_layer(quant="w8a8-dynamic", dtype="float32")])


@pytest.mark.parametrize("dtype", ["fp8", "fp8_packed"])
@pytest.mark.parametrize("soc", ["A2", "A3", "310P"])
def test_a_cache_of_8_bit_floats_needs_a5(plan, make_layer, soc, dtype):
    layer = make_layer(kv_layout=KvLayout(dtype=dtype))
    with pytest.raises(SelectionError, match=rf"absorb.*kv\.layout: the cache is {dtype}"):
        plan.layers([layer], soc=soc)
    assert plan.layers([layer], soc="A5").layers[0].path


@pytest.mark.parametrize("dtype", ["int8", "int8_channel", "int8_packed"])
def test_an_int8_cache_is_written_everywhere(plan, make_layer, dtype):
    assert plan.layers([make_layer(kv_layout=KvLayout(dtype=dtype))], soc="A3").layers[0].path


@pytest.mark.parametrize(
    ("size", "name"), [("hidden_size", "fused_qkv_a_proj"), ("q_lora_rank", "q_b_proj")]
)
@pytest.mark.parametrize("inputs", [64, 128, 192])
def test_mxfp8_needs_whole_pairs_of_blocks(plan, make_layer, size, name, inputs):
    # aclnnDynamicMxQuant: scales (..., ceil(K / 32 / 2), 2), 32 inputs to a scale.
    assert plan.layers([make_layer(quant="mxfp8", **{size: inputs})], soc="A5").layers[0].path
    for other in (inputs - 32, inputs - 1, inputs + 1):
        layer = make_layer(quant="mxfp8", **{size: other})
        with pytest.raises(SelectionError, match=rf"absorb.*quant\.layout: {name} is mxfp8"):
            plan.layers([layer], soc="A5")


@pytest.mark.parametrize("dtype", ["int8_packed", "fp8_packed"])
@pytest.mark.parametrize("latents", [128, 256, 512])
def test_a_packed_cache_holds_whole_tiles(make_layer, dtype, latents):
    # 128 latents share a scale in the packed row (npu_mla_prolog_v3, tile_size 128).
    layout = KvLayout(dtype=dtype)
    assert make_layer(kv_lora_rank=latents, kv_layout=layout).latent_width
    for other in (latents - 1, latents + 1, latents + 64):
        with pytest.raises(ModelError, match=rf"kv\.layout: .*cannot hold latents of {other}"):
            make_layer(kv_lora_rank=other, kv_layout=layout)
