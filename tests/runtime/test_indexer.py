"""The compressed query from original weights, where a path hands none over that wq_b takes."""

from __future__ import annotations

import pytest
import torch

from npu_backend import Indexer, PlanMismatchError, PrepareError, WeightReleasedError
from npu_backend.runtime.prove.seeded import seeded_weights

BOTH = ("fused_qkv_a_proj", "q_b_proj")


def _bound(h, layer, **deployment):
    made = seeded_weights(layer, 1)
    bound = h.bind(h.plan(layer, **deployment), made.to(torch.device("cpu")))
    return bound, made


@pytest.mark.parametrize(
    ("quant", "tolerance"), [("none", 5e-3), ("w8a8-dynamic", 2e-2), ("mxfp8", 5e-2)]
)
def test_it_is_the_normed_first_projection(h, quant, tolerance):
    if quant == "mxfp8" and not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("torch has the dtype of MX scales since 2.7")
    layer = h.fused_layer(quant=dict.fromkeys(BOTH, quant), indexer=Indexer("own"))
    bound, made = _bound(h, layer, soc="A5", requests=["path=absorb"])
    bound.prepare()
    hidden = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = made.loaded["fused_qkv_a_proj"][:1536].double()
    if (scale := made.channel_scales.get("fused_qkv_a_proj")) is not None:
        parts = scale[:1536].reshape(1536, -1).double()
        weight = weight * parts.repeat_interleave(1024 // parts.shape[1], -1)
    low = hidden.double() @ weight.t()
    norm = low / (low.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = norm * made.gammas["q_a_layernorm"].double()
    found = bound.compressed_query(hidden)
    assert found.shape == (3, 1536)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).norm() / expected.norm()) < tolerance


def test_an_int8_path_beside_a_float_indexer_keeps_the_original(h):
    """mlaprolog hands q_lora over in int8; a float wq_b cannot take it, so the indexer reads."""
    layer = h.fused_layer(quant=dict.fromkeys(BOTH, "w8a8-dynamic"), indexer=Indexer("own", "none"))
    bound, _ = _bound(h, layer, role="decode", requests=["path=mlaprolog"])
    row = next(r for r in bound.plan.weights if r.name == "fused_qkv_a_proj")
    assert row.action == "keep"
    assert "indexer@decode" in row.readers
    bound.prepare()
    bound.release()
    assert bound.compressed_query(torch.ones(1, 1024, dtype=torch.bfloat16)).shape == (1, 1536)


def test_where_the_path_hands_it_over_the_original_is_gone(h):
    layer = h.fused_layer(indexer=Indexer("own", "none"))
    bound, _ = _bound(h, layer, role="decode")
    bound.prepare()
    hidden = torch.ones(1, 1024, dtype=torch.bfloat16)
    with pytest.raises(WeightReleasedError, match="fused_qkv_a_proj"):
        bound.compressed_query(hidden)
    bound.release()
    with pytest.raises(WeightReleasedError, match="fused_qkv_a_proj"):
        bound.compressed_query(hidden)


def test_before_prepare_and_without_a_compressed_query(h):
    bound = h.bind(h.plan(h.layer()))
    with pytest.raises(PrepareError, match="before prepare"):
        bound.compressed_query(torch.ones(1, 64, dtype=torch.bfloat16))
    bare = h.bind(h.plan(h.layer(q_lora_rank=None)))
    bare.prepare()
    with pytest.raises(PlanMismatchError, match="no compressed query"):
        bare.compressed_query(torch.ones(1, 64, dtype=torch.bfloat16))
