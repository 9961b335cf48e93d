"""Bound layers whose v_up has an entry on each side of 1024 rows, and slots under capture."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from npu_backend import PrepareError

T102 = "npu_transpose_batchmatmul[1,0,2]"
BMT = "batch_matmul_transpose"
ACROSS = (3, 1023, 1024, 1025, 1500, 7, 2, 2048)
"""The first is not the number of heads, 2: the compiler would take the two sizes for one."""


def _layer_with_two_entries(h):
    """batch_matmul_transpose up to 1024 rows, then npu_transpose_batchmatmul."""
    bound = h.bind(h.plan(requests=f"v_up={BMT}"))
    bound.prepare()
    assert [(e.strategy, e.tokens) for e in bound.plan.v_up] == [
        (BMT, (1, 1024)),
        (T102, (1025, None)),
    ]
    return bound


def test_compiled_across_1024_there_is_one_recompile_and_no_graph_break(h):
    bound = _layer_with_two_entries(h)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(bound.v_up, backend=counter, fullgraph=True, dynamic=True)
    for rows in ACROSS:
        x = torch.randn(rows, 2, 32, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), bound.v_up(x))
    assert counter.frame_count == 2


def test_a_first_step_of_as_many_rows_as_heads_needs_its_heads_marked(h):
    """With dynamic=True alone torch takes equal sizes for one symbol and compiles once more."""
    bound = _layer_with_two_entries(h)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(bound.v_up, backend=counter, fullgraph=True, dynamic=True)
    for rows in (2, *ACROSS):
        x = torch.randn(rows, 2, 32, dtype=torch.bfloat16)
        torch._dynamo.mark_static(x, 1)
        assert torch.equal(compiled(x), bound.v_up(x))
    assert counter.frame_count == 2


# --- graph capture -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "op"), [(1024, BMT), (1025, "npu_transpose_batchmatmul")])
def test_a_captured_shape_fixes_the_choice(h, rows, op):
    """A capture records the ops of one run at one shape; nothing of the comparison is in it."""
    bound = _layer_with_two_entries(h)
    traced = make_fx(bound.v_up)(torch.randn(rows, 2, 32, dtype=torch.bfloat16))
    called = [n.target for n in traced.graph.nodes if n.op == "call_function"]
    multiplied = [str(t) for t in called if "matmul" in str(t)]
    assert len(multiplied) == 1
    assert f".{op}." in multiplied[0]


def test_two_plans_of_a_process_do_not_share_a_slot_either(h):
    """The planner settles one plan; a draft model beside it is bound later."""
    wish = {"graph_capture": True, "requests": f"v_up={BMT}", "max_tokens": 64}
    first = h.bind(h.plan(h.layer(), **wish))
    first.prepare()
    same = h.bind(h.plan(h.layer(layer_id=8), **wish))
    same.prepare()
    other = h.bind(h.plan(h.layer(v_head_dim=16), **wish))
    with pytest.raises(PrepareError, match=r"capture\.slot") as caught:
        other.prepare()
    assert "(2, 32, 24) of layer 7, batched matmul v_up" in str(caught.value)
    assert not other.prepared
    del first, same, caught
    other.prepare()


def test_without_capture_two_shapes_may_use_the_op(h):
    wish = {"requests": f"v_up={BMT}", "max_tokens": 64}
    kept = [h.bind(h.plan(h.layer(v_head_dim=v), **wish)) for v in (16, 24)]
    for layer in kept:
        layer.prepare()
