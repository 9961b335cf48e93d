"""docs/sglang.md's truth table against SGLang's two predicates and against the planner.

SGLang's columns are worked out here from its predicates as they are written in the engine; the
plan's column is what the planner gives; each difference must name one of the reasons in the list
below the table.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

import npu_backend
from npu_backend import Deployment, SelectionError

DOC = Path(__file__).parents[2] / "docs" / "sglang.md"
CANN = "9.2.0"

QUANTS = {
    # words of the table: qkv_a, q_b, made by ModelSlim, kv_b_proj in another tool's ignore list
    "16-bit": ("none", "none", False, False),
    "w8a8-static (ModelSlim)": ("w8a8-static", "w8a8-static", True, False),
    "w8a8-dynamic (ModelSlim)": ("w8a8-dynamic", "w8a8-dynamic", True, False),
    "mxfp8 (ModelSlim)": ("mxfp8", "mxfp8", True, False),
    "16-bit qkv_a, int8 q_b (ignore list)": ("none", "w8a8-dynamic", False, True),
    "w8a8-dynamic (ignore list)": ("w8a8-dynamic", "w8a8-dynamic", False, True),
    "mxfp8 (ignore list)": ("mxfp8", "mxfp8", False, True),
}
KEYS = [(chip, kind, quant) for chip in ("A3", "A5") for kind in ("MLA", "DSA") for quant in QUANTS]
CODES = {
    "A": set(),
    "B": {"quant.mode"},
    "C": {"soc.unsupported", "quant.mode"},
    "D": {"quant.mode"},
}
"""Reason codes by the letter of the list: with which the planner refuses SGLang's own path."""


def table() -> dict[tuple[str, str, str], tuple[str, str, str, str]]:
    text = DOC.read_text("utf-8").partition("| chip | layer | quantization |")[2]
    rows = {}
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[tuple(cells[:3])] = tuple(cells[3:])
    return rows


TABLE = table()


def as_merged(chip: str, kind: str, quant: str) -> str:
    """sgl-project/sglang#38807 as merged: mlapo is asked first."""
    _, _, modelslim, ignored = QUANTS[quant]
    a5_indexed = chip == "A5" and kind == "DSA"
    if modelslim and not a5_indexed:
        return "mlapo"
    return "mlaprolog" if a5_indexed or ignored else "absorb"


def as_released(chip: str, kind: str, quant: str) -> str:
    """0.5.23: ``uses_mlaprolog()`` decides first, and knows weight mode 2."""
    qkv_a, q_b, modelslim, ignored = QUANTS[quant]
    mode_2 = qkv_a == q_b == "w8a8-dynamic"
    prolog = ((chip == "A5" or mode_2) and kind == "DSA") or (ignored and not modelslim)
    return "mlaprolog" if prolog else "mlapo" if modelslim else "absorb"


@pytest.fixture(scope="module")
def backend():
    return npu_backend.load(third_party=False)


def planned(backend, chip, kind, quant, request):
    name = "deepseek-v3.2" if kind == "DSA" else "deepseek-v3"
    (layer,) = npu_backend.read_model(name, layers=[0], host="sglang").layers
    qkv_a, q_b, _, _ = QUANTS[quant]
    layer = attrs.evolve(
        layer, quant={"fused_qkv_a_proj": qkv_a, "q_b_proj": q_b, "kv_b_proj": "none"}
    )
    deployment = Deployment(
        role="decode", soc=chip, cann=CANN, host="sglang", requests=[f"path={request}"]
    )
    return backend.plan([layer], deployment).layers[0]


def test_the_table_has_each_combination_once():
    assert list(TABLE) == KEYS


@pytest.mark.parametrize("key", KEYS, ids=", ".join)
def test_sglang_s_columns_are_its_two_predicates(key):
    merged, released, _, _ = TABLE[key]
    assert merged == as_merged(*key)
    assert released.rstrip("*") == as_released(*key)


@pytest.mark.parametrize("key", KEYS, ids=", ".join)
def test_an_mla_layer_s_own_mlaprolog_is_marked_as_one_that_cannot_run(key):
    _, released, _, _ = TABLE[key]
    assert released.endswith("*") == (key[1] == "MLA" and as_released(*key) == "mlaprolog")


@pytest.mark.parametrize("key", KEYS, ids=", ".join)
def test_the_plan_s_column_is_what_the_planner_gives(backend, key):
    *_, plan, _ = TABLE[key]
    try:
        found = planned(backend, *key, "fused").path[0].strategy
    except SelectionError:
        found = "none"
    assert plan == found


@pytest.mark.parametrize("key", KEYS, ids=", ".join)
def test_each_difference_has_a_reason_and_nothing_else_has(key):
    _, released, plan, why = TABLE[key]
    assert bool(why) == (plan != released.rstrip("*"))
    assert set(why) <= set(CODES)


def test_each_reason_is_used_and_told():
    used = {letter for *_, why in TABLE.values() for letter in why}
    told = set(re.findall(r"^\* \*\*([A-Z])\*\*", DOC.read_text("utf-8"), re.M))
    assert used == told == set(CODES)


@pytest.mark.parametrize("column", [0, 1], ids=["38807", "0.5.23"])
@pytest.mark.parametrize("key", KEYS, ids=", ".join)
def test_sglang_s_path_is_served_on_request_wherever_the_op_allows_it(backend, key, column):
    wanted = TABLE[key][column].rstrip("*")
    why = TABLE[key][3]
    try:
        layer = planned(backend, *key, wanted)
    except SelectionError as error:
        codes = set(re.findall(r"\b(?:quant\.mode|soc\.unsupported)\b", str(error)))
        letters = why or "B"  # the merged table's own difference from the release
        for letter in letters:
            assert CODES[letter] & codes, str(error)
    else:
        assert layer.path[0].strategy == wanted
