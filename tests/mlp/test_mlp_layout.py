"""The truth tables of dense MLPs and shared experts, row by row, and what holds for all layouts.

Expected values are those of the options' tables as SGLang 0.5.23 has them (``models/kimi_k3.py``),
written out; Kimi-K3's sizes: hidden 7168, dense 33792, shared 2 x 3072.
"""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_backend import (
    AttnTpOptions,
    DeploymentError,
    MlpLayer,
    MlpParallel,
    mlp_shard_layout,
)
from npu_backend.mlp import EP_BACKENDS

DENSE = MlpLayer(layer_id=0, kind="dense", hidden_size=7168, intermediate_size=33792)
SHARED = MlpLayer(layer_id=1, kind="shared_experts", hidden_size=7168, intermediate_size=6144)

REDUCE, GATHER, NONE = "all-reduce", "all-gather + reduce-scatter", "none"


def k3(ep=None, dp=False, tp=64, attn_tp=16, rank=0):
    return MlpParallel(tp_size=tp, attn_tp_size=attn_tp, dp_attention=dp, ep_backend=ep, rank=rank)


def layout(layer, parallel, **options):
    return mlp_shard_layout(layer, AttnTpOptions(**options), parallel)


def facts(found):
    return (found.group, found.size, found.rank, str(found.communication))


# --- dense ---------------------------------------------------------------------------------------

DENSE_ROWS = [
    # flag, DP attention, rank -> group, size, rank in it, communication, local size, bytes
    (False, False, 37, ("tp", 64, 37, REDUCE), 528, 22_708_224),
    (False, True, 37, ("tp", 64, 37, REDUCE), 528, 22_708_224),
    (True, False, 37, ("tp", 64, 37, REDUCE), 528, 22_708_224),
    (True, True, 37, ("attn_tp", 16, 5, REDUCE), 2112, 90_832_896),
]


@pytest.mark.parametrize("ep", [None, "ascend_fuseep"])
@pytest.mark.parametrize("flag, dp, rank, expected, local, size", DENSE_ROWS)
def test_dense_table(flag, dp, rank, expected, local, size, ep):
    found = layout(DENSE, k3(ep, dp, rank=rank), enable_dense_mlp_attn_tp=flag)
    assert facts(found) == expected
    assert found.local_intermediate_size == local
    assert found.bytes_per_rank == size


def test_a_dense_mlp_in_attention_tp_stays_inside_its_replica():
    found = layout(DENSE, k3(dp=True, rank=37), enable_dense_mlp_attn_tp=True)
    assert list(found.ranks) == list(range(32, 48))
    assert found.rows == "same"


def test_the_shared_options_say_nothing_of_a_dense_mlp():
    options = {"enable_shared_experts_attn_tp": True, "shared_experts_tp_size": 4}
    assert facts(layout(DENSE, k3("deepep", True), **options)) == ("tp", 64, 0, REDUCE)


# --- shared experts ------------------------------------------------------------------------------

SHARED_ROWS = [
    # EP, size, flag, attention TP, rank -> group, size, rank in it, communication, local, bytes
    # off | None | any
    (None, None, False, 16, 37, ("tp", 64, 37, REDUCE), 96, 4_128_768),
    (None, None, True, 16, 37, ("tp", 64, 37, REDUCE), 96, 4_128_768),
    # on | None | off, or attention TP 1
    ("ascend_fuseep", None, False, 16, 37, ("replicated", 1, 0, NONE), 6144, 264_241_152),
    ("ascend_fuseep", None, True, 1, 37, ("replicated", 1, 0, NONE), 6144, 264_241_152),
    ("ascend_fuseep", None, False, 1, 37, ("replicated", 1, 0, NONE), 6144, 264_241_152),
    # on | None | on, attention TP above 1
    ("ascend_fuseep", None, True, 16, 37, ("attn_tp", 16, 5, GATHER), 384, 16_515_072),
    ("ascend_fuseep", None, True, 2, 37, ("attn_tp", 2, 1, GATHER), 3072, 132_120_576),
    # on | 1 | any
    ("ascend_fuseep", 1, False, 16, 37, ("replicated", 1, 0, NONE), 6144, 264_241_152),
    ("ascend_fuseep", 1, True, 16, 37, ("replicated", 1, 0, NONE), 6144, 264_241_152),
    # on | s > 1 | any
    ("ascend_fuseep", 4, False, 16, 37, ("shared_experts_tp", 4, 1, GATHER), 1536, 66_060_288),
    ("ascend_fuseep", 4, True, 16, 37, ("shared_experts_tp", 4, 1, GATHER), 1536, 66_060_288),
    ("ascend_fuseep", 16, False, 16, 37, ("shared_experts_tp", 16, 5, GATHER), 384, 16_515_072),
]


