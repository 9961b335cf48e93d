"""A bound layer is one graph, and stays one while the rows stay inside an entry."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from torch._dynamo.testing import CompileCounterWithBackend

from npu_backend import BoundExceededError, KvLayout, Phase
from npu_backend.runtime.prove.seeded import seeded_weights
from npu_backend_builtin import transpose_bmm

BACKENDS = ["eager", "aot_eager"]


def _compiled(h, bound, backend):
    torch._dynamo.reset()

    def step(hidden, positions, slots):
        result = bound.preprocess(hidden, positions, slots, phase=Phase.DECODE)
        return result, bound.v_up(result.q_nope.to(hidden.dtype))

    counter = CompileCounterWithBackend(backend)
    return torch.compile(step, backend=counter, fullgraph=True, dynamic=True), counter, step


def _inputs(layer, rows):
    hidden = torch.randn(rows, layer.hidden_size).to(getattr(torch, layer.dtype))
    return hidden, torch.arange(rows), torch.arange(rows) + 9


def _run(bound, call, inputs):
    bound.cache.k_nope.zero_()
    bound.cache.k_rope.zero_()
    result, out = call(*inputs)
    return [
        t
        for t in (*result, out, bound.cache.k_nope.clone(), bound.cache.k_rope.clone())
        if t is not None
    ]


LAYERS = {
    "absorb, fp32": lambda h: (h.layer(dtype="float32"), {}),
    "absorb, q_proj, no RoPE": lambda h: (h.layer(q_lora_rank=None, use_rope=False), {}),
    "absorb, fused ops": lambda h: (h.layer(kv_lora_rank=512, qk_rope_head_dim=64), {}),
    "mlaprolog": lambda h: (h.fused_layer(), {}),
    "mlapo": lambda h: (
        h.fused_layer(
            hidden_size=2048, quant={"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"}
        ),
        {"requests": "path=mlapo"},
    ),
    "mlaprolog, MXFP8 and fp8 cache": lambda h: (
        h.fused_layer(quant=_both("mxfp8"), kv_layout=KvLayout(dtype="fp8")),
        {"requests": "path=mlaprolog", "soc": "A5"},
    ),
    "mlaprolog, int8 and packed cache": lambda h: (
        h.fused_layer(quant=_both("w8a8-dynamic"), kv_layout=KvLayout(dtype="int8_packed")),
        {"requests": "path=mlaprolog"},
    ),
    "absorb, fp8 and packed cache": lambda h: (
        h.fused_layer(quant=_both("fp8"), kv_layout=KvLayout(dtype="fp8_packed")),
        {"requests": "path=absorb", "soc": "A5"},
    ),
}


def _both(kind):
    return dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), kind)


def _skip_without_e8m0(name):
    if "MXFP8" in name and not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("torch has the dtype of MX scales since 2.7")


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "eager") for name in LAYERS]
    # Functionalization is what aot_eager adds: a layer for each way of writing a cache.
    + [(name, "aot_eager") for name in ("absorb, fp32", "absorb, fused ops", "mlaprolog", "mlapo")]
    + [(name, "aot_eager") for name in LAYERS if "cache" in name],
)
def test_one_full_graph_serves_every_row_count_of_an_entry(h, name, backend):
    _skip_without_e8m0(name)
    layer, deployment = LAYERS[name](h)
    plan = h.plan(layer, **deployment)
    weights = seeded_weights(layer, 1).to(torch.device("cpu")) if "cache" in name else None
    bound = h.bind(plan, weights)
    bound.prepare()
    compiled, counter, step = _compiled(h, bound, backend)
    frames = None
    # 2 is the number of heads, 48 and 64 are widths of weights: equal by chance, not in the graph.
    for rows in (2, 48, 64, 17):
        inputs = _inputs(layer, rows if rows < 50 or layer.hidden_size == 64 else 33)
        expected = _run(bound, step, inputs)
        found = _run(bound, compiled, inputs)
        # Bytes: not every 8-bit dtype can be compared.
        pairs = zip(expected, found, strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        frames = frames or counter.frame_count
        assert counter.frame_count == frames


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["CUSTOM", "EXPLICIT"])
def test_a_kernel_that_writes_into_its_result_or_copies_its_input(h, name, backend):
    wish = getattr(transpose_bmm, name)
    bound = h.bind(h.plan(requests=f"v_up={wish}", max_tokens=64))
    bound.prepare()
    torch._dynamo.reset()
    compiled = torch.compile(bound.v_up, backend=backend, fullgraph=True, dynamic=True)
    for rows in (2, 9):
        x = torch.randn(rows, 2, 32, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), bound.v_up(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_entries_are_two_graphs_and_no_more(h, backend):
    two = h.kernel(h.scaled(2), strategy="two", envelope=h.rows(16))
    bound = h.bind(h.plan(answers=h.BuiltIns(v_up=[two])))
    bound.prepare()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(bound.v_up, backend=counter, fullgraph=True, dynamic=True)
    for rows, graphs in ((4, 1), (16, 1), (17, 2), (40, 2), (3, 2), (2, 2)):
        x = torch.randn(rows, 2, 32, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), bound.v_up(x))
        assert counter.frame_count == graphs


def test_a_broken_bound_is_named_under_compile_too(h):
    bound = h.bind(h.plan(max_tokens=16))
    bound.prepare()
    torch._dynamo.reset()
    compiled = torch.compile(bound.v_up, backend="eager", dynamic=True)
    compiled(torch.randn(8, 2, 32, dtype=torch.bfloat16))
    with pytest.raises(BoundExceededError, match="17 rows"):
        compiled(torch.randn(17, 2, 32, dtype=torch.bfloat16))


def test_steps_before_and_after_a_release_are_equal_under_compile(h):
    bound = h.bind(h.plan(h.fused_layer()))
    bound.prepare()
    compiled, counter, _ = _compiled(h, bound, "aot_eager")
    inputs = _inputs(bound.plan.layer, 5)
    before, frames = _run(bound, compiled, inputs), counter.frame_count
    assert bound.release().agrees
    after = _run(bound, compiled, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    # torch 2.5 compiles once more where a guarded parameter changed.
    again = Version(torch.__version__) < Version("2.6")
    assert counter.frame_count == frames + again
