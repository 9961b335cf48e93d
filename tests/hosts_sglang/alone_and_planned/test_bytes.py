"""Bytes that SGLang holds after its steps, alone and with npu-backend, by the device's allocator.

SGLang frees in its first forward, so both are measured after all steps. What they hold beside
weights is the same but for the RoPE tables and flat scales that the adapter made, which are counted
apart, and for rows of the last step: cos and sin of a few tokens.
"""

from __future__ import annotations

import json

import pytest
from sglang_world.cases import COMPARED, Case
from sglang_world.engine import HEADS, HIDDEN

Q_LORA, LATENT, NOPE, ROPE, V = 1536, 512, 128, 64, 128
LEFT_BY_STEPS = 8192
"""cos and sin of the last step's few rows, what a quantized original has beside its weight and its
scale, and the zeros that SGLang keeps for inputs of mla_preprocess that are not used. The smallest
weight has 32 times as many."""


def _bytes(case: Case) -> dict[str, int]:
    """Return the bytes of the loaded weights, by hand from the sizes."""
    kinds = {"none": (2, 2), "q_b": (2, 1), "static": (1, 1), "dynamic": (1, 1)}
    first, second = kinds[case.model.quant]
    scales = {"static": 8, "dynamic": 4, "q_b": 4, "none": 0}[case.model.quant]
    columns = HEADS * (NOPE + ROPE)
    return {
        "fused_qkv_a_proj": first * HIDDEN * (Q_LORA + LATENT + ROPE),
        "q_b_proj": second * Q_LORA * columns + scales * columns,
        "kv_b_proj": 2 * HEADS * (NOPE + V) * LATENT,
        "w_kc": 2 * HEADS * NOPE * LATENT,
    }


# On layers with indexer nothing reads kv_b_proj once w_kc and w_vc are split off, in any role, and
# SGLang never frees it. Where preprocessing holds copies, SGLang frees w_kc and fused_qkv_a_proj of
# a decode worker with float projections; originals of quantized ones it keeps. What an indexer with
# a 16-bit wq_b reads (fused_qkv_a_proj) stays in both.
DSA = {
    ("absorb", "null"): {"kv_b_proj"},
    ("absorb", "prefill"): {"kv_b_proj"},
    ("absorb", "decode"): {"kv_b_proj"},
    ("mlapo", "null"): {"kv_b_proj"},
    ("mlapo", "prefill"): {"kv_b_proj"},
    ("mlapo", "decode"): {"kv_b_proj", "q_b_proj", "w_kc"},
    ("mlaprolog", "null"): {"kv_b_proj"},
    ("mlaprolog", "prefill"): {"kv_b_proj"},
}
DSA_PROLOG_DECODE = {
    "none": {"kv_b_proj", "q_b_proj"},
    "q_b": {"kv_b_proj"},  # SGLang too hands the op q_b_proj itself
    "dynamic": {"kv_b_proj", "w_kc"},  # q_b_proj is in the op's format already: neither copies it
}
# Layers without indexer extend by SGLang's MHA, which reads all three projections; w_kc and w_vc
# have the reader absorb@idle on a prefill worker. So there nothing more can go.
MLA = {
    ("absorb", "null"): set(),
    ("absorb", "prefill"): set(),
    ("absorb", "decode"): {"kv_b_proj"},
    ("mlapo", "null"): {"w_kc"},
    ("mlapo", "prefill"): set(),
    ("mlapo", "decode"): {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "w_kc"},
}


def _freed_more(case: Case) -> set[str]:
    if case.model.dsa and (case.path, case.role) == ("mlaprolog", "decode"):
        return DSA_PROLOG_DECODE[case.model.quant]
    return (DSA if case.model.dsa else MLA)[case.path, case.role]


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_sglang_with_the_plugin_holds_less_by_the_weights_that_only_the_plan_frees(case, pair):
    alone, planned = pair
    weights = _freed_more(case)
    expected = sum(_bytes(case)[name] for name in weights)
    found = alone["held"] - (planned["held"] - sum(planned["beside"].values()))
    assert -LEFT_BY_STEPS <= found - expected <= LEFT_BY_STEPS


@pytest.mark.parametrize(
    "case", [case for case in COMPARED if not _freed_more(case)], ids=lambda case: case.name
)
def test_where_nothing_more_is_freed_every_weight_has_a_reader(case, pair):
    _, planned = pair
    rows = json.loads(planned["plan"])["layers"][0]["weights"]
    assert [row["name"] for row in rows if not row["readers"]] == []
    kept = {row["name"]: row["readers"] for row in rows}
    assert "host:mha@extend" in kept["kv_b_proj"]


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_with_the_plugin_no_step_frees_or_takes_bytes(case, pair):
    _, planned = pair
    assert abs(planned["held"] - planned["start"]) <= LEFT_BY_STEPS
