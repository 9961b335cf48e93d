"""What descriptions and quantization_config say, per layer and per projection."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npu_backend.errors import ModelError
from npu_backend.model.read import read_model
from npu_backend.model.records import MlaLayer

LAYER = "model.layers.{}.self_attn"
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def kinds(layer: MlaLayer) -> dict[str, str]:
    names = ("fused_qkv_a_proj", "q_b_proj", "kv_b_proj")
    return {name: layer.quant_of(name) for name in names}


def all_of(kind: str, kv_b: str | None = None) -> dict[str, str]:
    return {"fused_qkv_a_proj": kind, "q_b_proj": kind, "kv_b_proj": kv_b or kind}


def compressed(weights: Any, inputs: Any, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("FLOAT", "none"),
        ("W8A8", "w8a8-static"),
        ("W8A8_DYNAMIC", "w8a8-dynamic"),
        ("W8A8_MXFP8", "mxfp8"),
        ("WFP8AFP8_DYNAMIC", "fp8"),
        ("W8A16", "w8a16"),
        ("W4A8_DYNAMIC", "w4a8-dynamic"),
        ("W4A16", "w4a16"),
    ],
)
def test_modelslim_types_have_their_kinds(
    model_dir: Any, modelslim_types: Any, word: str, kind: str
) -> None:
    types = {**modelslim_types(LAYER.format(0), word), **modelslim_types(LAYER.format(1), "FLOAT")}
    model = read_model(model_dir.config().description(types).path)
    assert kinds(model[0]) == all_of(kind, "none")
    assert kinds(model[1]) == all_of("none")
    assert "quant_model_description.json" in model.info.source


def test_sgl_15381_a_float_mtp_layer_beside_quantized_layers_is_decided_by_itself(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = {
        **modelslim_types(LAYER.format(0), "W8A8"),
        **modelslim_types(LAYER.format(1), "W8A8"),
        **modelslim_types(LAYER.format(2), "FLOAT"),
    }
    path = model_dir.config(num_nextn_predict_layers=1).description(types).path
    model = read_model(path)
    assert [layer.quant_of("q_b_proj") for layer in model] == ["w8a8-static", "w8a8-static", "none"]


def test_a_description_that_ends_before_the_mtp_layer_leaves_it_float(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = {
        **modelslim_types(LAYER.format(0), "W8A8_DYNAMIC"),
        **modelslim_types(LAYER.format(1), "W8A8_DYNAMIC"),
    }
    model = read_model(model_dir.config(num_nextn_predict_layers=1).description(types).path)
    assert kinds(model[2]) == all_of("none")
    assert "quant_model_description.json has no MTP layer 2" in model.info.assumed


def test_a_description_without_kv_b_proj_leaves_it_float(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = {**modelslim_types(LAYER.format(0), "W8A8"), **modelslim_types(LAYER.format(1), "W8A8")}
    types = {key: value for key, value in types.items() if "kv_b_proj" not in key}
    model = read_model(model_dir.config().description(types).path)
    assert kinds(model[0]) == all_of("w8a8-static", "none")
    assert sum("kv_b_proj" in note for note in model.info.assumed) == 1


def test_the_indexer_has_its_own_quantization(model_dir: Any, modelslim_types: Any) -> None:
    types = {
        **modelslim_types(LAYER.format(0), "W8A8"),
        **modelslim_types(LAYER.format(1), "W8A8"),
        f"{LAYER.format(0)}.indexer.wq_b.weight": "W8A8_DYNAMIC",
        f"{LAYER.format(1)}.indexer.wq_b.weight": "FLOAT",
    }
    model = read_model(model_dir.config(index_topk=2048).description(types).path)
    assert [layer.indexer.quant for layer in model] == ["w8a8-dynamic", "none"]
    assert model[0].indexer.quant == "w8a8-dynamic"


def test_descriptions_of_multimodal_models_are_met_under_their_root(
    model_dir: Any, modelslim_types: Any, tiny: dict[str, Any]
) -> None:
    prefix = "model.language_model.layers.0.self_attn"
    config = {"model_type": "glm5_next", "text_config": {**tiny, "num_hidden_layers": 1}}
    (model_dir.path / "config.json").write_text(json.dumps(config))
    types = modelslim_types(prefix, "W8A8_MXFP8")
    types[f"{prefix}.indexer.wq_b.weight"] = "FLOAT"
    layer = read_model(model_dir.description(types).path)[0]
    assert layer.prefix == prefix
    assert kinds(layer) == all_of("mxfp8", "none")


def test_other_names_of_the_description_are_found(model_dir: Any, modelslim_types: Any) -> None:
    types = modelslim_types(LAYER.format(0), "W8A8")
    model_dir.config(num_hidden_layers=1).description(types, "quant_model_description_w8a8.json")
    assert kinds(read_model(model_dir.path)[0]) == all_of("w8a8-static", "none")
    model_dir.description(types, "quant_model_description_w8a8_dynamic.json")
    with pytest.raises(ModelError, match="several quantization descriptions"):
        read_model(model_dir.path)


def test_an_unknown_type_is_named_with_its_key_and_the_known_ones(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = modelslim_types(LAYER.format(0), "W8A9")
    with pytest.raises(ModelError, match="W8A9") as caught:
        read_model(model_dir.config(num_hidden_layers=1).description(types).path)
    text = str(caught.value)
    assert "model.layers.0.self_attn.q_a_proj.weight" in text
    assert "W8A8_DYNAMIC" in text
    types = modelslim_types(LAYER.format(0), "W8A8_MIX")
    with pytest.raises(ModelError, match="static in decode and dynamic in prefill"):
        read_model(model_dir.description(types).path)


def test_an_unknown_type_of_another_module_is_no_concern(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = modelslim_types(LAYER.format(0), "W8A8")
    types["model.layers.0.mlp.gate_proj.weight"] = "W4A4_MXFP4"
    read_model(model_dir.config(num_hidden_layers=1).description(types).path)


def test_a_type_that_is_no_text_is_an_error(model_dir: Any, modelslim_types: Any) -> None:
    types: dict[str, Any] = modelslim_types(LAYER.format(0), "W8A8")
    types["model.layers.0.self_attn.q_b_proj.weight"] = {"bits": 8}
    with pytest.raises(ModelError, match="q_b_proj"):
        read_model(model_dir.config(num_hidden_layers=1).description(types).path)


def test_shards_that_disagree_are_an_error_naming_both(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = modelslim_types(LAYER.format(0), "W8A8")
    types[f"{LAYER.format(0)}.kv_a_proj_with_mqa.weight"] = "FLOAT"
    with pytest.raises(ModelError, match="shards of fused_qkv_a_proj") as caught:
        read_model(model_dir.config(num_hidden_layers=1).description(types).path)
    assert "q_a_proj.weight is W8A8" in str(caught.value)
    assert "kv_a_proj_with_mqa.weight is FLOAT" in str(caught.value)


def test_a_description_of_another_model_is_an_error(model_dir: Any, modelslim_types: Any) -> None:
    model_dir.config().description(modelslim_types("model.layers.7.self_attn", "W8A8"))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.0\.self_attn\.q_a_proj\.weight"):
        read_model(model_dir.path)


def test_a_broken_description_is_an_error_that_names_it(model_dir: Any) -> None:
    model_dir.config()
    (model_dir.path / "quant_model_description.json").write_text("{")
    with pytest.raises(ModelError, match="description cannot be used") as caught:
        read_model(model_dir.path)
    assert caught.value.whom is not None
    assert caught.value.whom.endswith("quant_model_description.json")


@pytest.mark.parametrize(
    ("weights", "inputs", "more", "kind"),
    [
        (INT8, TOKEN, {}, "w8a8-dynamic"),
        (INT8, {**TOKEN, "dynamic": False}, {}, "w8a8-static-symmetric"),
        (INT8, None, {}, "w8a16"),
        ({**INT8, "num_bits": 4}, None, {}, "w4a16"),
        ({**INT8, "num_bits": 4}, TOKEN, {}, "w4a8-dynamic"),
        (FP8, FP8_TOKEN, {}, "fp8"),
        ({**FP8, "strategy": "block", "block_structure": [128, 128]}, FP8_TOKEN, {}, "fp8-block"),
        ({**FP8, "strategy": "group", "group_size": 32}, FP8_TOKEN, {}, "mxfp8"),
        ({**FP8, "strategy": "group"}, FP8_TOKEN, {"format": "mxfp8-quantized"}, "mxfp8"),
        (None, None, {}, "none"),
    ],
)
def test_compressed_tensors_schemes_have_their_kinds(
    model_dir: Any, weights: Any, inputs: Any, more: dict[str, Any], kind: str
) -> None:
    model_dir.config(quantization_config=compressed(weights, inputs, **more))
    assert kinds(read_model(model_dir.path)[0]) == all_of(kind)


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.1.self_attn.kv_b_proj",
        "layers.1.self_attn.kv_b_proj",
        "re:.*layers\\.1\\..*kv_b_proj",
        "re:.*layers\\.1\\..*kv_b_proj$",
        "model.layers.1.*kv_b_proj",
    ],
)
def test_ignore_takes_names_dotted_suffixes_and_expressions(model_dir: Any, entry: str) -> None:
    model_dir.config(quantization_config=compressed(INT8, TOKEN, ignore=["lm_head", entry]))
    model = read_model(model_dir.path)
    assert kinds(model[0]) == all_of("w8a8-dynamic")
    assert kinds(model[1]) == all_of("w8a8-dynamic", "none")


def test_a_dotted_suffix_meets_every_layer_but_no_part_of_a_word(model_dir: Any) -> None:
    model_dir.config(quantization_config=compressed(INT8, TOKEN, ignore=["b_proj", "kv_b_proj"]))
    assert kinds(read_model(model_dir.path)[1]) == all_of("w8a8-dynamic", "none")


def test_an_expression_must_match_from_the_beginning_of_the_name(model_dir: Any) -> None:
    model_dir.config(quantization_config=compressed(INT8, TOKEN, ignore=["re:self_attn.kv_b_proj"]))
    assert kinds(read_model(model_dir.path)[0]) == all_of("w8a8-dynamic")


def test_ignored_shards_make_the_fused_projection_float(model_dir: Any) -> None:
    both = ["re:.*q_a_proj", "re:.*kv_a_proj_with_mqa"]
    model_dir.config(quantization_config=compressed(INT8, TOKEN, ignore=both))
    assert read_model(model_dir.path)[0].quant_of("fused_qkv_a_proj") == "none"
    model_dir.config(quantization_config=compressed(INT8, TOKEN, ignore=both[:1]))
    with pytest.raises(ModelError, match="shards of fused_qkv_a_proj"):
        read_model(model_dir.path)
    fused = ["re:.*fused_qkv_a_proj_with_mqa"]
    model_dir.config(quantization_config=compressed(INT8, TOKEN, ignore=fused))
    assert read_model(model_dir.path)[0].quant_of("fused_qkv_a_proj") == "none"


@pytest.mark.parametrize("entry", ["re:model.layers.78.*", "model.layers.78.*"])
def test_sgl_30265_a_pattern_for_the_mtp_layer_meets_it_by_its_checkpoint_name(
    model_dir: Any, entry: str
) -> None:
    config = compressed(INT8, TOKEN, ignore=[entry, "re:model.decoder.*"])
    model_dir.config(num_hidden_layers=78, num_nextn_predict_layers=1, quantization_config=config)
    model = read_model(model_dir.path, layers="77,78")
    assert kinds(model[0]) == all_of("w8a8-dynamic")
    assert (model[1].is_nextn, kinds(model[1])) == (True, all_of("none"))


def test_a_name_written_for_a_hosts_module_does_not_meet_the_mtp_layer(model_dir: Any) -> None:
    config = compressed(INT8, TOKEN, ignore=["re:model.decoder.*"])
    model_dir.config(num_nextn_predict_layers=1, quantization_config=config)
    assert kinds(read_model(model_dir.path)[2]) == all_of("w8a8-dynamic")


def test_a_group_for_a_name_wins_over_one_for_the_class(model_dir: Any) -> None:
    config = compressed(INT8, TOKEN)
    config["config_groups"]["named"] = {"targets": ["re:.*q_b_proj"], "weights": INT8}
    assert kinds(read_model(model_dir.config(quantization_config=config).path)[0]) == {
        "fused_qkv_a_proj": "w8a8-dynamic",
        "q_b_proj": "w8a16",
        "kv_b_proj": "w8a8-dynamic",
    }


def test_what_no_group_targets_is_float(model_dir: Any) -> None:
    config = compressed(INT8, TOKEN)
    config["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    assert kinds(read_model(model_dir.config(quantization_config=config).path)[0]) == all_of("none")


def test_an_unknown_scheme_matters_only_where_it_meets_attention(model_dir: Any) -> None:
    mxfp4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    config = compressed(mxfp4, None, ignore=["re:.*self_attn.*"])
    assert kinds(read_model(model_dir.config(quantization_config=config).path)[0]) == all_of("none")
    config["ignore"] = []
    with pytest.raises(ModelError, match="quantization that is not known") as caught:
        read_model(model_dir.config(quantization_config=config).path)
    assert "config group group_0 gives it weights type=float num_bits=4" in str(caught.value)


@pytest.mark.parametrize("place", ["top", "nested", "both"])
def test_multimodal_configs_keep_quantization_at_either_place(
    model_dir: Any, tiny: dict[str, Any], place: str
) -> None:
    quant = compressed(INT8, TOKEN, ignore=["re:.*language_model.layers.1.*"])
    config: dict[str, Any] = {"model_type": "glm5_next", "text_config": dict(tiny)}
    if place in ("top", "both"):
        config["quantization_config"] = quant
    if place in ("nested", "both"):
        config["text_config"]["quantization_config"] = quant
    (model_dir.path / "config.json").write_text(json.dumps(config))
    model = read_model(model_dir.path)
    assert kinds(model[0]) == all_of("w8a8-dynamic")
    assert kinds(model[1]) == all_of("none")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, "mxfp8"),
        ({"quant_method": "mxfp8"}, "mxfp8"),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, "mxfp8"),
    ],
)
def test_fp8_and_mxfp8_methods_have_their_kinds(
    model_dir: Any, config: dict[str, Any], kind: str
) -> None:
    path = model_dir.config(quantization_config=config, num_nextn_predict_layers=1).path
    assert [kinds(layer) for layer in read_model(path)] == [all_of(kind)] * 3


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    "entry", ["model.layers.1.self_attn", "model.layers.1", "layers.1.self_attn"]
)
def test_fp8_excludes_a_module_with_all_below_it(model_dir: Any, key: str, entry: str) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], key: [entry]}
    path = model_dir.config(quantization_config=config, num_hidden_layers=12).path
    model = read_model(path)
    assert kinds(model[0]) == kinds(model[11]) == all_of("fp8-block")
    assert kinds(model[1]) == all_of("none")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq' is not known"),
        ({"quant_method": "fp9"}, "did you mean 'fp8'"),
        ({"bits": 4}, "quant_method 'None' is not known"),
        ({"quant_method": ["fp8"]}, "is not known"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "[128, 128]"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "is not a list of names"),
        ({"quant_method": "compressed-tensors"}, "config_groups is not an object of objects"),
        ({"config_groups": {"a": 1}}, "config_groups is not an object of objects"),
        (compressed(INT8, TOKEN, ignore=["re:("]), "'re:(' is not a regular expression"),
        (compressed(INT8, TOKEN, ignore=[1]), "quantization_config.ignore is not a list of names"),
        (compressed(INT8, [8]), "input_activations of a config group is not an object"),
        ({"quant_method": "ascend"}, "there is none"),
    ],
)
def test_a_quantization_config_that_cannot_be_used_is_an_error(
    model_dir: Any, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(model_dir.config(quantization_config=config).path)
    assert says in str(caught.value)
    assert caught.value.remedy


def test_a_description_and_a_config_that_disagree_are_an_error_naming_both(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = modelslim_types(LAYER.format(0), "W8A8")
    config = compressed(INT8, TOKEN, ignore=["re:.*kv_b_proj"])
    model_dir.config(num_hidden_layers=1, quantization_config=config).description(types)
    with pytest.raises(ModelError, match="contradict each other on") as caught:
        read_model(model_dir.path)
    text = str(caught.value)
    assert "quant_model_description.json" in text
    assert "config group group_0 is w8a8-dynamic" in text


def test_a_description_and_a_config_that_agree_are_both_heard(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = modelslim_types(LAYER.format(0), "W8A8_DYNAMIC")
    config = compressed(INT8, TOKEN, ignore=["re:.*kv_b_proj"])
    model_dir.config(num_hidden_layers=1, quantization_config=config).description(types)
    assert kinds(read_model(model_dir.path)[0]) == all_of("w8a8-dynamic", "none")


def test_a_config_may_point_to_the_description(model_dir: Any, modelslim_types: Any) -> None:
    types = modelslim_types(LAYER.format(0), "W8A8")
    config = {"quant_method": "ascend"}
    model_dir.config(num_hidden_layers=1, quantization_config=config)
    assert kinds(read_model(model_dir.path, quant="mxfp8")[0]) == all_of("mxfp8", "none")
    model_dir.description(types)
    assert kinds(read_model(model_dir.path)[0]) == all_of("w8a8-static", "none")


def test_an_explicit_quantization_is_for_where_the_files_are_silent_and_that_is_told(
    model_dir: Any, modelslim_types: Any
) -> None:
    types = modelslim_types(LAYER.format(0), "W8A8")
    model_dir.config(num_hidden_layers=1).description(types)
    model = read_model(model_dir.path, quant="w8a8-dynamic")
    assert kinds(model[0]) == all_of("w8a8-static", "none")
    assert any("the files say w8a8-static" in text for text in model.info.assumed)
    assert kinds(read_model(model_dir.path, quant="w8a8-static")[0]) == all_of(
        "w8a8-static", "none"
    )
    assert kinds(read_model(model_dir.path / "config.json", quant="mxfp8")[0]) == all_of(
        "mxfp8", "none"
    )
