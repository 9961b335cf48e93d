"""The line that a rank logs is the one that ``npu-backend plan`` ends with."""

from __future__ import annotations

import pytest

import npu_backend
from npu_backend import Deployment, Phase
from npu_backend.cli import main
from npu_backend.hosts.sglang.log import cli_options, paths_by_layers, plan_line

CASES = [
    # model, how it is read, deployment
    ("deepseek-v3", {}, {"role": "decode", "requests": ["path=fused"]}),
    ("deepseek-v3", {"rope_layout": "interleaved"}, {"requests": ["path=absorb"]}),
    (
        "glm-5.2",
        {"layers": [0, 1, 2, 40], "block_size": 64, "cache_mode": "PA_NZ"},
        {
            "role": "decode",
            "tp_size": 16,
            "attn_tp_size": 4,
            "soc": "Ascend910_9391",
            "cann": "9.1.0",
            "torch_npu": "2.9.0.post6",
            "kernels": "sgl-kernel-npu==2026.2.1",
            "max_tokens": {Phase.DECODE: 48, Phase.IDLE: 96},
            "requests": ["path=fused", "v_up=torch.bmm"],
            "graph_capture": True,
        },
    ),
    (
        "deepseek-v3.2",
        {"layers": [0, 61]},
        {
            "role": "decode",
            "promises": ["role_switch", "weight_update"],
            "restore": True,
            "requests": ["path=fused", "path=fused@nextn"],
        },
    ),
    (
        "kimi-k2",
        {"layers": [0], "dtype": "float16"},
        {"role": "prefill", "batch_invariant": True, "max_tokens": {Phase.EXTEND: 8192}},
    ),
]


@pytest.mark.parametrize(("model", "read", "deployment"), CASES, ids=[c[0] for c in CASES])
def test_the_logged_command_gives_the_logged_line(backend, capsys, model, read, deployment):
    layers = npu_backend.read_model(model, host="sglang", **read)
    plan = backend.plan(layers, Deployment(host="sglang", **deployment))
    assert main(["plan", model, *cli_options(plan), "--no-third-party"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"SGLang logs: {plan_line(plan)}"


def test_other_hosts_have_no_such_line(capsys):
    assert main(["plan", "deepseek-v3", "--no-third-party", "--layers", "0"]) == 0
    assert "SGLang logs" not in capsys.readouterr().out


def test_layers_that_agree_are_told_once(backend):
    layers = npu_backend.read_model("glm-5.2", host="sglang")
    plan = backend.plan(layers, Deployment(role="decode", host="sglang"))
    told = paths_by_layers(plan.layers)
    assert told.startswith("layers 0-77: mlaprolog in decode,target_verify,idle")
    assert "| layers 78: mlaprolog in decode,draft_extend,idle" in told
    assert told.count("layers ") == 2


def test_row_ranges_are_told_where_there_are_any(backend):
    layers = npu_backend.read_model("kimi-k2", quant="w8a8-static", layers=[0], host="sglang")
    deployment = Deployment(role="decode", host="sglang", requests=["path=fused"])
    plan = backend.plan(layers, deployment)
    # mla_preprocess takes 1024 rows; what is above goes by absorb.
    assert paths_by_layers(plan.layers) == (
        "layers 0: mlapo in decode,target_verify,idle rows 1..1024; "
        "absorb in decode,target_verify,idle rows 1025.."
    )


def test_the_line_counts_bytes_and_ends_with_the_fingerprint(backend):
    layers = npu_backend.read_model("deepseek-v3", layers=[0], host="sglang")
    kept = backend.plan(layers, Deployment(role="decode", host="sglang", requests=["path=fused"]))
    line = plan_line(kept)
    assert f"freed {kept.totals.release} bytes; fingerprint {kept.fingerprint}" in line
    deployment = Deployment(
        role="decode",
        host="sglang",
        promises=["weight_update"],
        restore=True,
        requests=["path=fused"],
    )
    back = backend.plan(layers, deployment)
    assert f"freed 0 (+{back.totals.restore} restorable) bytes" in plan_line(back)
