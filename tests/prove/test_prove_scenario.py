"""Scenarios cover every phase and boundary, and no two tokens share a slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_backend import Indexer, KvLayout, Phase
from npu_backend.runtime.prove.scenario import make_scenario
from npu_backend.runtime.prove.writer import in_rope_layout, poison_slots, read_slots, write_slots
from npu_backend.runtime.reference.caches import write_rows


class Split:
    def prepare(self, weights):
        return None

    def bind(self, prepared, cache):
        raise AssertionError("never bound here")


def rows_by_phase(scenario):
    found = {}
    for step in scenario.steps:
        found.setdefault(step.phase, []).append(step.rows)
    return found


def test_every_reachable_phase_runs_with_every_row_count(tiny, plan_of):
    plan = plan_of(tiny(), role="decode").layers[0]
    found = rows_by_phase(make_scenario(plan, rows=(1, 5)))
    assert found == {p: [1, 5] for p in (Phase.DECODE, Phase.TARGET_VERIFY, Phase.IDLE)}


def test_both_sides_of_a_boundary_are_run(tiny, plan_of, plant):
    kernel = plant(Split, reads=["w_vc"], tokens=(1, 7))
    plan = plan_of(tiny(), role="decode", kernels=[kernel]).layers[0]
    assert [(e.strategy, e.tokens) for e in plan.v_up][:2] == [
        ("Split", (1, 7)),
        ("npu_transpose_batchmatmul[1,0,2]", (8, None)),
    ]
    found = rows_by_phase(make_scenario(plan, rows=(2,)))
    assert found[Phase.DECODE] == [1, 2, 7, 8]


def test_a_boundary_over_the_cap_is_named(tiny, plan_of, plant):
    kernel = plant(Split, reads=["w_vc"], tokens=(1, 1024))
    plan = plan_of(tiny(), role="decode", kernels=[kernel]).layers[0]
    scenario = make_scenario(plan, rows=(1,), cap=64)
    assert max(rows_by_phase(scenario)[Phase.DECODE]) == 1
    told = [s for s in scenario.skipped if s.startswith("decode")]
    assert told == [
        "decode with 1024 rows: more than the cap of 64 rows",
        "decode with 1025 rows: more than the cap of 64 rows",
    ]


def test_a_row_bound_of_the_deployment_is_met_and_not_passed(tiny, plan_of):
    plan = plan_of(tiny(), role="decode", max_tokens={"decode": 3}).layers[0]
    assert rows_by_phase(make_scenario(plan, rows=(1, 5)))[Phase.DECODE] == [1, 3]


def test_phases_of_the_host_are_skipped_with_a_reason(tiny, plan_of):
    layer = tiny(indexer=Indexer("none"))
    plan = plan_of(layer, role="null", host="sglang").layers[0]
    scenario = make_scenario(plan, rows=(1,))
    assert "extend: host:mha, the host's own code serves it" in scenario.skipped
    assert Phase.EXTEND not in rows_by_phase(scenario)
    assert not scenario.fill


def test_without_extend_nothing_fills_the_cache_but_the_writer(tiny, plan_of):
    assert not make_scenario(plan_of(tiny(), role="decode").layers[0], rows=(1,)).fill
    filled = make_scenario(plan_of(tiny(), role="null").layers[0], rows=(1,))
    assert sum(s.rows for s in filled.fill) == sum(t.history for t in filled.tracks)


def test_fill_steps_keep_to_the_bound_of_extend(tiny, plan_of):
    plan = plan_of(tiny(), role="null", max_tokens={"extend": 50}).layers[0]
    fill = make_scenario(plan, rows=(1, 60)).fill
    assert {s.rows for s in fill[:-1]} == {50}
    assert fill[-1].rows <= 50


@settings(
    max_examples=40,
    deadline=None,
    # The fixtures only make records.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    block=st.sampled_from([16, 32, 128, 1024]),
    role=st.sampled_from(["decode", "prefill", "null"]),
)
def test_no_two_tokens_share_a_slot(tiny, plan_of, rows, block, role):
    plan = plan_of(tiny(kv_layout=KvLayout(block_size=block)), role=role).layers[0]
    scenario = make_scenario(plan, rows=rows)
    taken = torch.cat(
        [torch.arange(scenario.pad_blocks * block)]
        + [t.slots(0, t.length, block) for t in scenario.tracks]
    )
    assert len(set(taken.tolist())) == len(taken)
    assert taken.numel() == 0 or int(taken.max()) < scenario.num_blocks * block
    for step in (*scenario.fill, *scenario.steps):
        slots = scenario.slots(step)
        assert len(slots) == step.rows == len(scenario.positions(step))
        assert len(set(slots.tolist())) == step.rows
        for part in step.parts:
            assert part.start + part.count <= scenario.tracks[part.track].length
    if role != "prefill":
        decode = [s for s in scenario.steps if s.phase is Phase.DECODE]
        assert decode
        assert all(p.count == 1 for s in decode for p in s.parts)


@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_the_writer_writes_the_reader_reads(mode, dtype):
    layout = KvLayout(mode, block_size=16)
    cache = torch.zeros(3, 16, 1, 64, dtype=dtype)
    rows = torch.randint(-9, 9, (4, 64)).to(dtype)
    slots = torch.tensor([47, 0, 16, 21])
    write_slots(cache, slots, rows, layout)
    assert torch.equal(read_slots(cache, slots, layout), rows)
    others = torch.tensor([s for s in range(48) if s not in slots.tolist()])
    assert not read_slots(cache, others, layout).any()


def test_the_writers_nz_order_is_that_of_the_reference_ops():
    rows, slots = torch.randn(5, 64), torch.tensor([3, 17, 40, 2, 31])
    a, b = torch.zeros(3, 16, 1, 64), torch.zeros(3, 16, 1, 64)
    write_slots(a, slots, rows, KvLayout("PA_NZ", block_size=16))
    write_rows("test", b, rows, slots, nz=True)
    assert torch.equal(a, b)


def test_half_layout_is_evens_then_odds():
    keys = torch.arange(6).float()
    assert in_rope_layout(keys, KvLayout(rope="half")).tolist() == [0, 2, 4, 1, 3, 5]
    assert torch.equal(in_rope_layout(keys, KvLayout(rope="interleaved")), keys)


def test_poisoned_slots_are_nan():
    cache = torch.zeros(1, 16, 1, 32)
    poison_slots(cache, torch.tensor([4]), KvLayout("PA_NZ", block_size=16))
    assert read_slots(cache, torch.tensor([4]), KvLayout("PA_NZ", block_size=16)).isnan().all()
    assert int(cache.isnan().sum()) == 32
