"""Every matmul of the bundled models is served at every row count, and the op takes each call."""

from __future__ import annotations

import pytest
import torch

from npu_backend import Deployment
from npu_backend.catalog import load_catalog
from npu_backend.catalog.peers import load_peers
from npu_backend.planner import matmul
from npu_backend.runtime.kernel import bind_kernel, matmul_operands
from npu_backend.testing import bmm_sweep
from npu_backend.testing.sim import OpRejectedError

CANNS = ("8.2.RC1", "8.3.RC1", "8.5.0", "9.0.0", "9.1.0", "9.2.0")
SOCS = ("A2", "A3", "A5", "310P", "910", "310B")
# facts/models.json: (heads, qk_nope_head_dim, v_head_dim, whether it has an indexer); rank 512.
MODELS = {
    "deepseek-v3": (128, 128, 128, False),
    "deepseek-v3.2": (128, 128, 128, True),
    "glm-5.2": (64, 192, 256, True),
    "glm-5.3-flash": (64, 256, 256, True),
    "glm-4.7-flash": (20, 192, 256, False),
    "kimi-k2": (64, 128, 128, False),
    "kimi-k3": (96, 128, 128, False),
    "kimi-linear": (32, 128, 128, False),
    "longcat-flash": (64, 128, 128, False),
    "deepseek-v2-lite": (16, 128, 128, False),
}


def test_the_cases_are_every_shape_of_every_model_and_tp_size():
    """The sweep's inputs, from the models' own figures."""
    catalog = load_catalog()
    assert set(catalog.models) == set(MODELS)
    wanted = {
        (heads // tp, nope, v, dsa)
        for heads, nope, v, dsa in MODELS.values()
        for tp in range(1, 65)
        if heads % tp == 0
    }
    one_place = list(bmm_sweep.cases(catalog, canns=["9.0.0"], socs=["A3"]))
    found = {
        (
            c.layer.local_heads(c.attn_tp_size),
            c.layer.qk_nope_head_dim,
            c.layer.v_head_dim,
            c.attention == "dsa",
        )
        for c in one_place
    }
    assert found == wanted
    assert {c.layer.dtype for c in one_place} == {"bfloat16", "float16", "float32"}
    everywhere = bmm_sweep.cases(catalog, tp_sizes=[1])
    assert {(c.cann, c.soc) for c in everywhere} == {(c, s) for c in CANNS for s in SOCS}
    assert bmm_sweep.ROWS == (1, 1024, 1025, 65535, 65536, 200000)


@pytest.mark.parametrize("cann", CANNS)
def test_every_row_count_is_served_and_every_dispatch_accepted(cann, capsys):
    """Beside it, what SGLang and vLLM-Ascend choose for the same inputs, and how much the op
    would reject of that."""
    chosen = list(bmm_sweep.cases(load_catalog(), canns=[cann]))
    result = bmm_sweep.sweep(chosen)
    with capsys.disabled():
        print(f"\nCANN {cann}: {bmm_sweep.report(result)}")
    assert result.cases == len(chosen) > 1000
    assert result.total == result.cases * 2 * len(bmm_sweep.ROWS)
    rejected = {key: found[1] for key, found in result.peers.items()}
    # 65536 rows and more go to an op that takes 1024, on every version.
    assert rejected["sglang 0.5.23", "mla", "v_up", "A3"] > 0
    # 128 heads are over B x K < 65536, which CANN 9.1 lifts.
    unguarded = rejected["vllm-ascend 182b75ea (August 2026)", "mla", "v_up", "A3"]
    assert (unguarded > 0) is (cann not in ("9.1.0", "9.2.0"))
    assert rejected["vllm-ascend 0.26", "dsa", "v_up", "A3"] == 0


def test_a_sweep_fails_where_a_table_names_a_kernel_that_the_op_refuses(monkeypatch):
    """The sweep can fail: with the limit lifted in the plan alone, the validator refuses."""
    import json

    from npu_backend.api import Backend, load

    loaded = load(third_party=False)
    lifted = json.loads(json.dumps(loaded.catalog.limits))
    lifted["npu_transpose_batchmatmul"]["bk_below"] = {"value": None, "source": "wrong"}
    from attrs import evolve

    wrong = Backend(loaded.registry, evolve(loaded.catalog, limits=lifted, version="wrong"))
    one = [
        c
        for c in bmm_sweep.cases(wrong.catalog, canns=["9.0.0"], socs=["A3"], tp_sizes=[1])
        if c.model == "deepseek-v3"
    ]
    with pytest.raises(OpRejectedError, match="65536"):
        bmm_sweep.sweep(one, wrong)


# --- what the engines choose, against what their code is known to say ----------------------------

SHAPE = {"B": 64, "K": 512, "N": 128}


def _choice(title, **said):
    (peer,) = [p for p in load_peers() if p.title == title]
    told = {"attention": "mla", "site": "v_up", "tokens": 1, "soc": "A3", "phase": "decode"}
    return peer.choice(**{**SHAPE, **told, **said})


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ({}, "npu_transpose_batchmatmul[1,0,2]"),
        ({"tokens": 65535}, "npu_transpose_batchmatmul[1,0,2]"),
        ({"tokens": 65536}, "batch_matmul_transpose"),
        ({"B": 127}, "npu_transpose_batchmatmul[1,0,2]"),
        ({"B": 128}, "batch_matmul_transpose"),
        ({"N": 65535}, "npu_transpose_batchmatmul[1,0,2]"),
        ({"N": 65536}, "batch_matmul_transpose"),
        ({"site": "q_absorb"}, "torch.bmm"),
        ({"attention": "dsa", "B": 128}, "batch_matmul_transpose"),
        ({"attention": "dsa", "phase": "extend"}, "npu_transpose_batchmatmul[1,0,2]"),
        ({"attention": "dsa", "soc": "A5"}, "npu_transpose_batchmatmul[1,0,2]"),
        ({"attention": "dsa", "site": "q_absorb"}, "npu_transpose_batchmatmul[1,0,2]"),
    ],
)
def test_sglang_falls_back_at_65536_in_one_of_four_places(said, chosen):
    assert _choice("sglang 0.5.23", **said) == chosen


