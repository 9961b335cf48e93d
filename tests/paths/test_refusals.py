"""Every limit that facts name of an op: a layer that offends it is refused while planning.

Each row is a limit of facts/ops.md with a layer or deployment just outside it, and the reason code.
A planner that is pure prepares and frees nothing: with a request for the refused strategy there is
no plan at all, and without one the plan serves the layer by another strategy.
"""

from __future__ import annotations

import pytest
import torch
from attrs import frozen

from npu_backend import Indexer, KvLayout, Phase, SelectionError
from npu_backend.runtime import LayerCache, bind
from npu_backend.runtime.prove import seeded_weights

BOTH = ("fused_qkv_a_proj", "q_b_proj")
STATIC = {"quant": dict.fromkeys(BOTH, "w8a8-static")}


@frozen
class Row:
    """A limit, and what offends it.

    Args:
        what: The limit, in the words of the facts.
        strategy: The strategy that must be refused.
        code: The reason code.
        layer: Changes of a layer that the strategy takes.
        deployment: Changes of the deployment.
    """

    what: str
    strategy: str
    code: str
    layer: dict
    deployment: dict

    def __str__(self) -> str:
        return f"{self.strategy}: {self.what}"


def prolog(what, code, deployment=None, **layer):
    return Row(what, "mlaprolog", code, layer, deployment or {})


def mlapo(what, code, deployment=None, **layer):
    return Row(what, "mlapo", code, {**STATIC, **layer}, deployment or {})


