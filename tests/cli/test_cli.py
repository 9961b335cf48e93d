"""The command line as machines and people use it; each command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

T102 = "npu_transpose_batchmatmul[1,0,2]"
T012 = "npu_transpose_batchmatmul[0,1,2]"


def npu_backend(*args: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "npu_backend", *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def plan_json(*args: str, **environ: str) -> dict:
    return json.loads(npu_backend("plan", *args, "--json", **environ).stdout)


# --- plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, first",
    [
        (["--attn-tp-size", "1", "--cann", "9.0.0"], T012),
        (["--attn-tp-size", "1", "--cann", "9.1.0"], T102),
        (["--attn-tp-size", "2", "--cann", "8.5.0"], T102),
    ],
)
def test_the_v_up_kernel_of_deepseek_v3_follows_cann_and_attention_tp(options, first):
    layer = plan_json("deepseek-v3", "--role", "decode", "--soc", "A3", *options)["layers"][0]
    assert layer["v_up"][0]["strategy"] == first
    declined = [d for d in layer["declined"] if d["strategy"] == T102 and d["site"] == "v_up"]
    if first == T012:
        (reason,) = declined[0]["reasons"]
        assert reason["code"] == "bmm.bk_limit"
        assert "65536" in reason["message"]
    else:
        assert declined == []


def test_mlaprolog_serves_glm_5_2_from_cann_9_1_on():
    options = ["glm-5.2", "--role", "decode", "--soc", "A3", "--quant", "none", "--cann"]
    old = plan_json(*options, "9.0.0")["layers"][0]
    codes = {
        r["code"] for d in old["declined"] if d["strategy"] == "mlaprolog" for r in d["reasons"]
    }
    assert {"dims.q_lora_rank", "dims.qk_nope_head_dim"} <= codes
    new = plan_json(*options, "9.1.0")["layers"][0]
    (entry,) = new["path"]
    assert entry["strategy"] == "mlaprolog"
    assert "decode" in entry["phases"]


def test_plan_imports_neither_torch_nor_torch_npu():
    code = (
        "import sys; from npu_backend.cli import main; "
        "main(['plan', 'glm-5.2', '--role', 'decode', '--json']); "
        "main(['plan', 'glm-5.2', '--role', 'decode']); main(['plugins']); main(['doctor']); "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'torch_npu')]; "
        "print(bad, file=sys.stderr); sys.exit(len(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch_and_no_plugin():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import npu_backend"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "npu_backend" in modules
    assert not {m for m in modules if m.split(".")[0] in ("torch", "torch_npu", "pluggy")}
    assert not {m for m in modules if m.startswith("npu_backend_builtin.")}


def test_equal_calls_print_equal_bytes():
    options = ["plan", "kimi-k2", "--role", "decode", "--quant", "w8a8-static", "--json"]
    first = npu_backend(*options, PYTHONHASHSEED="1").stdout
    assert first == npu_backend(*options, PYTHONHASHSEED="2").stdout


def test_people_read_who_serves_why_not_and_what_goes():
    text = npu_backend("plan", "deepseek-v3", "--role", "decode", "--cann", "9.0.0").stdout
    for word in (
        "layers 0-60",
        "layer 61 (MTP)",
        T012,
        "bmm.bk_limit",
        "65536",
        "release",
        "w_kc",
        "resident_after",
        "transpose_bmm (npu-backend",
    ):
        assert word in text, word


def test_a_newer_cann_warns_on_stderr_also_under_json():
    done = npu_backend("plan", "glm-5.2", "--cann", "9.9.0", "--json")
    assert json.loads(done.stdout)["deployment"]["limits_cann"] == "9.2.0"
    assert "warning: CANN 9.9.0 is newer" in done.stderr


def test_max_tokens_by_phase_beats_max_tokens_for_all():
    data = plan_json(
        "glm-5.2",
        "--role",
        "decode",
        "--max-tokens",
        "decode=7",
        "--max-tokens",
        "1024",
        "--layers",
        "0",
    )
    assert data["deployment"]["phases"] == {
        "decode": 7,
        "target_verify": 1024,
        "draft_extend": 1024,
        "idle": 1024,
    }


def test_every_option_of_a_deployment_is_taken():
    data = plan_json(
        "glm-5.2",
        "--role",
        "decode",
        "--tp-size",
        "16",
        "--attn-tp-size",
        "8",
        "--soc",
        "Ascend910_9391",
        "--cann",
        "9.1.0",
        "--torch-npu",
        "2.9.0.post6",
        "--kernels",
        "sgl-kernel-npu==2026.2.1",
        "--quant",
        "w8a8-dynamic",
        "--dtype",
        "bfloat16",
        "--block-size",
        "64",
        "--host",
        "sglang",
        "--local-prefill",
        "--weight-update",
        "--role-switch",
        "--export",
        "--restore",
        "--graph-capture",
        "--batch-invariant",
        "--request",
        "path=mlaprolog",
        "--layers",
        "0-2",
        "--no-third-party",
    )
    deployment = data["deployment"]
    assert deployment["tp_size"] == 16
    assert deployment["attn_tp_size"] == 8
    assert deployment["soc"] == {"family": "A3", "name": "Ascend910_9391"}
    assert deployment["line"] == "26.1"
    assert deployment["kernels"] == "sgl-kernel-npu==2026.2.1"
    assert deployment["promises"] == ["export", "local_prefill", "role_switch", "weight_update"]
    assert [layer["layer_id"] for layer in data["layers"]] == [0, 1, 2]
    assert data["layers"][0]["kv_layout"]["block_size"] == 64


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, code, words",
    [
        (["glm-5.3"], None, ["glm-5.3", "did you mean"]),
        (["glm-5.2", "--role", "decoder"], "role.unknown", ["decoder"]),
        (["glm-5.2", "--soc", "A9"], "soc.unsupported", ["A9"]),
        (["glm-5.2", "--cann", "7.0"], "library.version", ["older"]),
        (["glm-5.2", "--torch-npu", "1.0"], "library.version", ["not in the table"]),
        (["glm-5.2", "--attn-tp-size", "3"], "dims.heads", ["64 heads"]),
        (
            ["glm-5.2", "--request", "path=mlapo", "--role", "decode"],
            "request.unmet",
            ["quant.mode", "layers 0-77"],
        ),
        (["glm-5.2", "--request", "nonsense"], "request.unmet", ["KIND=NAME"]),
        (["glm-5.2", "--request", "path=/absorb"], "request.unmet", ["no distribution"]),
        (["glm-5.2", "--cann", ""], "library.version", ["not a CANN version"]),
        (["glm-5.2", "--torch-npu", ""], "library.version", ["not in the table"]),
        (["glm-5.2", "--kernels", ""], "library.version", ["not a kernel library"]),
        (["glm-5.2", "--attn-tp-size", "3", "--strict"], "dims.heads", ["64 heads"]),
        (["glm-5.2", "--max-tokens", "many"], "tokens.limit", ["many"]),
        (["glm-5.2", "--layers", "500"], None, ["500"]),
        (["glm-5.2", "--host", "sglan"], None, ["did you mean 'sglang'"]),
        (["glm-5.2", "--disable", "mlaprologue"], None, ["mlaprolog"]),
        (["glm-5.2", "--catalog", "/nonexistent.json"], None, ["cannot be read"]),
        (["glm-5.2", "--rolle", "decode"], None, ["--rolle"]),
        ([], None, ["MODEL"]),
    ],
)
def test_bad_input_exits_2_with_reasons_on_stderr_and_one_object_on_stdout(args, code, words):
    done = npu_backend("plan", *args, "--json", code=2)
    data = json.loads(done.stdout)
    assert set(data) == {"error"}
    if code:
        assert data["error"]["code"] == code
    for word in words:
        assert word in done.stderr, done.stderr
        assert word in done.stdout or word in json.dumps(data), done.stdout


def test_an_unknown_command_is_an_error_with_a_suggestion():
    assert "did you mean 'plan'" in npu_backend("plann", code=2).stderr


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m npu_backend plan glm-5.2 --json | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        (["5", "7"], "all phases: 5 and 7"),
        (["decode=5", "decode=7"], "phase decode: 5 and 7"),
        (["5", "idle=3", "7"], "all phases: 5 and 7"),
    ],
)
def test_row_bounds_that_contradict_are_an_error(bounds, told):
    options = [each for bound in bounds for each in ("--max-tokens", bound)]
    done = npu_backend("plan", "deepseek-v3", "--layers", "0", *options, code=2)
    assert f"two row bounds are given for {told}" in done.stderr


def test_a_phases_own_row_bound_stands_beside_that_of_all():
    options = ["--max-tokens", "decode=7", "--max-tokens", "5", "--max-tokens", "5"]
    data = plan_json("deepseek-v3", "--layers", "0", *options)
    assert data["deployment"]["phases"] == {
        "extend": 5, "decode": 7, "target_verify": 5, "draft_extend": 5, "idle": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "reader"),
    [
        ("--weight-update", "update"),
        ("--export", "export"),
        ("--lora", "lora"),
        ("--draft-sharing", "draft"),
        ("--parallel-copies", "peers"),
    ],
)
def test_each_promise_can_be_given_and_names_its_reader(option, reader):
    data = plan_json("glm-5.2", "--role", "decode", "--layers", "0", option)
    (row,) = (w for w in data["layers"][0]["weights"] if w["name"] == "kv_b_proj")
    assert (row["action"], row["readers"]) == ("keep", [reader])
    assert data["deployment"]["promises"] == [option.removeprefix("--").replace("-", "_")]


@pytest.mark.parametrize("phases", ["", ",", " "])
def test_no_phase_is_no_fault_of_a_layer(phases):
    done = npu_backend("plan", "deepseek-v3", "--layers", "0", "--phases", phases, code=2)
    assert "layer 0" not in done.stderr
    assert "phase" in done.stderr


@pytest.mark.parametrize("text", ["sgl-kernel-npu==abc", "sgl-kernel-npu==", "none==1"])
def test_a_kernel_librarys_version_that_is_none_is_an_error(text):
    done = npu_backend("plan", "deepseek-v3", "--layers", "0", "--kernels", text, code=2)
    assert "is not a version of" in done.stderr


@pytest.mark.parametrize("seed", ["-1", "4294967296", "99999999999999999999", "x", "1.5"])
@pytest.mark.parametrize(
    "command",
    [
        ["run", "deepseek-v3", "--layers", "0", "--device", "cpu"],
        ["bmm", "--heads", "2", "--k", "128", "--n", "128", "--measure", "--device", "cpu"],
    ],
    ids=["run", "bmm"],
)
def test_a_seed_that_no_generator_holds_is_bad_input(command, seed):
    done = npu_backend(*command, "--seed", seed, "--json", code=2)
    assert "--seed" in json.loads(done.stdout)["error"]["what"]


def test_warnings_stand_in_the_json_as_well():
    done = npu_backend("plan", "deepseek-v3", "--cann", "99.0", "--layers", "0", "--json")
    (warning,) = json.loads(done.stdout)["warnings"]
    assert "CANN 99.0 is newer than the catalog" in warning
    assert warning in done.stderr
    assert plan_json("deepseek-v3", "--cann", "9.1.0", "--layers", "0")["warnings"] == []


@pytest.mark.parametrize(
    ("role", "told"),
    [
        ("prefill", "reachable here is extend beside idle, which meets no request"),
        ("null --phases extend", "reachable here is extend"),
        ("null --phases idle", "reachable here is nothing beside idle, which meets no request"),
    ],
)
def test_an_unmet_request_tells_every_reachable_phase(role, told):
    options = ["--request", "path=mlaprolog", "--role", *role.split()]
    done = npu_backend("plan", "deepseek-v3", "--layers", "0", *options, code=2)
    serves = "phase: it serves decode, target_verify, draft_extend, idle; "
    assert f"{serves}{told}\n" in done.stderr


@pytest.mark.parametrize("plugin", ["mlaprolog", "mlapo", "transpose_bmm", "role_release"])
def test_checking_one_sound_plugin_fails_nobody(plugin):
    done = npu_backend("plugins", "--plugin", plugin, "--check", "--json")
    data = json.loads(done.stdout)
    assert all(row["failures"] == [] for row in data["check"])
    unplanned = [text for row in data["check"] for text in row["unplanned"]]
    assert unplanned
    assert all("no legal strategy serves" in text for text in unplanned)
    # It was asked all the same.
    counts = next(r for r in data["summary"]["plugins"] if r["provider"].startswith(plugin))
    asked = counts["offers"] + counts["declines"] + counts["votes"]
    assert asked > 0


def test_the_check_says_what_each_row_was_planned_for():
    text = npu_backend("plugins", "--no-third-party", "--check").stdout
    (kimi,) = (line for line in text.splitlines() if line.startswith("kimi-k2 "))
    assert "at most 1024 rows" in kimi


# --- plugins, compare, doctor --------------------------------------------------------------------


def test_plugins_lists_the_five_built_ins_in_order_with_hooks_and_call_order():
    data = json.loads(npu_backend("plugins", "--no-third-party", "--json").stdout)
    assert [(p["name"], p["dist"], p["status"]) for p in data["plugins"]] == [
        (name, "npu-backend", "active")
        for name in ("absorb", "mlapo", "mlaprolog", "role_release", "transpose_bmm")
    ]
    order = [p.split()[0] for p in data["call_order"]["select_preprocess_path"]]
    assert order == ["mlaprolog", "mlapo", "absorb"]


def test_plugins_check_asks_every_hook_and_tells_the_winners():
    data = json.loads(npu_backend("plugins", "--no-third-party", "--check", "--json").stdout)
    assert all(row["failures"] == [] for row in data["check"])
    winners = {(r["model"], w["table"]): w["strategy"] for r in data["check"] for w in r["winners"]}
    assert winners["kimi-k2", "path"] == "mlapo"
    text = npu_backend("plugins", "--no-third-party", "--check").stdout
    assert "mlapo" in text


def test_disabled_plugins_are_listed_as_blocked_and_absorb_alone_still_plans():
    data = plan_json("glm-5.2", "--role", "decode", "--disable", "mlaprolog", "--layers", "0")
    status = {p["name"]: p["status"] for p in data["plugins"]}
    assert status["mlaprolog"] == "blocked"
    assert data["layers"][0]["path"][0]["strategy"] == "absorb"


def test_compare_tells_a_pair_that_can_share_a_cache_from_one_that_cannot(tmp_path):
    files = {}
    for name, args in {
        "prefill": ["--role", "prefill"],
        "decode": ["--role", "decode"],
        "decode64": ["--role", "decode", "--block-size", "64"],
    }.items():
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(
            npu_backend("plan", "glm-5.2", "--cann", "9.1.0", *args, "--json").stdout
        )
    good = npu_backend("compare", str(files["prefill"]), str(files["decode"]), "--json")
    data = json.loads(good.stdout)
    assert data["kv_layouts_agree"] is True
    assert data["prefill_decode_pair"] is True
    assert data["equal"] is False
    path = next(d for d in data["differences"] if d["what"] == "path")
    assert any("policy.duplicate" in why for why in path["why"])
    bad = npu_backend("compare", str(files["prefill"]), str(files["decode64"]), "--json", code=1)
    assert json.loads(bad.stdout)["kv_conflicts"] == list(range(79))
    text = npu_backend("compare", str(files["prefill"]), str(files["decode"])).stdout
    assert "can share a cache" in text
    same = npu_backend("compare", str(files["decode"]), str(files["decode"]), "--json")
    assert json.loads(same.stdout)["differences"] == []
    assert json.loads(same.stdout)["equal"] is True


HEAD = '{"schema": 1, "fingerprint": "", '


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 7}',
        "not json",
        "[" * 100000,
        HEAD + '"deployment": [], "layers": []}',
        HEAD + '"deployment": {}, "layers": [{"layer_id": 0}, {"layer_id": "1"}]}',
        HEAD + '"deployment": {}, "layers": [], "plugins": [{}]}',
        HEAD + '"deployment": {}, "layers": [{"layer_id": 0, "weights": [{"name": "w"}]}]}',
        HEAD + '"deployment": {}, "layers": [{"layer_id": 0, "path": 1, "declined": [3]}]}',
    ],
)
def test_compare_refuses_what_is_no_plan(tmp_path, text):
    good = tmp_path / "good.json"
    good.write_text(HEAD + '"deployment": {}, "layers": [{"layer_id": 0, "path": 2}]}')
    (tmp_path / "bad.json").write_text(text)
    done = npu_backend("compare", str(tmp_path / "bad.json"), str(good), "--json", code=2)
    assert "bad.json" in done.stderr
    assert set(json.loads(done.stdout)) == {"error"}


def test_compare_tells_that_the_models_differ(tmp_path):
    files = []
    for model in ("deepseek-v3", "kimi-k2"):
        files.append(tmp_path / f"{model}.json")
        files[-1].write_text(npu_backend("plan", model, "--role", "decode", "--json").stdout)
    data = json.loads(npu_backend("compare", *map(str, files), "--json").stdout)
    assert {
        "layer_id": None,
        "what": "model.name",
        "a": "deepseek-v3",
        "b": "kimi-k2",
        "why": [],
    } in data["differences"]


def test_a_fault_of_the_program_is_told_whole_and_is_no_bad_input(monkeypatch, capsys):
    from npu_backend.cli import main, plan_command

    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(plan_command, "plan_from", broken)
    assert main(["plan", "glm-5.2", "--json"]) == 3
    out, err = capsys.readouterr()
    assert "planted" in json.loads(out)["error"]["what"]
    assert "Traceback" in err


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2():
    assert "Commands" in npu_backend(code=2).stderr


def test_doctor_tells_what_this_machine_allows():
    data = json.loads(npu_backend("doctor", "--json").stdout)
    assert data["schema"] == 1
    assert any(text.startswith("plan:") for text in data["allows"])
    assert "what that allows" in npu_backend("doctor").stdout


def test_a_catalog_override_lifts_a_limit_and_changes_the_fingerprint(tmp_path):
    override = tmp_path / "mine.json"
    override.write_text(
        json.dumps(
            {
                "limits": {
                    "ops": {
                        "npu_transpose_batchmatmul": {
                            "bk_below": {
                                "by_cann": {"9.0": None},
                                "source": "measured on our boards",
                            }
                        }
                    }
                }
            }
        )
    )
    args = ["deepseek-v3", "--role", "decode", "--cann", "9.0.0"]
    plain, mine = plan_json(*args), plan_json(*args, "--catalog", str(override))
    assert plain["layers"][0]["v_up"][0]["strategy"] == T012
    assert mine["layers"][0]["v_up"][0]["strategy"] == T102
    assert plain["fingerprint"] != mine["fingerprint"]
    override.write_text(
        json.dumps(
            {
                "limits": {
                    "ops": {"npu_transpose_batchmatmul": {"bk_belo": {"value": 1, "source": "x"}}}
                }
            }
        )
    )
    done = npu_backend("plan", *args, "--catalog", str(override), code=2)
    assert "did you mean 'bk_below'" in done.stderr