@pytest.mark.parametrize(
    ("version", "said", "chosen"),
    [
        ("182b75ea (August 2026)", {"B": 128, "tokens": 70000}, "npu_transpose_batchmatmul[1,0,2]"),
        ("182b75ea (August 2026)", {"site": "q_absorb"}, "torch.bmm"),
        (
            "182b75ea (August 2026)",
            {"attention": "dsa", "tokens": 1024},
            "batch_matmul_transpose",
        ),
        (
            "182b75ea (August 2026)",
            {"attention": "dsa", "tokens": 1025, "B": 128},
            "npu_transpose_batchmatmul[1,0,2]",
        ),
        ("0.26", {"attention": "dsa", "B": 127}, "npu_transpose_batchmatmul[1,0,2]"),
        ("0.26", {"attention": "dsa", "B": 128}, "npu_transpose_batchmatmul[0,1,2]"),
        ("0.26", {}, None),
    ],
)
def test_vllm_ascend_guards_by_version(version, said, chosen):
    assert _choice(f"vllm-ascend {version}", **said) == chosen


# --- numerics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 1024, 1025])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("site", "K", "N"), [("v_up", 512, 128), ("v_up", 512, 256), ("q_absorb", 192, 512)]
)
def test_every_legal_kernel_multiplies_as_fp32_does(backend, site, K, N, dtype, rows):
    """Two heads; against a product in fp64 from the same operands."""
    spec = matmul(site, 2, K, N, dtype=dtype)
    plan = backend.plan_bmm(spec, Deployment(soc="A3", cann="9.0.0"))
    x, weight = matmul_operands(spec, rows, generator=torch.Generator().manual_seed(rows))
    expected = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    # One rounding of the result: half a unit in the last place of the largest value.
    bound = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-5}[dtype]
    seen = 0
    for candidate in plan.candidates:
        if rows <= (candidate.offer.envelope.tokens[1] or rows):
            kernel = bind_kernel(candidate.offer, candidate.plugin, spec, plan.deployment, weight)
            out = kernel(x)
            assert out.shape == (rows, 2, N)
            assert out.is_contiguous()
            error = (out.double() - expected).abs().max() / expected.abs().max()
            assert error <= bound, (candidate.strategy, float(error))
            seen += 1
    assert seen == 3 + (dtype != "float32" and rows <= 1024)
