"""The bundled models: their layers, ids, sizes and bytes, as the public facts give them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from npu_backend.errors import ModelError
from npu_backend.model.read import read_model
from npu_backend.model.weights import loaded_weights

MIB = 1 << 20
KIMI_K3 = (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63, 67, 71, 75, 79, 83, 87,
           91, 92)  # fmt: skip


def sizes(name: str, layer: int = 0, **options: object) -> dict[str, int]:
    found = read_model(name, **options)  # type: ignore[arg-type]
    return {spec.name: spec.bytes for spec in loaded_weights(found[layer], 1)}


@pytest.mark.parametrize(
    ("name", "main", "nextn"),
    [
        ("deepseek-v3", range(61), (61,)),
        ("deepseek-v3.2", range(61), (61,)),
        ("glm-5.2", range(78), (78,)),
        ("glm-4.7-flash", range(47), ()),
        ("kimi-k2", range(61), ()),
        ("kimi-k3", KIMI_K3, ()),
        ("kimi-linear", (3, 7, 11, 15, 19, 23, 26), ()),
        ("longcat-flash", range(56), (56,)),
        ("deepseek-v2-lite", range(27), ()),
    ],
)
def test_a_bundled_model_has_the_layers_that_are_published(
    name: str, main: range, nextn: tuple[int, ...]
) -> None:
    model = read_model(name)
    assert [layer.layer_id for layer in model if not layer.is_nextn] == list(main)
    assert [layer.layer_id for layer in model if layer.is_nextn] == list(nextn)
    assert model.info.name == name


def test_the_sizes_of_glm_are_the_published_ones() -> None:
    layer = read_model("glm-5.2")[0]
    assert (layer.hidden_size, layer.num_heads, layer.q_lora_rank) == (6144, 64, 2048)
    assert (layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim) == (512, 192, 64)
    assert layer.v_head_dim == 256
    assert layer.model_type == "glm_moe_dsa"
    assert layer.indexer.kind == "own"


def test_bytes_at_attention_tp_1_are_those_of_the_facts() -> None:
    assert sizes("glm-5.2")["w_kc"] == 12 * MIB
    assert sizes("glm-5.2")["kv_b_proj"] == 28 * MIB
    assert sizes("deepseek-v3")["w_kc"] == 16 * MIB
    # 15.375 Mi elements of GLM, 15.14 million of DeepSeek-V3, two bytes each.
    assert sizes("glm-5.2")["fused_qkv_a_proj"] == 16_121_856 * 2
    assert sizes("deepseek-v3")["fused_qkv_a_proj"] == 15_138_816 * 2
    both = sum(
        spec.bytes
        for layer in read_model("deepseek-v3", layers="0-60")
        for spec in loaded_weights(layer, 1)
        if spec.name in ("w_kc", "w_vc")
    )
    assert both == pytest.approx(1.9 * 1024 * MIB, rel=0.01)


def test_bytes_of_the_quantized_source_are_those_measured_at_a_host() -> None:
    # DeepSeek-V3 at TP 1: int8 qkv_a and q_b take 3.0 GiB, bf16 kv_b 1.91 GiB.
    layers = read_model("deepseek-v3", quant="w8a8-static", layers="0-60")
    total = {"fused_qkv_a_proj": 0, "q_b_proj": 0, "kv_b_proj": 0}
    for layer in layers:
        for spec in loaded_weights(layer, 1):
            if spec.name in total:
                total[spec.name] += spec.bytes
    gib = 1024 * MIB
    assert total["fused_qkv_a_proj"] + total["q_b_proj"] == pytest.approx(3.0 * gib, rel=0.02)
    assert total["kv_b_proj"] == pytest.approx(1.91 * gib, rel=0.01)


def test_longcat_has_two_attentions_per_layer_and_its_mtp_layer_after_both() -> None:
    model = read_model("longcat-flash")
    assert model[0].prefix == "model.layers.0.self_attn.0"
    assert model[55].prefix == "model.layers.27.self_attn.1"
    assert (model[56].layer_id, model[56].is_nextn) == (56, True)
    assert model[56].prefix == "model.mtp.layers.0.self_attn"


def test_the_mtp_layer_of_glm_is_layer_78_of_the_checkpoint() -> None:
    mtp = read_model("glm-5.2")[-1]
    assert (mtp.layer_id, mtp.is_nextn) == (78, True)
    assert mtp.prefix == "model.layers.78.self_attn"
    assert mtp.indexer.kind == "own"


def test_sgl_27371_a_model_without_q_lora_has_q_proj() -> None:
    layer = read_model("deepseek-v2-lite", quant="w8a8-dynamic")[0]
    assert layer.q_lora_rank is None
    names = [spec.name for spec in loaded_weights(layer, 1)]
    assert names[0] == "q_proj"
    assert "kv_a_proj_with_mqa" in names
    assert "fused_qkv_a_proj" not in names
    assert layer.quant_of("q_proj") == layer.quant_of("kv_a_proj_with_mqa") == "w8a8-dynamic"
    assert layer.quant_of("fused_qkv_a_proj") == "none"


def test_layers_without_rotary_embedding_write_none() -> None:
    k3, flash = read_model("kimi-k3")[0], read_model("glm-5.3-flash")[0]
    assert (k3.qk_rope_head_dim, k3.use_rope, k3.kv_layout.rope) == (64, False, "none")
    assert (flash.qk_rope_head_dim, flash.has_rope, flash.kv_layout.rope) == (0, False, "none")
    assert read_model("deepseek-v3")[0].kv_layout.rope == "half"


def test_quant_covers_main_layers_and_the_indexer_but_neither_kv_b_nor_mtp() -> None:
    model = read_model("glm-5.2", quant="w8a8-dynamic")
    first, mtp = model[0], model[-1]
    for name in ("fused_qkv_a_proj", "q_b_proj"):
        assert first.quant_of(name) == "w8a8-dynamic"
        assert mtp.quant_of(name) == "none"
    assert first.quant_of("kv_b_proj") == "none"
    assert first.indexer.quant == "w8a8-dynamic"
    assert mtp.indexer.quant == "none"
    assert any("w8a8-dynamic" in note for note in model.info.assumed)


def test_what_was_assumed_is_said() -> None:
    assumed = read_model("deepseek-v3").info.assumed
    assert "no quantization description: all projections float" in assumed
    assert any("safetensors" in note for note in assumed)
    assert any("indexer" in note for note in read_model("deepseek-v3.2").info.assumed)
    assert read_model("deepseek-v2-lite").info.unverified


@pytest.mark.parametrize(
    ("name", "w_vc"),
    [
        ("deepseek-v3", "contiguous"),
        ("glm-5.2", "contiguous"),
        ("kimi-k3", "strided"),
        ("kimi-linear", "strided"),
        ("longcat-flash", "strided"),
    ],
)
def test_sglang_leaves_some_models_w_vc_a_view(name: str, w_vc: str) -> None:
    assert read_model(name, host="sglang")[0].w_vc_layout == w_vc
    assert read_model(name, host="sglang")[0].w_kc_layout == "strided"
    assert read_model(name)[0].w_vc_layout == "contiguous"


def test_sglang_leaves_w_kc_of_an_fp8_block_kv_b_proj_fp8(model_dir: Any) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = model_dir.config(quantization_config=block).path
    assert read_model(path, host="sglang")[0].bmm_dtype == "float8_e4m3fn"
    assert read_model(path)[0].bmm_dtype == "bfloat16"


def test_a_model_is_a_sequence_of_its_layers() -> None:
    model = read_model("kimi-linear")
    assert len(model) == 7
    assert list(model) == list(model.layers)
    assert model[1:3] == model.layers[1:3]
    assert model[-1] in model
    assert model == read_model("kimi-linear")


@pytest.mark.parametrize("layers", ["0-2,78", " 0 - 2 , 78 ", (0, 1, 2, 78), [78, 2, 1, 0, 0]])
def test_layers_are_chosen_by_id_in_the_models_order(layers: object) -> None:
    model = read_model("glm-5.2", layers=layers)  # type: ignore[arg-type]
    assert [layer.layer_id for layer in model] == [0, 1, 2, 78]


def test_a_range_takes_the_mla_layers_of_a_hybrid_model() -> None:
    assert [layer.layer_id for layer in read_model("kimi-linear", layers="0-11")] == [3, 7, 11]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("79", "79 is not the id"),
        ("0-90", "ends beyond the last layer, 78"),
        ("5-3", "backwards"),
        ("a", "neither an id nor a range"),
        ("", "neither an id nor a range"),
        ((), "no layer is left"),
        ((1.5,), "neither an id nor a range"),
        ((True,), "neither an id nor a range"),
        ("-1", "neither an id nor a range"),
        ((-1,), "-1 is not the id"),
    ],
)
def test_a_selection_that_cannot_be_used_names_the_valid_ids(layers: object, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_model("glm-5.2", layers=layers)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "0-78" in str(caught.value)


def test_a_layer_of_another_kind_is_not_an_mla_layer() -> None:
    with pytest.raises(ModelError, match="0 is not the id of an MLA layer"):
        read_model("kimi-linear", layers="0")
    with pytest.raises(ModelError, match="no layer is left"):
        read_model("kimi-linear", layers="0-2")


def test_an_unknown_name_suggests_the_nearest_bundled_one() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'glm-5\.2'"):
        read_model("glm5.2")
    with pytest.raises(ModelError, match="did you mean 'deepseek-v3'"):
        read_model("DeepSeek-V3")


def test_a_bundled_name_wins_over_a_folder_unless_it_is_written_as_a_path(
    model_dir: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_dir.config()
    model_dir.path.rename(model_dir.path.parent / "glm-5.2")
    monkeypatch.chdir(model_dir.path.parent)
    assert len(read_model("glm-5.2")) == 79
    assert len(read_model("./glm-5.2")) == 2
    assert len(read_model(Path("glm-5.2"))) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quant": "w8a8_static"}, "did you mean 'w8a8-static'"),
        ({"dtype": "bf16"}, "did you mean 'bfloat16'"),
        ({"host": "sglan"}, "did you mean 'sglang'"),
        ({"block_size": 0}, "block size"),
        ({"block_size": True}, "block size"),
        ({"block_size": "128"}, "block size"),
    ],
)
def test_wrong_arguments_are_errors_with_suggestions(options: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_model("glm-5.2", **options)  # type: ignore[arg-type]


def test_dtype_and_block_size_reach_the_cache_layout() -> None:
    layout = read_model("glm-5.2", dtype="float16", block_size=64)[0].kv_layout
    assert (layout.cache_mode, layout.dtype, layout.block_size) == ("PA_BSND", "float16", 64)


def test_reading_a_bundled_model_is_fast() -> None:
    read_model("glm-5.2")
    times = []
    for _ in range(10):
        start = time.perf_counter()
        read_model("glm-5.2")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010, "3 ms on an idle machine; the rest is for a busy one"


def test_reading_imports_no_torch_and_nothing_heavy() -> None:
    code = (
        "import sys; from npu_backend.model.read import read_model; read_model('glm-5.2');"
        "heavy = {'torch', 'torch_npu', 'numpy', 'cattrs', 'safetensors', 'pluggy'};"
        "bad = heavy & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
