"""Shards are parts of the full weight, all of it; and what is refused without a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_backend import AttnTpOptions, MlpLayer, MlpParallel, PlanMismatchError, mlp_shard_layout
from npu_backend.runtime import ShardedMlp, assemble_mlp, shard_mlp

torch = pytest.importorskip("torch")


def layouts(size, hidden=4, local=3, kind="dense"):
    layer = MlpLayer(
        layer_id=0, kind=kind, hidden_size=hidden, intermediate_size=size * local, dtype="float32"
    )
    return [
        mlp_shard_layout(layer, AttnTpOptions(), MlpParallel(tp_size=size, rank=rank))
        for rank in range(size)
    ]


def weights(hidden, inner, dtype=None):
    dtype = dtype or torch.float32
    count = torch.arange(hidden * inner, dtype=torch.float64)
    return {
        "gate_proj": count.reshape(inner, hidden).to(dtype),
        "up_proj": (count + 0.5).reshape(inner, hidden).to(dtype),
        "down_proj": (count + 0.25).reshape(hidden, inner).to(dtype),
    }


@given(
    size=st.integers(1, 8),
    hidden=st.integers(1, 6),
    local=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    fused=st.booleans(),
)
def test_shards_always_reassemble_to_the_full_weight(size, hidden, local, dtype, fused):
    full = weights(hidden, size * local, dtype)
    given_ = dict(full)
    if fused:
        given_["gate_up_proj"] = torch.cat([given_.pop("gate_proj"), given_.pop("up_proj")])
    shards = [shard_mlp(given_, layout) for layout in layouts(size, hidden, local)]
    for shard in shards:
        assert shard["gate_proj"].shape == shard["up_proj"].shape == (local, hidden)
        assert shard["down_proj"].shape == (hidden, local)
    again = assemble_mlp(shards)
    assert list(again) == ["gate_proj", "up_proj", "down_proj"]
    for name, weight in full.items():
        assert torch.equal(again[name], weight)


def test_the_rows_of_gate_and_the_columns_of_down_are_the_rank_s():
    shard = shard_mlp(weights(2, 6), layouts(3, 2, 2)[1])
    assert shard["gate_proj"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert shard["down_proj"].tolist() == [[2.25, 3.25], [8.25, 9.25]]


def test_shards_hold_their_own_storage_so_that_the_full_weight_can_go():
    full = weights(4, 12)
    shard = shard_mlp(full, layouts(4)[1])
    for name in full:
        assert shard[name].untyped_storage().nbytes() == 4 * 3 * 4
        assert shard[name].is_contiguous()
    whole = shard_mlp(full, layouts(1, local=12)[0])
    assert whole["gate_proj"] is full["gate_proj"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: w.pop("up_proj"), "up_proj is missing"),
        (lambda w: w.update(bias=torch.zeros(1)), "bias is not a weight of a gated MLP"),
        (lambda w: w.update(gate_proj=torch.zeros(11, 4)), r"gate_proj is \[11, 4\]"),
        (lambda w: w.update(down_proj=torch.zeros(12, 4)), r"down_proj is \[12, 4\]"),
        (lambda w: w.update(gate_up_proj=torch.zeros(24, 4)), "gate_up_proj is not a weight"),
    ],
)
def test_weights_of_another_form_are_refused(change, words):
    full = weights(4, 12)
    change(full)
    with pytest.raises(PlanMismatchError, match=words):
        shard_mlp(full, layouts(4)[0])


def test_a_shard_where_the_full_weight_belongs_is_refused():
    shard = shard_mlp(weights(4, 12), layouts(4)[0])
    with pytest.raises(PlanMismatchError, match=r"expected is \[12, 4\]"):
        shard_mlp(shard, layouts(4)[0])


def test_a_group_is_needed_where_the_layout_has_one():
    with pytest.raises(PlanMismatchError, match="none is given"):
        ShardedMlp.from_full(layouts(4)[0], weights(4, 12))


def test_quantized_weights_are_not_multiplied():
    with pytest.raises(PlanMismatchError, match="float weights of one dtype"):
        ShardedMlp(layouts(1, local=12)[0], weights(4, 12, torch.int8))


def test_the_whole_mlp_needs_no_group_and_no_gradient():
    layer_layout = layouts(1, hidden=4, local=6)[0]
    full = {name: w / 10 for name, w in weights(4, 6).items()}
    module = ShardedMlp.from_full(layer_layout, full)
    rows = torch.linspace(-1, 1, 12).reshape(3, 4)
    gate, up = rows @ full["gate_proj"].T, rows @ full["up_proj"].T
    expected = (gate / (1 + torch.exp(-gate)) * up) @ full["down_proj"].T
    torch.testing.assert_close(module(rows), expected, rtol=1e-5, atol=1e-5)
    assert not any(p.requires_grad for p in module.parameters())
    assert module(rows[:0]).shape == (0, 4)
    assert "tp, rank 0 of 1, none, 6 of 6" in repr(module)
    relu = ShardedMlp.from_full(layer_layout, full, activation=torch.relu)
    torch.testing.assert_close(relu(rows), (torch.relu(gate) * up) @ full["down_proj"].T)


@pytest.mark.parametrize(
    "rows, words",
    [
        (torch.zeros(3, 5), r"\[3, 5\], expected is \[rows, 4\]"),
        (torch.zeros(4), "expected is"),
        (torch.zeros(3, 4, dtype=torch.bfloat16), "torch.bfloat16"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, words):
    module = ShardedMlp.from_full(layouts(1, local=12)[0], weights(4, 12))
    with pytest.raises(PlanMismatchError, match=words):
        module(rows)