@pytest.mark.parametrize("dp", [False, True])
@pytest.mark.parametrize("ep, s, flag, attn_tp, rank, expected, local, size", SHARED_ROWS)
def test_shared_experts_table(ep, s, flag, attn_tp, rank, expected, local, size, dp):
    found = layout(
        SHARED,
        k3(ep, dp, attn_tp=attn_tp, rank=rank),
        shared_experts_tp_size=s,
        enable_shared_experts_attn_tp=flag,
    )
    assert facts(found) == expected
    assert found.local_intermediate_size == local
    assert found.bytes_per_rank == size


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("s", [1, 4])
def test_a_size_without_an_ep_backend_is_an_error(s, flag):
    with pytest.raises(DeploymentError, match="needs an EP all-to-all backend") as caught:
        layout(SHARED, k3(), shared_experts_tp_size=s, enable_shared_experts_attn_tp=flag)
    assert caught.value.why[0].startswith("rule size.needs_ep: ")


@pytest.mark.parametrize("ep", EP_BACKENDS)
def test_every_ep_backend_is_one(ep):
    assert ep in ("deepep", "megamoe", "mooncake", "ascend_fuseep", "mori")
    assert len(EP_BACKENDS) == 5
    assert layout(SHARED, k3(ep)).group == "replicated"


@pytest.mark.parametrize("s", [3, 5, 15, 17, 32])
def test_the_size_divides_attention_tp(s):
    with pytest.raises(DeploymentError) as caught:
        layout(SHARED, k3("deepep"), shared_experts_tp_size=s)
    assert caught.value.why[0].startswith("rule size.divides_attn_tp: ")


def test_groups_of_a_size_are_contiguous():
    ranks = [
        list(layout(SHARED, k3("mori", rank=r), shared_experts_tp_size=4).ranks) for r in range(8)
    ]
    assert ranks == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4


def test_the_flag_without_ep_is_inert_and_says_so():
    with_flag = layout(SHARED, k3(), enable_shared_experts_attn_tp=True)
    without = layout(SHARED, k3())
    assert attrs.evolve(with_flag, warnings=()) == without
    assert without.warnings == ()
    (warning,) = with_flag.warnings
    assert warning.startswith("enable_shared_experts_attn_tp does nothing: there is no EP")


def test_the_flag_without_ep_still_wants_a_size_that_divides():
    # What divides over TP divides over attention TP, which is a part of it; so the flag decides
    # which rule is named, and the one of attention TP comes first.
    parallel = k3(tp=8, attn_tp=4)
    fine = attrs.evolve(SHARED, intermediate_size=16)
    assert layout(fine, parallel, enable_shared_experts_attn_tp=True).size == 8
    odd = attrs.evolve(SHARED, intermediate_size=18)
    with pytest.raises(DeploymentError, match="18 does not divide over 4 ranks") as caught:
        layout(odd, parallel, enable_shared_experts_attn_tp=True)
    assert caught.value.why[0].startswith("rule intermediate.divides_attn_tp: ")
    for size in (18, 20):
        layer = attrs.evolve(SHARED, intermediate_size=size)
        with pytest.raises(DeploymentError, match=f"{size} does not divide over 8 ranks") as caught:
            layout(layer, parallel)
        assert caught.value.why[0].startswith("rule intermediate.divides: ")


def test_other_options_that_do_nothing_say_so():
    found = layout(DENSE, k3(), enable_dense_mlp_attn_tp=True)
    assert found.warnings[0].startswith("enable_dense_mlp_attn_tp does nothing: DP attention is")
    found = layout(SHARED, k3("mori", attn_tp=1), enable_shared_experts_attn_tp=True)
    assert found.warnings[0].endswith("does nothing: attention TP is 1")
    both = {"enable_shared_experts_attn_tp": True, "shared_experts_tp_size": 4}
    found = layout(SHARED, k3("mori"), **both)
    assert found.warnings[0].endswith("does nothing: shared_experts_tp_size 4 overrides it")
    assert layout(SHARED, k3("mori"), enable_shared_experts_attn_tp=True).warnings == ()


@pytest.mark.parametrize("local", [1, 3])
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("attn_tp", [2, 16])
def test_the_intermediate_size_divides_by_the_layout_s_size(local, off, attn_tp):
    layer = attrs.evolve(SHARED, intermediate_size=local * attn_tp + off)
    call = lambda: layout(  # noqa: E731
        layer, k3("deepep", attn_tp=attn_tp), enable_shared_experts_attn_tp=True
    )
    if off == 0:
        assert call().local_intermediate_size == local
    else:
        with pytest.raises(DeploymentError) as caught:
            call()
        assert caught.value.why[0].startswith("rule intermediate.divides: ")


def test_rows_that_a_rank_brings():
    assert layout(SHARED, k3()).rows == "same"
    assert layout(SHARED, k3("mori"), shared_experts_tp_size=4).rows == "own, equal number"
    assert layout(SHARED, k3("mori")).rows == "own"


