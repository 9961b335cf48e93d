"""Which layers have a dense MLP or shared experts, how wide they are, and what they weigh."""

from __future__ import annotations

import json

import pytest

from npu_backend import ModelError, read_mlp_layers, read_model
from npu_backend.catalog import load_catalog

MOE = {
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
"""Added to the tiny config: hidden 256, dense 512, shared 128."""


def told(layers):
    return [(m.layer_id, m.kind, m.intermediate_size, m.is_nextn) for m in layers]


def dense(ids, size=512):
    return [(i, "dense", size, False) for i in ids]


def shared(ids, size=128):
    return [(i, "shared_experts", size, False) for i in ids]


# --- bundled models ------------------------------------------------------------------------------


def test_kimi_k3_has_one_dense_layer_and_92_with_shared_experts():
    layers = read_mlp_layers("kimi-k3")
    assert told(layers) == dense([0], 33792) + shared(range(1, 93), 2 * 3072)
    assert {(m.hidden_size, m.dtype) for m in layers} == {(7168, "bfloat16")}
    assert layers[0].bytes == 3 * 7168 * 33792 * 2
    assert layers[1].bytes == 3 * 7168 * 6144 * 2


@pytest.mark.parametrize(
    "name, first, dense_size, last, shared_size, nextn",
    [
        ("deepseek-v3", 3, 18432, 61, 2048, 1),
        ("glm-5.2", 3, 12288, 78, 2048, 1),
        ("kimi-k2", 1, 18432, 61, 2048, 0),
        ("deepseek-v2-lite", 1, 10944, 27, 2816, 0),
    ],
)
def test_bundled_models(name, first, dense_size, last, shared_size, nextn):
    mtp = [(last + i, "shared_experts", shared_size, True) for i in range(nextn)]
    expected = dense(range(first), dense_size) + shared(range(first, last), shared_size) + mtp
    assert told(read_mlp_layers(name)) == expected


def test_longcat_has_two_dense_mlps_a_layer_numbered_as_its_attentions():
    layers = read_mlp_layers("longcat-flash")
    assert told(layers) == [*dense(range(56), 12288), (56, "dense", 12288, True)]
    assert layers[3].prefix == "model.layers.1.mlps.1"


@pytest.mark.parametrize("name", sorted(load_catalog().models))
def test_every_bundled_model_can_be_read_and_ids_are_those_of_the_attentions(name):
    layers = read_mlp_layers(name)
    assert layers
    last = max(layer.layer_id for layer in read_model(name))
    assert max(m.layer_id for m in layers) <= last
    # Only configs without shared experts, or without a word on them, leave a layer out.
    if not any("not given: no shared experts" in text for text in layers.assumed):
        assert max(m.layer_id for m in layers) == last


def test_what_a_config_leaves_open_is_told():
    assert any("first_k_dense_replace" in a for a in read_mlp_layers("glm-4.7-flash").assumed)
    assert any("n_shared_experts" in a for a in read_mlp_layers("kimi-linear").assumed)
    assert not any("not given" in a for a in read_mlp_layers("kimi-k3").assumed)


def test_the_dtype_is_the_one_that_is_asked_for():
    assert read_mlp_layers("kimi-k3", dtype="float32")[0].bytes == 3 * 7168 * 33792 * 4
    with pytest.raises(ModelError, match="did you mean 'bfloat16'"):
        read_mlp_layers("kimi-k3", dtype="bfloat")


# --- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, dense([0]) + shared([1, 2, 3])),
        ({"first_k_dense_replace": 0}, shared(range(4))),
        ({"first_k_dense_replace": 3}, dense([0, 1, 2]) + shared([3])),
        ({"first_k_dense_replace": 4}, dense(range(4))),
        ({"first_k_dense_replace": 5}, dense(range(4))),
        ({"n_shared_experts": 0}, dense([0])),
        ({"n_shared_experts": ..., "num_shared_experts": 1}, dense([0]) + shared([1, 2, 3], 64)),
        ({"shared_expert_intermediate_size": 96}, dense([0]) + shared([1, 2, 3], 96)),
        ({"moe_layer_freq": 1}, dense([0]) + shared([1, 2, 3])),
        ({"moe_layer_freq": 2}, [*dense([0, 1]), *shared([2]), *dense([3])]),
        ({"moe_layer_freq": [0, 1, 0, 1]}, [*dense([0]), *shared([1]), *dense([2]), *shared([3])]),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}, dense([0, 1]) + shared([2, 3])),
        ({"moe_intermediate_size": ...}, dense(range(4))),
        (
            {"num_nextn_predict_layers": 1},
            [*dense([0]), *shared([1, 2, 3]), (4, "shared_experts", 128, True)],
        ),
    ],
)
def test_configs(model_dir, changes, expected):
    model_dir.config(**{**MOE, **changes})
    assert told(read_mlp_layers(model_dir.path / "config.json")) == expected


def test_a_model_without_mla_will_do(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "intermediate_size": 160}))
    assert told(read_mlp_layers(file)) == dense([0, 1], 160)


