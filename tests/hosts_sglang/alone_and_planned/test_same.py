"""SGLang's own attention modules with and without npu-backend, on the same weights and inputs.

Both are SGLang: its published context, its model class with its quantized linears, its pools and
its attention backend, in one process without and in another with the plugin. Each case's steps run
through the whole attention module, from hidden states to the output projection, over pages that
hold other requests' rows.

Where both run the same ops, nothing may differ. There is one place where they do not: an embedding
without YaRN, and ``SGLANG_NPU_USE_MLAPO`` unset. On NPU SGLang rotates these by a kernel of
sgl-kernel-npu, which is not here, else in plain torch, which rounds after each product, while ours
rounds once. See :func:`_rotation_bound`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from sglang_world.cases import COMPARED, Case

ULP = 2.0**-7
"""Relative distance of neighbouring bfloat16 numbers, at most."""


def _same_ops(case: Case) -> bool:
    """Whether both run the same ops.

    Absorb on layers without indexer never does: SGLang's q_absorb is torch.bmm there, the plan's is
    npu_transpose_batchmatmul. Without YaRN the rotation is another op too.
    """
    return case.mlapo or (case.model.yarn if case.model.dsa else case.role == "prefill")


EXACT = [case for case in COMPARED if _same_ops(case)]
ROUNDED = [case for case in COMPARED if not _same_ops(case)]


def _named(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@_named(EXACT)
def test_outputs_and_caches_are_equal_bit_by_bit_where_the_same_ops_run(case, pair):
    alone, planned = pair
    for step, mine, theirs in zip(case.steps, planned["outputs"], alone["outputs"], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other), step
    assert planned["pages"].keys() == alone["pages"].keys()
    for name, page in alone["pages"].items():
        assert torch.equal(planned["pages"][name], page), name


def _rotation_bound(page: torch.Tensor) -> torch.Tensor:
    """Return how far two roundings of a rotated pair (a, b) may be apart.

    SGLang's product, product and difference each round by half an ULP; ours rounds once. With
    ``|a cos| + |b sin| <= sqrt(2) |(a, b)|`` that is at most ``(sqrt(2) + 2) / 2`` ULP of the
    pair's length, and a rotation keeps the length.
    """
    pairs = page.float().unflatten(-1, (-1, 2))
    length = pairs.norm(dim=-1, keepdim=True).expand_as(pairs).flatten(-2)
    return length * ULP * (2**0.5 + 2) / 2 * (1 + ULP)


@_named(ROUNDED)
def test_where_an_op_is_another_only_rotated_keys_and_outputs_differ_by_its_rounding(case, pair):
    alone, planned = pair
    for name, page in alone["pages"].items():
        if name != "rope" or case.model.yarn:  # with YaRN both rotate by the same op
            assert torch.equal(planned["pages"][name], page), name
    apart = (planned["pages"]["rope"].float() - alone["pages"]["rope"].float()).abs()
    assert bool((apart <= _rotation_bound(alone["pages"]["rope"])).all())
    for mine, theirs in zip(planned["outputs"], alone["outputs"], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            distance = (one.float() - other.float()).abs().max() / other.float().abs().max()
            assert distance <= 2 * ULP


@_named(list(COMPARED))
def test_the_plan_serves_the_path_that_the_case_is_about(case, pair):
    _, planned = pair
    layer = json.loads(planned["plan"])["layers"][0]
    served = {phase: entry["strategy"] for entry in layer["path"] for phase in entry["phases"]}
    if case.role != "prefill":
        assert served["decode"] == case.path
    if case.role != "decode":
        assert served["extend"] == ("absorb" if case.model.dsa else "host:mha")


def test_without_the_plugin_nothing_of_it_ran(run):
    for soc in ("A3", "A5"):
        alone, planned = run(soc)
        assert {found.get("plan") for found in alone.values()} == {None}
        assert all(found.get("plan") is not None for found in planned.values())