# --- the records ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, rule",
    [
        ({"tp_size": 64, "attn_tp_size": 24}, "attn_tp.divides_tp"),
        ({"tp_size": 16, "attn_tp_size": 32}, "attn_tp.divides_tp"),
        ({"tp_size": -1}, "parallel.size"),
        ({"tp_size": True}, "parallel.size"),
        ({"attn_tp_size": "4"}, "parallel.size"),
        ({"tp_size": 4, "rank": 4}, "parallel.rank"),
        ({"tp_size": 4, "rank": -1}, "parallel.rank"),
        ({"dp_attention": 4}, "parallel.flag"),
        ({"ep_backend": "deep_ep"}, "parallel.ep_backend"),
    ],
)
def test_impossible_parallel_layouts_name_the_rule(arguments, rule):
    with pytest.raises(DeploymentError) as caught:
        MlpParallel(**arguments)
    assert caught.value.why[0].startswith(f"rule {rule}: ")
    assert caught.value.remedy


def test_each_size_defaults_to_the_other():
    assert MlpParallel(tp_size=8).attn_tp_size == 8
    assert MlpParallel(attn_tp_size=8).tp_size == 8
    assert MlpParallel().tp_size == 1
    assert MlpParallel(ep_backend="none").ep_backend is None


def test_an_unknown_backend_gets_a_suggestion():
    with pytest.raises(DeploymentError, match="did you mean 'deepep'"):
        MlpParallel(ep_backend="deep_ep")


def test_records_are_frozen_and_hashable_where_they_are_keys():
    for record in (DENSE, AttnTpOptions(), k3(), layout(DENSE, k3())):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            record.layer = record
    assert len({DENSE, attrs.evolve(DENSE)}) == 1


def test_an_mlp_has_a_kind_and_a_dtype_with_known_bytes():
    with pytest.raises(ValueError, match="kind"):
        MlpLayer(layer_id=0, kind="routed", hidden_size=8, intermediate_size=8)
    with pytest.raises(Exception, match="not a dtype of weights"):
        MlpLayer(layer_id=0, kind="dense", hidden_size=8, intermediate_size=8, dtype="int3")
    with pytest.raises(Exception, match="bytes of the MLP are not known"):
        MlpLayer(
            layer_id=0, kind="dense", hidden_size=8, intermediate_size=8, dtype="int8+bfloat16"
        )


def test_the_layout_is_pure_and_needs_no_torch():
    code = (
        "import os, sys; os.environ.clear(); import npu_backend as n; "
        "p = n.MlpParallel(tp_size=4, attn_tp_size=2, ep_backend='mori'); "
        "m = n.MlpLayer(layer_id=0, kind='dense', hidden_size=8, intermediate_size=8); "
        "os.environ['SGLANG_K3_DENSE_MLP_ATTN_TP'] = '1'; "
        "n.mlp_shard_layout(m, n.AttnTpOptions(), p); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# --- what holds for all --------------------------------------------------------------------------


@st.composite
def cases(draw):
    attn_tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    tp = attn_tp * draw(st.integers(1, 4))
    divisors = [d for d in range(1, attn_tp + 1) if attn_tp % d == 0]
    ep = draw(st.sampled_from([None, "deepep"]))
    size = draw(st.sampled_from([None, *divisors])) if ep else None
    options = AttnTpOptions(
        enable_shared_experts_attn_tp=draw(st.booleans()),
        enable_dense_mlp_attn_tp=draw(st.booleans()),
        shared_experts_tp_size=size,
    )
    layer = MlpLayer(
        layer_id=0,
        kind=draw(st.sampled_from(["dense", "shared_experts"])),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=tp * draw(st.integers(1, 5)),
    )
    dp = draw(st.booleans())
    return layer, options, tp, attn_tp, dp, ep


@given(cases())
def test_ranks_of_a_group_agree_and_their_shards_are_the_whole(case):
    layer, options, tp, attn_tp, dp, ep = case
    found = [
        mlp_shard_layout(layer, options, k3(ep, dp, tp=tp, attn_tp=attn_tp, rank=r))
        for r in range(tp)
    ]
    for rank, mine in enumerate(found):
        assert mine.ranks[mine.rank] == rank
        group = [found[r] for r in mine.ranks]
        assert [g.rank for g in group] == list(range(mine.size))
        assert {attrs.evolve(g, rank=0) for g in group} == {attrs.evolve(mine, rank=0)}
        held = [i for g in group for i in g.columns]
        assert held == list(range(layer.intermediate_size))
        assert sum(g.bytes_per_rank for g in group) == 3 * 2 * layer.hidden_size * len(held)
        # Only full TP leaves the attention-TP replica.
        assert mine.group == "tp" or len({r // attn_tp for r in mine.ranks}) == 1


@given(cases())
def test_a_group_of_one_exchanges_nothing_and_all_others_something(case):
    layer, options, tp, attn_tp, dp, ep = case
    mine = mlp_shard_layout(layer, options, k3(ep, dp, tp=tp, attn_tp=attn_tp))
    assert (mine.size == 1) == (str(mine.communication) == NONE)
