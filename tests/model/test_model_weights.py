"""The weights of a rank after load: bytes, sharding, scales, and what can be cast to FRACTAL_NZ."""

from __future__ import annotations

import pytest

from npu_backend.catalog import load_catalog
from npu_backend.errors import ModelError
from npu_backend.model.read import read_model
from npu_backend.model.weights import loaded_weights, nz_castable


def test_replicated_weights_are_whole_on_each_rank_and_split_ones_by_heads() -> None:
    layer = read_model("deepseek-v3")[0]
    one = {spec.name: spec.bytes for spec in loaded_weights(layer, 1)}
    many = {spec.name: spec.bytes for spec in loaded_weights(layer, 16)}
    assert one["fused_qkv_a_proj"] == many["fused_qkv_a_proj"]
    for name in ("q_b_proj", "kv_b_proj", "w_kc", "w_vc"):
        assert one[name] == 16 * many[name]


def test_heads_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ModelError, match="64 heads do not divide over attention TP 3"):
        loaded_weights(read_model("glm-5.2")[0], 3)


def test_sgl_21209_a_360_wide_int8_weight_cannot_be_cast_to_nz() -> None:
    catalog = load_catalog()
    assert nz_castable(catalog, "int8", 7168, 360) == "N = 360 is not a multiple of 32 (int8)"
    assert nz_castable(catalog, "int8", 7168, 384) is None
    assert nz_castable(catalog, "float32", 64, 64) is not None