ROWS = [
    prolog("since line 7.3", "op.missing", {"cann": "8.3.RC1"}),
    prolog("not on 310P", "soc.unsupported", {"soc": "310P"}),
    prolog("A2 documented from 26.1", "soc.undocumented", {"soc": "A2", "cann": "9.0.0"}),
    prolog("heads a power of two", "dims.heads", num_heads=6),
    prolog("at most 128 heads", "dims.heads", num_heads=256),
    prolog("kv_lora_rank 512", "dims.kv_lora_rank", kv_lora_rank=511),
    prolog("rope 64", "dims.qk_rope_head_dim", qk_rope_head_dim=66),
    prolog("hidden 2048 from 26.1", "dims.hidden_size", {"cann": "9.0.0"}),
    prolog("hidden 7424 never", "dims.hidden_size", hidden_size=7424),
    prolog("q_lora_rank 2048 from 26.1", "dims.q_lora_rank", {"cann": "9.0.0"}, q_lora_rank=2048,
           hidden_size=7168),
    prolog("q_lora_rank 1537", "dims.q_lora_rank", q_lora_rank=1537),
    prolog("needs a q_lora_rank", "dims.q_lora_rank", q_lora_rank=None),
    prolog("nope 192 from 26.1", "dims.qk_nope_head_dim", {"cann": "9.0.0"}, qk_nope_head_dim=192,
           hidden_size=7168),
    prolog("nope 64", "dims.qk_nope_head_dim", qk_nope_head_dim=64),
    prolog("block size at least 16", "kv.layout", kv_layout=KvLayout(block_size=15)),
    prolog("block size in steps of 16", "kv.layout", kv_layout=KvLayout(block_size=24)),
    prolog("block size at most 1024", "kv.layout", kv_layout=KvLayout(block_size=1040)),
    prolog("no fp16", "dtype", dtype="float16"),
    prolog("no fp32", "dtype", dtype="float32"),
    prolog("no static int8", "quant.mode", **STATIC),
    prolog("qkv_a int8 beside a float q_b", "quant.mode",
           quant={"fused_qkv_a_proj": "w8a8-dynamic"}),
    prolog("a float layer has a float cache", "kv.layout", kv_layout=KvLayout(dtype="int8")),
    prolog("(1,1,*) is no triple", "kv.layout", quant={"q_b_proj": "w8a8-dynamic"},
           kv_layout=KvLayout(dtype="int8")),
    prolog("(2,2,*) is no triple", "kv.layout", quant=dict.fromkeys(BOTH, "w8a8-dynamic"),
           kv_layout=KvLayout(dtype="int8_channel")),
    prolog("int8 weights pack int8", "kv.layout", {"soc": "A5"},
           quant=dict.fromkeys(BOTH, "w8a8-dynamic"),
           kv_layout=KvLayout(dtype="fp8_packed")),
    prolog("MXFP8 weights pack fp8", "kv.layout", {"soc": "A5"},
           quant=dict.fromkeys(BOTH, "mxfp8"), kv_layout=KvLayout(dtype="int8_packed")),
    prolog("a packed cache is not NZ", "kv.layout", quant=dict.fromkeys(BOTH, "w8a8-dynamic"),
           kv_layout=KvLayout("PA_NZ", dtype="int8_packed")),
    prolog("half layout only", "kv.layout", kv_layout=KvLayout(rope="interleaved")),
    prolog("always rotates", "rope.layout", use_rope=False),
    prolog("bypasses LoRA", "promise.lora", {"promises": ["lora", "local_prefill"]}),
    prolog("one rank's rows", "parallel.context", {"context_parallel_size": 2}),
    mlapo("A2 and A3 only", "soc.unsupported", {"soc": "A5"}),
    mlapo("no op of torch_npu", "op.missing", {"kernels": "none"}),
    mlapo("hidden at least 2048", "dims.hidden_size", hidden_size=2047),
    mlapo("hidden at most 8192", "dims.hidden_size", hidden_size=8193),
    mlapo("q_lora_rank 1536", "dims.q_lora_rank", q_lora_rank=2048),
    mlapo("nope 128", "dims.qk_nope_head_dim", qk_nope_head_dim=192),
    mlapo("kv_lora_rank 512", "dims.kv_lora_rank", kv_lora_rank=256),
    mlapo("rope 64", "dims.qk_rope_head_dim", qk_rope_head_dim=32),
    mlapo("static int8 only", "quant.mode", quant=dict.fromkeys(BOTH, "w8a8-dynamic")),
    mlapo("float layers not", "quant.mode", quant={}),
    mlapo("with offset and bias", "quant.layout",
          quant=dict.fromkeys(BOTH, "w8a8-static-symmetric")),
    mlapo("block size 129", "kv.layout", kv_layout=KvLayout(block_size=129)),
    mlapo("block size 257", "kv.layout", kv_layout=KvLayout(block_size=257)),
    mlapo("NZ needs block size 128", "kv.layout", kv_layout=KvLayout("PA_NZ", block_size=64)),
    mlapo("writes no packed cache", "kv.layout", kv_layout=KvLayout(dtype="int8_packed")),
    mlapo("always rotates", "rope.layout", use_rope=False),
    mlapo("its own epsilon", "model.numerics", rms_norm_eps=1e-5),
    mlapo("bypasses LoRA", "promise.lora", {"promises": ["lora", "local_prefill"]}),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_offending_layer_is_refused_with_its_reason(make_layer, plan_layer, row):
    plan = plan_layer(make_layer(**row.layer), **row.deployment)
    refused = {
        r.code
        for d in plan.declined
        if d.strategy == row.strategy and d.site is None
        for r in d.reasons
    }
    assert row.code in refused
    assert [e.strategy for e in plan.path] == ["absorb"]
    with pytest.raises(SelectionError, match=row.code):
        plan_layer(make_layer(**row.layer), **row.deployment, requests=[f"path={row.strategy}"])


@pytest.mark.parametrize("kind", ["mxfp8", "fp8", "hif8"])
def test_8_bit_floats_are_of_a5_for_every_path(make_layer, plan_layer, kind):
    """No path is left: absorb's linears ask the same formats of the chip."""
    with pytest.raises(SelectionError) as caught:
        plan_layer(make_layer(quant=dict.fromkeys(BOTH, kind)))
    for strategy in ("mlaprolog", "absorb"):
        told = [why for why in caught.value.why if why.startswith(f"{strategy}, ")]
        assert any("quant.mode" in why and "A3" in why for why in told)


@pytest.mark.parametrize("strategy", ["mlaprolog", "mlapo"])
def test_the_layer_that_each_row_spoils_is_taken(make_layer, plan_layer, strategy):
    layer = make_layer(**(STATIC if strategy == "mlapo" else {}))
    plan = plan_layer(layer, requests=[f"path={strategy}"])
    assert strategy in [e.strategy for e in plan.path]


@pytest.mark.parametrize(("rows", "who"), [(1023, "mlapo"), (1024, "mlapo"), (1025, "absorb")])
def test_mlapo_takes_1024_rows_and_not_one_more(make_layer, plan_layer, rows, who):
    plan = plan_layer(make_layer(**STATIC), requests=["path=mlapo"])
    entry = next(
        e
        for e in plan.path
        if Phase.DECODE in e.phases and e.tokens[0] <= rows <= (e.tokens[1] or rows)
    )
    assert entry.strategy == who


@pytest.mark.parametrize("strategy", ["mlaprolog", "mlapo"])
def test_no_fused_path_serves_extend(make_layer, plan_layer, strategy):
    layer = make_layer(**(STATIC if strategy == "mlapo" else {}))
    plan = plan_layer(layer, role="null", promises=[], requests=[f"path={strategy}"])
    assert [e.strategy for e in plan.path if Phase.EXTEND in e.phases] == ["absorb"]


def test_a_mode_without_dtype_is_planned_and_refused_before_anything_is_prepared(
    make_layer, plan_layer
):
    """hif8: the op's mode 5. torch has no such dtype, so nothing can be executed, or freed."""
    layer = make_layer(quant=dict.fromkeys(BOTH, "hif8"), indexer=Indexer("own"))
    plan = plan_layer(layer, soc="A5", promises=[], phases="decode", requests=["path=mlaprolog"])
    assert plan.path[0].offer.mode == "weight_quant_mode=5"
    made = seeded_weights(make_layer(), 1)
    loaded = dict(made.loaded)
    for name in BOTH:
        loaded[name] = loaded[name].to(dtype=torch.uint8)
        loaded[f"{name}.scale"] = torch.zeros(len(loaded[name]))
    bound = bind(plan, {**loaded, **made.gammas}, LayerCache.allocate(layer, 1))
    with pytest.raises(Exception, match="weight_quant_mode 5 is not executed yet"):
        bound.prepare()
    with pytest.raises(Exception, match="prepare"):
        bound.release()
    assert bound.released == ()
