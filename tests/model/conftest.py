"""Tiny models on disk: a config, a description, and safetensors files with real headers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1,
         "F8_E8M0": 1}  # fmt: skip

TINY = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_hidden_layers": 2,
}
"""The rows are q_a 128, kv_a 80, q_b 192, kv_b 256, q_proj 192."""

SHAPES = {
    "q_a_proj": (128, 256),
    "kv_a_proj_with_mqa": (80, 256),
    "q_b_proj": (192, 128),
    "q_proj": (192, 256),
    "kv_b_proj": (256, 64),
    "indexer.wq_b": (256, 128),
}

LORA = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")


def parts(kind: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a projection as ModelSlim or the model's publisher writes them."""
    blocks = (math.ceil(rows / 128), math.ceil(columns / 128))
    kinds: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        "none": {"weight": ("BF16", (rows, columns))},
        "w8a8-static": {
            "weight": ("I8", (rows, columns)),
            "input_scale": ("F32", (1,)),
            "input_offset": ("F32", (1,)),
            "deq_scale": ("F32", (rows,)),
            "quant_bias": ("I32", (rows,)),
        },
        "w8a8-dynamic": {
            "weight": ("I8", (rows, columns)),
            "weight_scale": ("F32", (rows, 1)),
            "weight_offset": ("F32", (rows, 1)),
        },
        "fp8-block": {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale_inv": ("F32", blocks),
        },
        "mxfp8": {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale": ("U8", (rows, math.ceil(columns / 32))),
        },
        "fp8": {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", (rows, 1))},
    }
    return kinds[kind]


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    """Return the file's head and the number of data bytes that follow it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


class ModelDir:
    """A model directory in the making."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self, **changes: Any) -> ModelDir:
        fields = {**TINY, **changes}
        kept = {key: value for key, value in fields.items() if value is not ...}
        (self.path / "config.json").write_text(json.dumps(kept))
        return self

    def description(
        self, types: Mapping[str, Any], name: str = "quant_model_description.json"
    ) -> ModelDir:
        (self.path / name).write_text(json.dumps({"model_quant_type": "W8A8", **types}))
        return self

    def tensors(
        self,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        name: str = "model.safetensors",
    ) -> ModelDir:
        head, size = header_bytes(tensors)
        (self.path / name).write_bytes(head + bytes(size))
        return self

    def index(
        self, weight_map: Mapping[str, str], name: str = "model.safetensors.index.json"
    ) -> ModelDir:
        (self.path / name).write_text(json.dumps({"weight_map": weight_map}))
        return self


def attention(
    prefix: str, kinds: Mapping[str, str] | str = "none", modules: tuple[str, ...] = LORA
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of one attention module, quantized as said, kv_b_proj float."""
    found = {}
    for module in modules:
        kind = kinds if isinstance(kinds, str) else kinds.get(module, "none")
        if isinstance(kinds, str) and module == "kv_b_proj":
            kind = "none"
        for part, tensor in parts(kind, *SHAPES[module]).items():
            found[f"{prefix}.{module}.{part}"] = tensor
    return found


def types(prefix: str, value: str, kv_b: str = "FLOAT") -> dict[str, str]:
    """Return ModelSlim's description of one attention module."""
    modules = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")
    named = {f"{prefix}.{module}.weight": value for module in modules}
    return {**named, f"{prefix}.kv_b_proj.weight": kv_b}


@pytest.fixture
def model_dir(tmp_path: Path) -> ModelDir:
    """A directory with nothing in it yet."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    return ModelDir(directory)


@pytest.fixture
def attention_tensors() -> Callable[..., dict[str, tuple[str, tuple[int, ...]]]]:
    return attention


@pytest.fixture
def modelslim_types() -> Callable[..., dict[str, str]]:
    return types


@pytest.fixture
def tiny() -> dict[str, Any]:
    return dict(TINY)
