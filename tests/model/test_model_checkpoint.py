"""What safetensors headers show: true quantization, dtypes, bytes, and every way to be broken."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from npu_backend.errors import ModelError
from npu_backend.model.read import read_model
from npu_backend.model.records import Measured
from npu_backend.model.weights import loaded_weights

ONE = {"num_hidden_layers": 1}
P0 = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    "kind", ["none", "w8a8-static", "w8a8-dynamic", "fp8-block", "mxfp8", "fp8"]
)
def test_headers_alone_give_the_true_quantization(
    model_dir: Any, attention_tensors: Any, kind: str
) -> None:
    model_dir.config(**ONE).tensors(attention_tensors(P0, kind))
    layer = read_model(model_dir.path)[0]
    assert layer.quant_of("fused_qkv_a_proj") == layer.quant_of("q_b_proj") == kind
    assert layer.quant_of("kv_b_proj") == "none"


def test_blocks_are_told_from_groups_by_shape_where_both_scales_are_exponents(
    model_dir: Any, attention_tensors: Any
) -> None:
    tensors = attention_tensors(P0, "fp8-block")
    for name, (dtype, shape) in tensors.items():
        if name.endswith("weight_scale_inv"):
            tensors[name] = ("F8_E8M0", shape)
            assert dtype == "F32"
    model_dir.config(**ONE).tensors(tensors)
    assert read_model(model_dir.path)[0].quant_of("q_b_proj") == "fp8-block"


def test_measured_bytes_are_those_of_the_whole_fused_weight(
    model_dir: Any, attention_tensors: Any
) -> None:
    model_dir.config(**ONE).tensors(attention_tensors(P0, "w8a8-static"))
    layer = read_model(model_dir.path)[0]
    measured = dict(layer.measured)
    # 128 + 80 rows of 256 int8; a row has 8 bytes of deq_scale and quant_bias, a tensor 8 of input.
    assert measured["fused_qkv_a_proj"] == Measured("int8", 208 * 256)
    assert measured["fused_qkv_a_proj.scale"] == Measured("float32", 208 * 8 + 2 * 8, 2 * 8)
    assert measured["q_b_proj"] == Measured("int8", 192 * 128)
    assert measured["kv_b_proj"] == Measured("bfloat16", 256 * 64 * 2)
    assert "kv_b_proj.scale" not in measured
    assert "wq_b" not in measured
    whole = {spec.name: spec.bytes for spec in loaded_weights(layer, 1)}
    half = {spec.name: spec.bytes for spec in loaded_weights(layer, 2)}
    assert whole["fused_qkv_a_proj"] == half["fused_qkv_a_proj"] == 208 * 256
    assert whole["q_b_proj"] == 2 * half["q_b_proj"] == 192 * 128
    # Rows are split over ranks, the two values of the input are on each of them.
    assert whole["q_b_proj.scale"] == 192 * 8 + 8
    assert half["q_b_proj.scale"] == 192 * 8 // 2 + 8


def test_scales_of_blocks_are_split_over_ranks_as_their_rows_are(
    model_dir: Any, attention_tensors: Any
) -> None:
    model_dir.config(**ONE).tensors(attention_tensors(P0, "fp8-block"))
    layer = read_model(model_dir.path)[0]
    whole = {spec.name: spec.bytes for spec in loaded_weights(layer, 1)}
    half = {spec.name: spec.bytes for spec in loaded_weights(layer, 2)}
    assert whole["q_b_proj.scale"] == 2 * half["q_b_proj.scale"] == 2 * 1 * 4
    assert whole["fused_qkv_a_proj.scale"] == half["fused_qkv_a_proj.scale"]


def test_a_float_checkpoint_of_another_dtype_is_measured_and_noted(
    model_dir: Any, attention_tensors: Any
) -> None:
    tensors = {name: ("F16", shape) for name, (_, shape) in attention_tensors(P0).items()}
    model = read_model(model_dir.config(**ONE).tensors(tensors).path)
    assert dict(model[0].measured)["q_b_proj"].dtype == "float16"
    assert any("float16" in note for note in model.info.assumed)
    assert not any("float16" in n for n in read_model(model_dir.path, dtype="float16").info.assumed)


def test_files_of_the_safetensors_library_are_read(model_dir: Any, attention_tensors: Any) -> None:
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    dtypes = {"BF16": numpy.float16, "I8": numpy.int8, "F32": numpy.float32}
    tensors = attention_tensors(P0, "w8a8-dynamic")
    arrays = {name: numpy.zeros(shape, dtypes[dtype]) for name, (dtype, shape) in tensors.items()}
    save_file(arrays, str(model_dir.path / "model.safetensors"), {"format": "pt"})
    layer = read_model(model_dir.config(**ONE).path)[0]
    assert layer.quant_of("fused_qkv_a_proj") == "w8a8-dynamic"
    assert dict(layer.measured)["kv_b_proj"].dtype == "float16"


def test_sgl_15381_the_mtp_layers_own_tensors_decide_its_quantization(
    model_dir: Any, attention_tensors: Any
) -> None:
    model_dir.config(num_nextn_predict_layers=1).tensors(
        {
            **attention_tensors("model.layers.0.self_attn", "w8a8-static"),
            **attention_tensors("model.layers.1.self_attn", "w8a8-static"),
            **attention_tensors("model.layers.2.self_attn", "none"),
        }
    )
    model = read_model(model_dir.path)
    assert [layer.quant_of("q_b_proj") for layer in model] == ["w8a8-static", "w8a8-static", "none"]
    assert model[2].is_nextn


def test_a_checkpoint_without_its_mtp_layer_is_planned_without_it(
    model_dir: Any, attention_tensors: Any
) -> None:
    model_dir.config(**ONE, num_nextn_predict_layers=1).tensors(attention_tensors(P0))
    model = read_model(model_dir.path)
    assert [layer.layer_id for layer in model] == [0]
    assert any("MTP layer 1 is left out" in note for note in model.info.assumed)
    with pytest.raises(ModelError, match="lacks tensors of its attention layers"):
        read_model(model_dir.path, layers="0,1")


@pytest.mark.parametrize("attention", ["self_attn", "attention"])
@pytest.mark.parametrize("root", ["model.", ""])
def test_the_root_of_the_names_is_found_out(
    model_dir: Any, attention_tensors: Any, root: str, attention: str
) -> None:
    prefix = f"{root}layers.0.{attention}"
    model_dir.config(**ONE).tensors(attention_tensors(prefix, "w8a8-dynamic"))
    layer = read_model(model_dir.path)[0]
    assert layer.prefix == prefix
    assert layer.quant_of("q_b_proj") == "w8a8-dynamic"


def test_longcat_names_both_attentions_and_its_mtp_layer(
    model_dir: Any, attention_tensors: Any
) -> None:
    model_dir.config(model_type="longcat_flash", num_layers=1, num_hidden_layers=...).tensors(
        {
            **attention_tensors("model.layers.0.self_attn.0", "w8a8-dynamic"),
            **attention_tensors("model.layers.0.self_attn.1", "none"),
            **attention_tensors("model.mtp.layers.0.self_attn", "none"),
        }
    )
    model = read_model(model_dir.path)
    assert [(layer.layer_id, layer.quant_of("q_b_proj")) for layer in model] == [
        (0, "w8a8-dynamic"), (1, "none"), (2, "none"),
    ]  # fmt: skip


def test_a_checkpoint_that_a_host_wrote_fused_is_read(
    model_dir: Any, attention_tensors: Any
) -> None:
    tensors = attention_tensors(P0, "none", ("q_b_proj", "kv_b_proj"))
    tensors[f"{P0}.fused_qkv_a_proj_with_mqa.weight"] = ("BF16", (208, 256))
    layer = read_model(model_dir.config(**ONE).tensors(tensors).path)[0]
    assert dict(layer.measured)["fused_qkv_a_proj"] == Measured("bfloat16", 208 * 256 * 2)


def test_a_model_without_q_lora_is_measured_through_q_proj(
    model_dir: Any, attention_tensors: Any
) -> None:
    modules = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    model_dir.config(**ONE, q_lora_rank=None).tensors(attention_tensors(P0, "fp8-block", modules))
    layer = read_model(model_dir.path)[0]
    assert layer.quant_of("q_proj") == "fp8-block"
    assert dict(layer.measured)["q_proj"] == Measured("float8_e4m3fn", 192 * 256)


def test_the_indexers_tensors_decide_its_quantization(
    model_dir: Any, attention_tensors: Any
) -> None:
    tensors = attention_tensors(P0, "w8a8-static")
    tensors.update(attention_tensors(P0, "w8a8-dynamic", ("indexer.wq_b",)))
    layer = read_model(model_dir.config(**ONE, index_topk=2048).tensors(tensors).path)[0]
    assert layer.indexer.quant == "w8a8-dynamic"


def test_a_description_that_the_tensors_contradict_is_an_error_naming_the_tensor(
    model_dir: Any, attention_tensors: Any, modelslim_types: Any
) -> None:
    model_dir.config(**ONE).description(modelslim_types(P0, "W8A8"))
    model_dir.tensors(attention_tensors(P0, "none"))
    with pytest.raises(ModelError) as caught:
        read_model(model_dir.path)
    text = str(caught.value)
    assert "model.layers.0.self_attn.q_a_proj.weight is BF16" in text
    assert "which is not w8a8-static" in text
    assert "quant_model_description.json" in text
    model_dir.tensors(attention_tensors(P0, "w8a8-dynamic"))
    with pytest.raises(ModelError, match="mean w8a8-dynamic"):
        read_model(model_dir.path)
    model_dir.tensors(attention_tensors(P0, "w8a8-static"))
    assert read_model(model_dir.path)[0].quant_of("q_b_proj") == "w8a8-static"


def test_int8_weights_with_a_scale_may_be_weight_only(
    model_dir: Any, attention_tensors: Any, modelslim_types: Any
) -> None:
    model_dir.config(**ONE).description(modelslim_types(P0, "W8A16"))
    model_dir.tensors(attention_tensors(P0, "w8a8-dynamic"))
    assert read_model(model_dir.path)[0].quant_of("q_b_proj") == "w8a16"


def test_packed_int4_weights_are_known(model_dir: Any, attention_tensors: Any) -> None:
    tensors = attention_tensors(P0, "none", ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
    tensors[f"{P0}.q_b_proj.weight_packed"] = ("I32", (192, 16))
    tensors[f"{P0}.q_b_proj.weight_scale"] = ("BF16", (192, 4))
    layer = read_model(model_dir.config(**ONE).tensors(tensors).path)[0]
    assert layer.quant_of("q_b_proj") == "w4a16"
    assert dict(layer.measured)["q_b_proj"] == Measured("int32", 192 * 16 * 4)


def test_the_callers_quantization_is_for_where_the_tensors_are_silent_and_that_is_told(
    model_dir: Any, attention_tensors: Any
) -> None:
    model_dir.config(**ONE).tensors(attention_tensors(P0, "none"))
    model = read_model(model_dir.path, quant="mxfp8")
    assert model[0].quant_of("q_b_proj") == "none"
    assert any("mxfp8 applies only where they are silent" in text for text in model.info.assumed)


@pytest.mark.parametrize(
    ("lacks", "kind"),
    [
        ((), "w8a8-static"),
        (("deq_scale",), "w8a8-static-symmetric"),
        (("input_offset", "deq_scale", "quant_bias"), "w8a8-static-symmetric"),
    ],
)
def test_static_int8_without_modelslims_tensors_is_a_kind_of_its_own(
    model_dir: Any, attention_tensors: Any, lacks: tuple[str, ...], kind: str
) -> None:
    tensors = {
        name: tensor
        for name, tensor in attention_tensors(P0, "w8a8-static").items()
        if not name.endswith(tuple(f".{part}" for part in lacks) or "?")
    }
    model_dir.config(**ONE).tensors(tensors)
    assert read_model(model_dir.path)[0].quant_of("q_b_proj") == kind


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q_a_proj.weight": ("BF16", (127, 256))}, "the config makes it [128, 256]"),
        ({"q_a_proj.weight": ("BF16", (128,))}, "the config makes it [128, 256]"),
        ({"q_b_proj.weight": ("I8", (192, 128))}, "neither weight_scale nor input_scale"),
        ({"q_b_proj.weight": ("F8_E4M3", (192, 128))}, "neither weight_scale nor weight_scale_inv"),
        ({"q_b_proj.weight": ("I64", (192, 128))}, "its quantization is not known"),
        ({"q_a_proj.weight": ("F16", (128, 256))}, "have different dtypes"),
        (
            {"q_a_proj.weight": ("I8", (128, 256)), "q_a_proj.weight_scale": ("F32", (128, 1))},
            "have different quantizations",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_an_error_that_names_them(
    model_dir: Any, attention_tensors: Any, change: dict[str, Any], says: str
) -> None:
    tensors = attention_tensors(P0) | {f"{P0}.{name}": entry for name, entry in change.items()}
    with pytest.raises(ModelError) as caught:
        read_model(model_dir.config(**ONE).tensors(tensors).path)
    assert says in str(caught.value)
    assert P0 in str(caught.value)
    assert caught.value.remedy


def test_missing_tensors_of_a_planned_layer_are_named(
    model_dir: Any, attention_tensors: Any
) -> None:
    tensors = attention_tensors("model.layers.0.self_attn")
    tensors.update(attention_tensors("model.layers.1.self_attn", modules=("q_a_proj", "kv_b_proj")))
    model_dir.config().tensors(tensors)
    with pytest.raises(ModelError, match="lacks tensors") as caught:
        read_model(model_dir.path)
    assert caught.value.why == (
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight is missing",
        "model.layers.1.self_attn.q_b_proj.weight is missing",
    )
    assert len(read_model(model_dir.path, layers="0")) == 1


def test_a_checkpoint_of_another_model_is_an_error(model_dir: Any) -> None:
    model_dir.config().tensors({"model.embed_tokens.weight": ("BF16", (8, 8))})
    with pytest.raises(ModelError, match="lacks tensors") as caught:
        read_model(model_dir.path)
    assert "model.layers.0.self_attn.q_a_proj.weight is missing" in str(caught.value)


def test_a_sharded_checkpoint_is_read_through_its_index(
    model_dir: Any, attention_tensors: Any
) -> None:
    first, second = (
        attention_tensors("model.layers.0.self_attn"),
        attention_tensors("model.layers.1.self_attn", "w8a8-dynamic"),
    )
    model_dir.config().tensors(first, "a.safetensors").tensors(second, "b.safetensors")
    model_dir.tensors({"x": ("BF16", (1,))}, "stale.safetensors")
    names = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.safetensors")}
    model_dir.index(names)
    model = read_model(model_dir.path)
    assert [layer.quant_of("q_b_proj") for layer in model] == ["none", "w8a8-dynamic"]
    (model_dir.path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks files that its index names") as caught:
        read_model(model_dir.path)
    assert "b.safetensors is missing" in str(caught.value)


def test_modelslims_files_win_over_the_float_ones_beside_them(
    model_dir: Any, attention_tensors: Any
) -> None:
    model_dir.config(**ONE).tensors(attention_tensors(P0), "model-00001-of-00001.safetensors")
    own = attention_tensors(P0, "w8a8-static")
    model_dir.tensors(own, "quant_model_weights.safetensors")
    assert read_model(model_dir.path)[0].quant_of("q_b_proj") == "w8a8-static"
    model_dir.index({"gone": "model-00009-of-00009.safetensors"})
    name = "quant_model_weights.safetensors.index.json"
    model_dir.index(dict.fromkeys(own, "quant_model_weights.safetensors"), name)
    assert read_model(model_dir.path)[0].quant_of("q_b_proj") == "w8a8-static"


def test_two_files_with_one_tensor_and_no_index_are_an_error(
    model_dir: Any, attention_tensors: Any
) -> None:
    tensors = attention_tensors(P0)
    model_dir.config(**ONE).tensors(tensors, "a.safetensors").tensors(tensors, "b.safetensors")
    with pytest.raises(ModelError, match="is in two files"):
        read_model(model_dir.path)


def test_an_index_that_promises_too_much_is_an_error(
    model_dir: Any, attention_tensors: Any
) -> None:
    tensors = attention_tensors(P0)
    model_dir.config(**ONE).index(dict.fromkeys(tensors, "a.safetensors"))
    del tensors[f"{P0}.q_b_proj.weight"]
    model_dir.tensors(tensors, "a.safetensors")
    with pytest.raises(ModelError, match=r"q_b_proj\.weight is missing from the file"):
        read_model(model_dir.path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "weight_map is not an object"),
        ({"weight_map": []}, "weight_map is not an object"),
        ({"weight_map": {"a": 1}}, "weight_map is not an object"),
        ({"weight_map": {"a": "../b.safetensors"}}, "is not the name of a file in the directory"),
        ({"weight_map": {"a": "b\0"}}, "is not the name of a file in the directory"),
    ],
)
def test_an_index_that_cannot_be_used_is_an_error(
    model_dir: Any, index: dict[str, Any], says: str
) -> None:
    model_dir.config()
    (model_dir.path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=says):
        read_model(model_dir.path)


def test_several_indexes_are_an_error(model_dir: Any) -> None:
    model_dir.config().index({}, "a.safetensors.index.json").index({}, "b.safetensors.index.json")
    with pytest.raises(ModelError, match="several safetensors indexes"):
        read_model(model_dir.path)


def with_header(entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x01\x02", "truncated: 2 bytes"),
        (struct.pack("<Q", 1000) + b"{}", "truncated: its header has 1000 bytes"),
        (struct.pack("<Q", 1 << 62), "no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (struct.pack("<Q", 0), "it is empty"),
        (struct.pack("<Q", 4) + b"{\xff\xff}", "not UTF-8"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 2) + b"{,", "not JSON"),
        (with_header({"a": []}), "the entry of a is malformed"),
        (with_header({"a": {"dtype": "BF16", "shape": [1]}}), "the entry of a is malformed"),
        (
            with_header({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [2, 0]}}),
            "the entry of a is malformed",
        ),
        (
            with_header({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}),
            "it is truncated: its tensors take 2 bytes, the file holds 0",
        ),
        (with_header({}) + b"\0", "it is too long"),
        (
            with_header(
                {f"{P0}.q_b_proj.weight": {"dtype": 1, "shape": [1], "data_offsets": [0, 0]}}
            ),
            "lacks tensors|malformed",
        ),
    ],
)
def test_a_broken_safetensors_file_is_an_error_that_names_it(
    model_dir: Any, content: bytes, says: str
) -> None:
    (model_dir.config(**ONE).path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=says) as caught:
        read_model(model_dir.path)
    assert caught.value.why
    assert caught.value.remedy


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [192, 128], "data_offsets": [0, 2]},
        {"dtype": 16, "shape": [1], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": ["1"], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": None, "data_offsets": [0, 2]},
        {"shape": [1], "data_offsets": [0, 2]},
    ],
)
def test_an_entry_whose_bytes_do_not_fit_its_shape_is_an_error(
    model_dir: Any, attention_tensors: Any, entry: dict[str, Any]
) -> None:
    names = list(attention_tensors(P0))
    entries = dict.fromkeys(names, entry)
    (model_dir.config(**ONE).path / "model.safetensors").write_bytes(with_header(entries) + b"\0\0")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_model(model_dir.path)


def test_a_truncated_shard_is_an_error_that_names_it(
    model_dir: Any, attention_tensors: Any
) -> None:
    model_dir.config(**ONE).tensors(attention_tensors(P0))
    file = model_dir.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated") as caught:
        read_model(model_dir.path)
    assert caught.value.whom == str(file)


def test_no_data_is_read(model_dir: Any, attention_tensors: Any) -> None:
    # The data of a sparse file would be terabytes; only its header is touched.
    shape = (1 << 30, 1 << 10)
    tensors = attention_tensors(P0)
    entries = {}
    at = 0
    for name, (dtype, dims) in {**tensors, "experts": ("BF16", shape)}.items():
        size = 2 * dims[0] * dims[1]
        entries[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [at, at + size]}
        at += size
    file = model_dir.config(**ONE).path / "model.safetensors"
    head = with_header(entries)
    file.write_bytes(head)
    with file.open("r+b") as stream:
        stream.truncate(len(head) + at)
    assert read_model(model_dir.path)[0].quant_of("q_b_proj") == "none"
