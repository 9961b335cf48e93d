"""mlaprolog on layers without indexer, where SGLang's own cannot run: against the op's reference.

The reference computes on the CPU from the weights as SGLang loaded them; a chip's numerics are not
in it. It and the simulated op share no code.
"""

from __future__ import annotations

import json

import pytest
from sglang_world.cases import REFERRED

ULP = 2.0**-7
"""Relative distance of neighbouring bfloat16 numbers, at most."""

cases = pytest.mark.parametrize("case", REFERRED, ids=lambda case: case.name)


APART = {"none": 0.0, "q_b": ULP, "dynamic": 2 / 127}
"""How far the largest element may be off. Without quantization nothing is; mode 1 rounds the query
once more before it is rotated; in mode 2 a value of the compressed query that is rounded to int8
may fall one step apart."""


@cases
def test_queries_and_caches_are_those_of_the_reference(case, pair):
    _, planned = pair
    assert len(planned["steps"]) == 2
    for step in planned["steps"]:
        for name, (found, wanted) in step.items():
            apart = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
            assert apart <= APART[case.model.quant], name


@cases
def test_the_plan_runs_mlaprolog(case, pair):
    _, planned = pair
    path = json.loads(planned["plan"])["layers"][0]["path"]
    assert {e["strategy"] for e in path if "decode" in e["phases"]} == {"mlaprolog"}


@pytest.mark.parametrize(
    "case",
    [c for c in REFERRED if c.model.quant == "none"],
    ids=lambda case: case.name,
)
def test_where_sglang_alone_absorbs_the_plan_s_mlaprolog_is_within_bfloat16_of_it(case, pair):
    """With an ignore list too: its preprocess object is made without one."""
    alone, planned = pair
    for mine, theirs in zip(planned["steps"], alone["steps"], strict=True):
        for name in mine:
            one, other = (side[name][0].float() for side in (mine, theirs))
            assert (one - other).abs().max() <= 4 * ULP * other.abs().max(), name
