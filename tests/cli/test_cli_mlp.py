"""``plan`` with the attention-TP options: layouts, bytes, agreement, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

K3 = ("kimi-k3", "--layers", "3")
PARALLEL = ("--parallel", "tp=64,attn_tp=16,dp_attention=on,ep=ascend_fuseep")
BOTH = ("--enable-shared-experts-attn-tp", "--enable-dense-mlp-attn-tp")


def plan(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "npu_backend", "plan", *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def plan_json(*args: str) -> dict:
    return json.loads(plan(*args, "--json").stdout)


def test_the_layouts_of_kimi_k3_stand_in_the_json():
    mlp = plan_json(*K3, *PARALLEL, *BOTH)["mlp"]
    assert mlp == {
        "options": {
            "enable_shared_experts_attn_tp": True,
            "enable_dense_mlp_attn_tp": True,
            "shared_experts_tp_size": None,
        },
        "parallel": {
            "tp_size": 64,
            "attn_tp_size": 16,
            "dp_attention": True,
            "ep_backend": "ascend_fuseep",
        },
        "layouts": [
            {
                "layer_ids": [0],
                "is_nextn": False,
                "kind": "dense",
                "hidden_size": 7168,
                "intermediate_size": 33792,
                "dtype": "bfloat16",
                "group": "attn_tp",
                "size": 16,
                "communication": "all-reduce",
                "rows": "same",
                "local_intermediate_size": 2112,
                "bytes_per_rank": 90_832_896,
                "bytes_saved": 22_708_224 - 90_832_896,
            },
            {
                "layer_ids": list(range(1, 93)),
                "is_nextn": False,
                "kind": "shared_experts",
                "hidden_size": 7168,
                "intermediate_size": 6144,
                "dtype": "bfloat16",
                "group": "attn_tp",
                "size": 16,
                "communication": "all-gather + reduce-scatter",
                "rows": "own, equal number",
                "local_intermediate_size": 384,
                "bytes_per_rank": 16_515_072,
                "bytes_saved": 264_241_152 - 16_515_072,
            },
        ],
        "totals": {
            "bytes_per_rank": 90_832_896 + 92 * 16_515_072,
            "bytes_saved": 92 * 247_726_080 - 68_124_672,
        },
        "warnings": [],
        "assumed": [
            "no safetensors headers: dtypes and bytes of MLPs follow from the sizes, not quantized"
        ],
    }


def test_parallel_alone_shows_the_layouts_without_options():
    mlp = plan_json(*K3, *PARALLEL)["mlp"]
    assert [(row["group"], row["size"], row["bytes_saved"]) for row in mlp["layouts"]] == [
        ("tp", 64, 0),
        ("replicated", 1, 0),
    ]


def test_a_plan_that_asks_for_nothing_has_the_bytes_it_always_had():
    sizes = ("--tp-size", "64", "--attn-tp-size", "16")
    without = plan_json(*K3, *sizes)
    with_layouts = plan_json(*K3, *PARALLEL)
    assert "mlp" not in without
    assert list(without) == [
        "schema", "model", "deployment", "fingerprint", "plugins", "layers", "totals", "warnings",
    ]  # fmt: skip
    assert without["fingerprint"] != with_layouts["fingerprint"]
    for key in ("schema", "model", "deployment", "plugins", "layers", "totals"):
        assert without[key] == with_layouts[key]


def test_the_fingerprint_follows_the_layouts():
    prints = {
        name: plan_json(*K3, *PARALLEL, *options)["fingerprint"]
        for name, options in {
            "none": (),
            "off": ("--no-enable-dense-mlp-attn-tp",),
            "both": BOTH,
            "size": ("--shared-experts-tp-size", "4"),
        }.items()
    }
    assert prints["none"] == prints["off"]
    assert len(set(prints.values())) == 3


def test_the_options_take_their_sizes_from_the_deployment():
    data = plan_json(*K3, "--attn-tp-size", "8", "--enable-dense-mlp-attn-tp")
    assert data["mlp"]["parallel"]["tp_size"] == data["deployment"]["tp_size"] == 8
    agreeing = plan_json(*K3, "--tp-size", "64", *PARALLEL)
    assert agreeing["deployment"]["attn_tp_size"] == 16


def test_people_read_groups_communication_and_bytes():
    text = plan(*K3, *PARALLEL, "--shared-experts-tp-size", "4").stdout
    for word in (
        "MLP layouts: TP 64, attention TP 16, DP attention on, EP all-to-all ascend_fuseep",
        "options: shared_experts_tp_size=4",
        "shared_experts_tp (4)  1536 of 6144",
        "66060288 B x 92",
    ):
        assert word in text, word


def test_an_option_that_does_nothing_warns_on_stderr_also_under_json():
    done = plan(*K3, "--parallel", "tp=64,attn_tp=16", *BOTH, "--json")
    assert "warning: enable_shared_experts_attn_tp does nothing: there is no EP" in done.stderr
    assert "warning: enable_dense_mlp_attn_tp does nothing: DP attention is off" in done.stderr
    assert len(json.loads(done.stdout)["mlp"]["warnings"]) == 2
    done = plan("kimi-linear", "--layers", "3", *PARALLEL[:1], "ep=mori", *BOTH[:1])
    assert "no shared experts are known of the model" in done.stderr


@pytest.mark.parametrize(
    "options, rule, words",
    [
        (("--shared-experts-tp-size", "4"), "size.needs_ep", "there is no EP all-to-all"),
        (("--parallel", "tp=64,attn_tp=24"), "attn_tp.divides_tp", "does not divide TP 64"),
        (("--parallel", "ep=deep_ep"), "parallel.ep_backend", "did you mean 'deepep'"),
        (("--parallel", "dp_attention=4"), "parallel.flag", "'4'"),
        (("--parallel", "tp=0"), "parallel.size", "tp is '0'"),
        (("--parallel", "tp=99999999999"), "parallel.size", "tp is"),
        (("--parallel", "attn=4"), "parallel.text", "did you mean 'attn_tp'"),
        (("--parallel", "tp"), "parallel.text", "'tp' is not KEY=VALUE"),
        (("--parallel", ""), "parallel.text", "is not KEY=VALUE"),
        (("--parallel", "tp=4,tp=4"), "parallel.text", "tp is given twice"),
        (("--parallel", "tp=4", "--tp-size", "8"), "parallel.agrees", "--tp-size is 8"),
        (
            ("--parallel", "tp=16,ep=mori", "--shared-experts-tp-size", "3"),
            "size.divides_attn_tp",
            "3 does not divide attention TP 16",
        ),
        # 33792 = 2^10 x 3 x 11 divides over 12, not over 60.
        (("--parallel", "tp=60,attn_tp=12"), "intermediate.divides", "33792 does not divide"),
    ],
)
def test_impossible_combinations_exit_2_and_name_the_rule(options, rule, words):
    error = json.loads(plan(*K3, *options, "--json", code=2).stdout)["error"]
    assert words in error["what"]
    assert error["why"][0].startswith(f"rule {rule}: ")
    assert error["remedy"]


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("--k3-shared-experts-attn-tp", "--enable-shared-experts-attn-tp"),
        ("--k3-dense-mlp-attn-tp", "--enable-dense-mlp-attn-tp"),
        ("--k3-shared-experts-tp-size=4", "--shared-experts-tp-size"),
        ("--enable-k3-dense-mlp-attn-tp", "--enable-dense-mlp-attn-tp"),
    ],
)
def test_a_k3_flag_gets_the_right_one(flag, meant):
    done = plan(*K3, flag, code=2)
    assert f"did you mean {meant}?" in done.stderr
    assert "in no release" in done.stderr


def test_an_unknown_k3_flag_gets_all_of_them():
    done = plan(*K3, "--k3-odd", code=2)
    assert "use --enable-shared-experts-attn-tp or --enable-dense-mlp-attn-tp or " in done.stderr


def test_a_variable_and_its_option_that_contradict_exit_2(monkeypatch):
    monkeypatch.setenv("SGLANG_K3_DENSE_MLP_ATTN_TP", "1")
    done = plan(*K3, "--no-enable-dense-mlp-attn-tp", code=2)
    assert "rule variable.contradicts" in done.stderr
    assert "enable_dense_mlp_attn_tp" in done.stderr


def test_compare_tells_layouts_that_differ(tmp_path):
    files = []
    for name, options in (("a", ()), ("b", BOTH)):
        file = tmp_path / f"{name}.json"
        file.write_text(plan(*K3, *PARALLEL, *options, "--json").stdout)
        files.append(str(file))
    done = subprocess.run(
        [sys.executable, "-m", "npu_backend", "compare", *files, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    data = json.loads(done.stdout)
    assert data["equal"] is False
    assert [d["what"] for d in data["differences"]] == ["mlp.options", "mlp.layouts"]


def test_planning_layouts_imports_no_torch():
    code = (
        "import sys; from npu_backend.cli import main; "
        f"main(['plan', *{[*K3, *PARALLEL, *BOTH]!r}]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
