"""Whatever happens to a model's files: layers or a ModelError, never anything else."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_backend.errors import ModelError
from npu_backend.model.read import Model, read_model
from npu_backend.model.records import MlaLayer

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
BASE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
}
GROUP = {"targets": ["Linear"], "weights": INT8, "input_activations": TOKEN}
CONFIGS: list[dict[str, Any]] = [
    BASE,
    {**BASE, "num_nextn_predict_layers": 1, "index_topk": 64, "indexer_types": ["full"] * 4},
    {**BASE, "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}},
    {**BASE, "layer_types": ["linear_attention", "full_attention"] * 2, "mla_use_nope": True},
    {**BASE, "model_type": "longcat_flash", "num_layers": 2, "num_hidden_layers": 4},
    {**BASE, "mla_layer_ids": [1, 3], "layer_group_size": 2, "index_topk_freq": 2},
    {"model_type": "kimi_k3", "text_config": {**BASE, "model_type": "kimi_linear"}},
    {
        **BASE,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": GROUP},
            "ignore": ["lm_head", "re:.*kv_b_proj", "model.layers.1.*"],
        },
    },
    {
        **BASE,
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
    },
]
WORDS = [
    "", "FLOAT", "W8A8", "W8A8_DYNAMIC", "full", "shared", "F", "fp8", "mxfp8", "ascend",
    "modelslim", "compressed-tensors", "re:(", "re:.*", "re:[[a]", "*", "[", "int", "float",
    "group", "block", "Linear", "deepseek_v32", "longcat_flash", "bailing_hybrid",
    "linear_attention",
]  # fmt: skip
KEYS = sorted(
    {key for config in CONFIGS for key in config} | {"num_mtp_layers", "use_mla", "dtype"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.integers(),
    st.sampled_from([10**30, -(10**4000), 2**31, 4096, 4097]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=6),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every place in a JSON value."""
    found = [path] if path else []
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a valid config with some of its places replaced, removed or added to."""
    config: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.sampled_from(places(config) or [()]))
        if not where or draw(st.integers(0, 4)) == 0:
            config[draw(st.sampled_from(KEYS))] = draw(VALUES)
            continue
        parent: Any = config
        for key in where[:-1]:
            parent = parent[key]
        if isinstance(parent, dict) and draw(st.integers(0, 3)) == 0:
            del parent[where[-1]]
        else:
            parent[where[-1]] = draw(VALUES)
    return config


def outcome(path: Path, **options: Any) -> Model | ModelError:
    try:
        model = read_model(path, **options)
    except ModelError as error:
        assert error.what
        assert error.whom
        assert error.why
        assert error.remedy
        return error
    assert len(model) > 0
    assert all(isinstance(layer, MlaLayer) for layer in model)
    ids = [layer.layer_id for layer in model]
    assert ids == sorted(set(ids))
    assert len({layer.prefix for layer in model}) == len(model)
    for layer in model:
        assert (layer.kv_layout.rope == "none") != layer.has_rope
        assert layer.indexer.kind == "own" or layer.indexer.quant == "none"
    return model


@given(mutated(), st.sampled_from(["none", "w8a8-static", "mxfp8"]))
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_mutated_config_gives_layers_or_a_model_error(config: dict[str, Any], quant: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        outcome(path, quant=quant, host="sglang")


@given(st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_damaged_files_give_layers_or_a_model_error(data: st.DataObject) -> None:
    names = ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"]
    shapes = {"q_a_proj": (128, 256), "kv_a_proj_with_mqa": (80, 256), "q_b_proj": (192, 128),
              "kv_b_proj": (256, 64)}  # fmt: skip
    entries: dict[str, Any] = {}
    at = 0
    for name in names:
        rows, columns = shapes[name]
        parts = {"weight": ("I8", [rows, columns], rows * columns)}
        parts["weight_scale"] = ("F32", [rows, 1], rows * 4)
        for part, (dtype, shape, size) in parts.items():
            key = f"model.layers.0.self_attn.{name}.{part}"
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
    types = {f"model.layers.0.self_attn.{name}.weight": "W8A8_DYNAMIC" for name in names}
    values: dict[str, Any] = {
        "config.json": {**BASE, "num_hidden_layers": 1},
        "quant_model_description.json": types,
        "model.safetensors": entries,
        "model.safetensors.index.json": {"weight_map": dict.fromkeys(entries, "model.safetensors")},
    }
    hurt = data.draw(st.sampled_from(sorted(values)))
    place = data.draw(st.sampled_from(places(values[hurt])))
    parent = values[hurt]
    for key in place[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        parent[place[-1]] = data.draw(VALUES)
    with tempfile.TemporaryDirectory() as folder:
        for name, value in values.items():
            text = json.dumps(value).encode()
            if name == "model.safetensors":
                text = len(text).to_bytes(8, "little") + text + bytes(at)
            if name == hurt and data.draw(st.booleans()):
                cut = data.draw(st.integers(0, len(text)))
                text = text[:cut] + data.draw(st.binary(max_size=4)) + text[cut + 1 :]
            (Path(folder) / name).write_bytes(text)
        outcome(Path(folder))


def test_the_undamaged_ones_are_all_read(tmp_path: Path) -> None:
    for config in CONFIGS:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert isinstance(outcome(tmp_path), Model), config


def test_a_model_error_never_hides_its_cause(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError) as caught:
        read_model(tmp_path)
    assert isinstance(caught.value.__cause__, json.JSONDecodeError)
