"""What a config says: nested sections, hybrid models, MTP layers, indexers, and contradictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from npu_backend.errors import ModelError
from npu_backend.model.read import read_model


def ids(path: Path, **options: Any) -> list[int]:
    return [layer.layer_id for layer in read_model(path, **options)]


@pytest.mark.parametrize("form", ["file", "directory", "text"])
def test_a_config_is_read_from_a_file_or_a_directory(model_dir: Any, form: str) -> None:
    model_dir.config(rms_norm_eps=1e-5)
    path = model_dir.path if form == "directory" else model_dir.path / "config.json"
    model = read_model(str(path) if form == "text" else path)
    assert model.info.name == "tiny"
    assert model.info.model_type == "deepseek_v3"
    assert model.info.num_hidden_layers == 2
    assert str(model_dir.path) not in json.dumps(model.info.to_dict())
    assert model[0].rms_norm_eps == 1e-5
    assert model[1].prefix == "model.layers.1.self_attn"


@pytest.mark.parametrize("section", ["text_config", "language_config"])
def test_the_language_model_of_a_multimodal_config_is_found(
    model_dir: Any, tiny: dict[str, Any], section: str
) -> None:
    config = {"model_type": "kimi_k3", section: {**tiny, "model_type": "kimi_linear"}}
    (model_dir.path / "config.json").write_text(json.dumps({**config, "vision_config": {"a": 1}}))
    model = read_model(model_dir.path, host="sglang")
    assert len(model) == 2
    assert model.info.model_type == model[0].model_type == "kimi_k3"
    assert model[0].w_vc_layout == "strided"
    assert model[0].prefix == "language_model.model.layers.0.self_attn"


def test_kimi_counts_kda_layers_from_1(model_dir: Any) -> None:
    section = {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4, 6]}
    model_dir.config(num_hidden_layers=6, linear_attn_config=section)
    assert ids(model_dir.path) == [3, 5]


def test_kda_layers_alone_are_enough(model_dir: Any) -> None:
    model_dir.config(num_hidden_layers=4, linear_attn_config={"kda_layers": [1, 2, 3]})
    assert ids(model_dir.path) == [3]


def test_full_attn_layers_alone_are_enough(model_dir: Any) -> None:
    model_dir.config(num_hidden_layers=4, linear_attn_config={"full_attn_layers": [4]})
    assert ids(model_dir.path) == [3]


def test_glm_counts_kda_layers_from_0_and_says_layer_types(model_dir: Any) -> None:
    kinds = [
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "deepseek_sparse_attention",
    ]
    section = {"kda_layers": [0, 1, 2, 4, 5, 6], "full_attn_layers": [3, 7]}
    model_dir.config(
        num_hidden_layers=8, linear_attn_config=section, layer_types=kinds * 2, index_topk=2048,
        num_nextn_predict_layers=1, qk_rope_head_dim=0, mla_use_nope=True,
    )  # fmt: skip
    model = read_model(model_dir.path)
    assert [layer.layer_id for layer in model] == [3, 7, 8]
    assert [layer.indexer.kind for layer in model] == ["own", "own", "own"]


def test_only_sparse_layers_have_an_indexer_where_layer_types_say_so(model_dir: Any) -> None:
    kinds = ["sliding_attention", "deepseek_sparse_attention"]
    model_dir.config(layer_types=kinds, index_topk=2048)
    assert [layer.indexer.kind for layer in read_model(model_dir.path)] == ["none", "own"]


def test_bailing_has_one_mla_layer_in_each_group_and_the_rest(model_dir: Any) -> None:
    model_dir.config(model_type="bailing_hybrid", num_hidden_layers=10, layer_group_size=4)
    assert ids(model_dir.path) == [3, 7, 8, 9]
    assert read_model(model_dir.path, host="sglang")[0].w_vc_layout == "strided"


@pytest.mark.parametrize(
    "key", ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers"]
)
def test_mtp_layers_follow_the_last_layer(model_dir: Any, key: str) -> None:
    model = read_model(model_dir.config(**{key: 2}).path)
    assert [(layer.layer_id, layer.is_nextn) for layer in model] == [
        (0, False), (1, False), (2, True), (3, True),
    ]  # fmt: skip
    assert model[3].prefix == "model.layers.3.self_attn"


@pytest.mark.parametrize(
    "counts",
    [{"num_layers": 3, "num_hidden_layers": ...}, {"num_layers": 3, "num_hidden_layers": 6}],
)
def test_longcat_calls_its_layers_num_layers(model_dir: Any, counts: dict[str, Any]) -> None:
    model = read_model(model_dir.config(model_type="longcat_flash", **counts).path)
    assert [layer.layer_id for layer in model] == [0, 1, 2, 3, 4, 5, 6]
    assert model[-1].is_nextn
    assert any("one MTP layer" in note for note in model.info.assumed)


@pytest.mark.parametrize(
    "said",
    [
        {"indexer_types": ["full", "full", "shared", "full"]},
        {"index_topk_pattern": "FFSF"},
        {"index_topk_freq": 2, "index_skip_topk_offset": 2},
    ],
)
def test_shared_indexers_are_found_in_each_of_their_three_forms(
    model_dir: Any, said: dict[str, Any]
) -> None:
    model_dir.config(num_hidden_layers=4, index_topk=64, num_nextn_predict_layers=1, **said)
    kinds = [layer.indexer.kind for layer in read_model(model_dir.path, quant="mxfp8")]
    assert kinds == ["own", "own", "shared", "own", "own"]
    shared = read_model(model_dir.path, quant="mxfp8")[2]
    assert shared.indexer.quant == "none"


def test_the_pattern_of_glm_52_leaves_21_indexers(model_dir: Any) -> None:
    model_dir.config(
        num_hidden_layers=78, index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3
    )
    model = read_model(model_dir.path)
    own = [layer.layer_id for layer in model if layer.indexer.kind == "own"]
    assert own == [0, 1, 2, *range(6, 78, 4)]
    assert len(own) == 21


def test_the_list_of_indexers_may_reach_the_mtp_layer(model_dir: Any) -> None:
    types = ["full", "full", "shared"]
    model_dir.config(index_topk=64, num_nextn_predict_layers=1, indexer_types=types)
    assert read_model(model_dir.path)[2].indexer.kind == "shared"


@pytest.mark.parametrize("key", ["mla_use_nope", "skip_rope"])
def test_nope_models_do_not_rotate(model_dir: Any, key: str) -> None:
    layer = read_model(model_dir.config(**{key: True}).path)[0]
    assert (layer.use_rope, layer.kv_layout.rope) == (False, "none")


def test_a_config_without_q_lora_rank_has_q_proj_and_says_so(model_dir: Any) -> None:
    model = read_model(model_dir.config(q_lora_rank=...).path)
    assert model[0].q_lora_rank is None
    assert any("q_proj" in note for note in model.info.assumed)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_lora_rank": ...}, "is not an MLA model"),
        ({"kv_lora_rank": None}, "is not an MLA model"),
        ({"use_mla": False}, "use_mla = false"),
        ({"v_head_dim": ...}, "v_head_dim is missing"),
        ({"hidden_size": 256.0}, "hidden_size is 256.0, not an integer"),
        ({"hidden_size": "256"}, "hidden_size is '256', not an integer"),
        ({"num_attention_heads": True}, "num_attention_heads is True, not an integer"),
        ({"kv_lora_rank": -512}, "kv_lora_rank is -512"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 10**30}, "an integer beyond 64 bits"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"num_nextn_predict_layers": 1, "num_mtp_layers": 2}, "MTP layers disagree"),
        ({"mla_layer_ids": [0, 2]}, "mla_layer_ids names layer 2, but the model has 2 layers"),
        ({"mla_layer_ids": []}, "none of its layers is an MLA layer"),
        ({"mla_layer_ids": "all"}, "mla_layer_ids is not a list of layer ids"),
        ({"linear_attn_config": {"kda_layers": [1, 9]}}, "kda_layers names layer 9"),
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "none of its layers"),
        ({"linear_attn_config": {"kda_layers": [0], "full_attn_layers": [2]}}, "both 0 and 2"),
        ({"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}}, "layer 1 is in"),
        ({"linear_attn_config": []}, "linear_attn_config is not an object"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": [1, 2]}, "layer_types is not a list of names"),
        (
            {"layer_types": ["linear_attention", "full_attention"], "mla_layer_ids": [0]},
            "layer_types: the MLA layers are [1]; mla_layer_ids: the MLA layers are [0]",
        ),
        ({"layer_group_size": 0}, "layer_group_size is 0"),
        ({"index_topk": 8, "indexer_types": ["full"]}, "indexer_types has 1 entries for 2 layers"),
        ({"index_topk": 8, "indexer_types": ["full", "half"]}, "indexer_types is not a list of"),
        ({"index_topk": 8, "indexer_types": ["shared", "full"]}, "layer 0 shares an index"),
        ({"index_topk": 8, "index_topk_pattern": "FX"}, "not made of F and S"),
        ({"mla_use_nope": "yes"}, "neither true nor false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"model_type": 3}, "model_type is not a text"),
        ({"quantization_config": [1]}, "quantization_config is a list, not an object"),
        ({"model_type": "longcat_flash", "num_layers": 3}, "num_layers is 3 and num_hidden_layers"),
        ({"mla_per_layer": 3}, "mla_per_layer is 3"),
    ],
)
def test_a_config_that_is_not_mla_or_contradicts_itself_is_an_error(
    model_dir: Any, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(model_dir.config(**changes).path)
    error = caught.value
    assert says in str(error)
    assert error.whom == str(model_dir.path / "config.json")
    assert error.why
    assert error.remedy


def test_a_llama_config_is_named_and_told_what_is_missing(model_dir: Any) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
    (model_dir.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="llama is not an MLA model") as caught:
        read_model(model_dir.path)
    assert "kv_lora_rank" in str(caught.value)


def test_all_problems_of_a_config_are_told_at_once(model_dir: Any) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(model_dir.config(hidden_size=-1, v_head_dim="x", rms_norm_eps=5).path)
    assert len(caught.value.why) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"{", "not JSON, or is cut off"),
        (b'{"hidden_size": 25', "not JSON, or is cut off"),
        (b"[]", "a list, not an object"),
        (b"7", "a int, not an object"),
        (b"null", "a NoneType, not an object"),
        (b"\xff\xfe\x00{", "not UTF-8"),
        (b'{"a": "\xc3', "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON, or is cut off"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"\x40\x00\x00\x00\x00\x00\x00\x00" + b"\x81" * 64, "not UTF-8"),
    ],
)
def test_a_config_that_is_no_json_object_is_an_error_that_names_it(
    model_dir: Any, content: bytes, says: str
) -> None:
    path = model_dir.path / "config.json"
    path.write_bytes(content)
    for model in (path, model_dir.path):
        with pytest.raises(ModelError) as caught:
            read_model(model)
        error = caught.value
        assert says in str(error)
        assert (error.whom, bool(error.why), bool(error.remedy)) == (str(path), True, True)


def test_a_directory_without_a_config_is_an_error(model_dir: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read_model(model_dir.path)
    assert "no such file" in str(caught.value)


@pytest.mark.parametrize("model", ["/no/such/model", "./nothing", Path("nothing"), "a/\0b"])
def test_a_path_that_is_not_there_is_an_error(model: str | Path) -> None:
    with pytest.raises(ModelError, match="cannot be used"):
        read_model(model)


@pytest.mark.parametrize("model", ["", "  ", "no\0name"])
def test_a_text_that_names_nothing_is_an_error(model: str) -> None:
    with pytest.raises(ModelError, match="neither a bundled model nor a file"):
        read_model(model)


def test_a_special_file_is_not_read() -> None:
    with pytest.raises(ModelError, match="not a regular file"):
        read_model("/dev/zero")


def test_a_huge_file_is_not_read_as_a_config(model_dir: Any) -> None:
    path = model_dir.path / "config.json"
    with path.open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(ModelError, match="more than the 67108864"):
        read_model(path)


# --- sizes and dtypes that no layer can have -----------------------------------------------------


@pytest.mark.parametrize("width", [1, 63, 65])
def test_rope_of_an_odd_width_is_refused_wherever_it_is_said(
    model_dir: Any, tiny: dict[str, Any], width: int
) -> None:
    model_dir.config(qk_rope_head_dim=width)
    with pytest.raises(ModelError, match=f"qk_rope_head_dim is {width}: RoPE rotates pairs"):
        read_model(model_dir.path)
    model_dir.config(qk_rope_head_dim=width + 1)
    layer = read_model(model_dir.path)[0]
    with pytest.raises(ModelError, match=r"dims\.qk_rope_head_dim: .* an odd number"):
        evolve(layer, qk_rope_head_dim=width)


def test_an_odd_width_that_is_not_rotated_is_taken(model_dir: Any) -> None:
    model_dir.config(qk_rope_head_dim=63, mla_use_nope=True)
    assert read_model(model_dir.path)[0].qk_rope_head_dim == 63


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("section", [None, "text_config"])
@pytest.mark.parametrize("value", ["int4", "", "bf16", "torch.int8", 7, ["bfloat16"], True])
def test_a_dtype_that_no_weights_are_of_is_refused(
    model_dir: Any, tiny: dict[str, Any], key: str, section: str | None, value: Any
) -> None:
    config = {**tiny, key: value}
    if section is not None:
        config = {"model_type": "kimi_k3", section: config}
    (model_dir.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"{key} is .*, not the dtype of a model \(bfloat16, "):
        read_model(model_dir.path)


@pytest.mark.parametrize("value", ["float16", "torch.float16", "float32", "float8_e4m3fn"])
def test_another_dtype_than_the_one_planned_for_stands_among_the_assumptions(
    model_dir: Any, value: str
) -> None:
    model_dir.config(torch_dtype=value)
    said = value.removeprefix("torch.")
    note = f"the config says {said}, the dtype is bfloat16"
    assert note in read_model(model_dir.path).info.assumed
    if not said.startswith("float8"):
        assert not any(
            "the config says" in a for a in read_model(model_dir.path, dtype=said).info.assumed
        )


@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", "auto", None])
def test_the_dtype_planned_for_and_auto_say_nothing(model_dir: Any, value: Any) -> None:
    model_dir.config(torch_dtype=value)
    assert not any("the config says" in a for a in read_model(model_dir.path).info.assumed)