def test_a_multimodal_config_is_read_in_its_language_model(model_dir, tiny):
    inner = {**tiny, **MOE}
    file = model_dir.path / "config.json"
    file.write_text(json.dumps({"model_type": "outer", "text_config": inner}))
    assert told(read_mlp_layers(file)) == dense([0]) + shared([1, 2, 3])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"intermediate_size": ...}, "intermediate_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"n_shared_experts": -1}, "n_shared_experts is -1"),
        ({"num_shared_experts": 3}, "n_shared_experts is 2 and num_shared_experts is 3"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq is not a list"),
        ({"mlp_layer_types": ["dense", "odd", "sparse", "sparse"]}, "mlp_layer_types is not"),
        ({"n_shared_experts": 1 << 12, "moe_intermediate_size": 1 << 20}, "beyond any model"),
    ],
)
def test_a_config_that_does_not_say_it_is_an_error(model_dir, changes, words):
    model_dir.config(**{**MOE, **changes})
    with pytest.raises(ModelError) as caught:
        read_mlp_layers(model_dir.path)
    assert words in "\n".join(caught.value.why)


# --- quantization and headers --------------------------------------------------------------------


def tensors(prefix, rows, dtype="BF16", down=None):
    return {
        f"{prefix}.gate_proj.weight": (dtype, (rows, 256)),
        f"{prefix}.up_proj.weight": (dtype, (rows, 256)),
        f"{prefix}.down_proj.weight": (down or dtype, (256, rows)),
    }


def scales(prefix, rows):
    return {
        f"{prefix}.{name}.weight_scale": ("F32", (n, 1))
        for name, n in (("gate_proj", rows), ("up_proj", rows), ("down_proj", 256))
    }


def test_headers_say_dtype_and_bytes(model_dir, attention_tensors):
    model_dir.config(**{**MOE, "num_hidden_layers": 2})
    model_dir.tensors(
        {
            **attention_tensors("model.layers.0.self_attn"),
            **tensors("model.layers.0.mlp", 512),
            **tensors("model.layers.1.mlp.shared_experts", 128, "I8"),
            **scales("model.layers.1.mlp.shared_experts", 128),
        }
    )
    one, other = read_mlp_layers(model_dir.path)
    assert (one.dtype, one.bytes, one.weight_bytes) == ("bfloat16", 3 * 512 * 256 * 2, None)
    assert (other.dtype, other.bytes) == ("int8", 3 * 128 * 256)
    assert other.prefix == "model.layers.1.mlp.shared_experts"


def test_weights_of_several_dtypes_are_told_and_summed(model_dir):
    model_dir.config(**{**MOE, "num_hidden_layers": 1})
    mixed = tensors("model.layers.0.mlp", 512, "I8", down="BF16")
    scale = scales("model.layers.0.mlp", 512)
    del scale["model.layers.0.mlp.down_proj.weight_scale"]
    model_dir.tensors({**mixed, **scale})
    (layer,) = read_mlp_layers(model_dir.path)
    assert layer.dtype == "int8+bfloat16"
    assert layer.bytes == 512 * 256 * (1 + 1 + 2)


def test_a_fused_gate_and_up_is_known(model_dir):
    model_dir.config(**{**MOE, "num_hidden_layers": 1})
    prefix = "model.layers.0.mlp"
    model_dir.tensors(
        {
            f"{prefix}.gate_up_proj.weight": ("BF16", (1024, 256)),
            f"{prefix}.down_proj.weight": ("BF16", (256, 512)),
        }
    )
    (layer,) = read_mlp_layers(model_dir.path)
    assert layer.bytes == 3 * 512 * 256 * 2


def test_headers_that_contradict_the_config_or_lack_a_weight_are_errors(model_dir):
    model_dir.config(**{**MOE, "num_hidden_layers": 1})
    model_dir.tensors(tensors("model.layers.0.mlp", 256))
    with pytest.raises(ModelError, match=r"the config makes it \[512, 256\]"):
        read_mlp_layers(model_dir.path)
    whole = tensors("model.layers.0.mlp", 512)
    del whole["model.layers.0.mlp.up_proj.weight"]
    model_dir.tensors(whole)
    with pytest.raises(ModelError, match=r"lacks model.layers.0.mlp.up_proj.weight"):
        read_mlp_layers(model_dir.path)


def test_an_mtp_layer_that_the_checkpoint_lacks_is_left_out(model_dir):
    model_dir.config(**{**MOE, "num_hidden_layers": 1, "num_nextn_predict_layers": 1})
    model_dir.tensors(tensors("model.layers.0.mlp", 512))
    layers = read_mlp_layers(model_dir.path)
    assert told(layers) == dense([0])
    assert "MTP layer 1 is left out: the checkpoint has no tensor of it" in layers.assumed
    extra = tensors("model.layers.1.mlp.shared_experts", 128)
    model_dir.tensors({**tensors("model.layers.0.mlp", 512), **extra})
    assert told(read_mlp_layers(model_dir.path))[1:] == [(1, "shared_experts", 128, True)]


def test_names_that_nobody_knows_are_told_and_not_guessed_at(model_dir):
    model_dir.config(**{**MOE, "num_hidden_layers": 1})
    model_dir.tensors(tensors("model.layers.0.odd", 512))
    layers = read_mlp_layers(model_dir.path)
    assert layers[0].bytes == 3 * 512 * 256 * 2
    assert any("under no known name" in a for a in layers.assumed)


def test_without_headers_the_description_s_quantization_counts(model_dir):
    model_dir.config(
        **{**MOE, "num_hidden_layers": 2},
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    one, other = read_mlp_layers(model_dir.path / "config.json")
    assert (one.dtype, one.bytes) == ("float8_e4m3fn", 3 * 512 * 256)
    assert (other.dtype, other.bytes) == ("float8_e4m3fn", 3 * 128 * 256)
