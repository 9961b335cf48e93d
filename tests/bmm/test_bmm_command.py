"""``npu-backend bmm`` as machines and people use it; each command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

T102 = "npu_transpose_batchmatmul[1,0,2]"
T012 = "npu_transpose_batchmatmul[0,1,2]"
BMT = "batch_matmul_transpose"
BMM = "torch.bmm"
SHAPE = ("--heads", "128", "--k", "512", "--n", "128", "--dtype", "bf16", "--soc", "A3")
SMALL = ("--heads", "2", "--k", "128", "--n", "128", "--soc", "A3", "--cann", "9.0.0")


def bmm(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "npu_backend", "bmm", *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def bmm_json(*args: str, code: int = 0) -> dict:
    return json.loads(bmm(*args, "--json", code=code).stdout)


def _reasons(rows):
    return {v["strategy"]: {r["code"]: r["message"] for r in v["reasons"]} for v in rows}


def test_the_table_and_each_refusal_with_figure_and_source():
    found = bmm_json(*SHAPE, "--cann", "9.0.0", "--tokens", "1024", "--tokens", "1025")
    assert [(e["strategy"], e["tokens"]) for e in found["table"]] == [(T012, [1, None])]
    assert {v["strategy"]: v["legal"] for v in found["strategies"]} == {
        T102: False,
        T012: True,
        BMT: True,
        BMM: True,
    }
    refused = _reasons(found["strategies"])[T102]["bmm.bk_limit"]
    assert "128 x 512 = 65536 is not below 65536" in refused
    assert "[CANN 9.0.0; ops-nn TransposeBatchMatMul tiling checks" in refused
    below, beyond = found["tokens"]
    assert (below["serves"], beyond["serves"]) == (T012, T012)
    assert _reasons(below["strategies"])[BMT] == {}
    over = _reasons(beyond["strategies"])[BMT]["tokens.limit"]
    assert over.startswith("1025 rows: batch_matmul_transpose takes 1 to 1024 rows")
    assert "batchIdx is out of range" in over


@pytest.mark.parametrize(
    ("options", "table", "refused"),
    [
        (["--cann", "9.1.0"], [T102], {}),
        (["--cann", "8.1.RC1"], [BMT, BMM], {T102: "op.missing", T012: "op.missing"}),
        (["--cann", "9.1.0", "--weight-format", "nz"], [T012], {T102: "bmm.bk_limit"}),
        (["--cann", "9.0.0", "--weight-format", "nz"], [BMT, BMM], {T012: "format.nz"}),
        (["--cann", "9.0.0", "--soc", "310P"], [BMM], {T102: "soc.unsupported"}),
        (["--cann", "9.0.0", "--soc", "910"], [BMM], {T102: "soc.undocumented"}),
        (["--cann", "9.0.0", "--soc", "A5"], [T102], {BMT: "soc.unsupported"}),
        (["--cann", "9.0.0", "--dtype", "fp32"], [T012], {BMT: "dtype"}),
        (["--cann", "8.5.0", "--k", "496"], [BMT, BMM], {T102: "bmm.alignment"}),
        (["--cann", "9.0.0", "--k", "65536"], [BMT, BMM], {T012: "bmm.k_limit"}),
        (["--cann", "9.0.0", "--model", "kimi-k3"], [T012], {BMT: "model.numerics"}),
        (["--cann", "9.0.0", "--kernels", "none"], [T012], {BMT: "op.missing"}),
        (
            ["--cann", "8.5.0", "--kernels", "sgl-kernel-npu==2025.12.31"],
            [T012],
            {BMT: "library.version"},
        ),
        (["--cann", "8.5.0", "--k", "496", "--batch-invariant"], [BMM], {BMT: "tokens.limit"}),
    ],
)
def test_the_table_follows_version_chip_dtype_format_and_model(options, table, refused):
    found = bmm_json(*SHAPE, *options)
    entries = sorted(found["table"], key=lambda e: e["tokens"][0])
    assert [e["strategy"] for e in entries] == table
    told = _reasons(found["strategies"])
    for strategy, code in refused.items():
        assert code in told[strategy]
        # Each reason ends in its source, in brackets.
        assert told[strategy][code].endswith("]")


def test_planning_a_matmul_needs_no_torch():
    code = (
        "import sys; from npu_backend.cli import main\n"
        f"main(['bmm', *{SHAPE!r}, '--cann', '9.0.0', '--peers', '--tokens', '4'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_figure_for_a_cann_nobody_has_seen_comes_from_a_file(tmp_path):
    file = tmp_path / "mine.json"
    limit = {"by_cann": {"9.3": 131072}, "source": "release notes of CANN 9.3"}
    over = {
        "versions": {
            "cann": ["9.3.0"],
            "lines": {"27.0": {"cann": "9.3.0", "packages": ["3.0.0"]}},
        },
        "limits": {"ops": {"npu_transpose_batchmatmul": {"bk_below": limit}}},
    }
    file.write_text(json.dumps(over))
    options = [*SHAPE, "--cann", "9.3.0", "--catalog", str(file)]
    assert bmm_json(*options)["table"][0]["strategy"] == T102
    found = bmm_json(*options, "--heads", "256")
    assert found["table"][0]["strategy"] == T012
    message = _reasons(found["strategies"])[T102]["bmm.bk_limit"]
    assert "131072 is not below 131072" in message
    assert "[CANN 9.3.0; release notes of CANN 9.3]" in message
    unseen = bmm(*SHAPE, "--cann", "9.4.0")
    assert "CANN 9.4.0 is newer than the catalog" in unseen.stderr


def test_what_other_engines_choose_stands_beside_with_why_the_op_would_reject_it():
    found = bmm_json(*SHAPE, "--cann", "9.0.0", "--peers", "--tokens", "1025")["peers"]
    row = next(
        r
        for r in found
        if (r["peer"], r["attention"], r["phase"]) == ("sglang 0.5.23", "mla", "decode")
    )
    assert (row["strategy"], row["legal"], row["ours"]) == (BMT, False, T012)
    assert row["reasons"][0]["code"] == "tokens.limit"
    assert row["source"].startswith("wheel sglang 0.5.23")
    strided = bmm_json(*SHAPE, "--cann", "9.0.0", "--weight-layout", "strided", "--peers")["peers"]
    assert any("layout.contiguous" in {x["code"] for x in r["reasons"]} for r in strided)


def test_people_are_told_the_same():
    shown = bmm(*SHAPE, "--cann", "9.0.0", "--tokens", "1025", "--peers").stdout
    for words in ("1.. (no limit)", T012, "bmm.bk_limit", "1025 rows", "sglang 0.5.23", "rejected"):
        assert words in shown


def test_measure_and_tune_write_an_order_that_later_plans_use_the_same_every_time(tmp_path):
    file = tmp_path / "tuned.json"
    done = bmm(
        *(*SMALL, "--device", "cpu", "--tune", str(file), "--json"),
        *("--tokens", "1", "--tokens", "1025", "--blocks", "3", "--seconds", "0"),
    )
    found = json.loads(done.stdout)
    assert "says nothing of an NPU's speed" in done.stderr
    assert {(m["rows"], m["strategy"]) for m in found["measured"]} == {
        *((1, s) for s in (T102, T012, BMT, BMM)),
        *((1025, s) for s in (T102, T012, BMM)),
    }
    assert all(0 <= m["error_vs_fp32"] <= 2**-8 for m in found["measured"])
    (row,) = json.loads(file.read_text())["tuning"]["bmm"]
    assert row == found["tuned"]["row"]
    assert "CPU reference" in row["source"]
    assert "not an NPU's speed" in row["source"]
    first = bmm(*SMALL, "--catalog", str(file), "--json").stdout
    assert bmm(*SMALL, "--catalog", str(file), "--json").stdout == first
    entries = {tuple(e["tokens"]): e for e in json.loads(first)["table"]}
    served = next(e for (low, _), e in entries.items() if low == 1)
    assert served["strategy"] == row["rows"][0]["order"][0]
    assert served["order"] == row["source"]
    # A second shape goes beside the first, and what else the file says stays.
    over = json.loads(file.read_text())
    note = {"strategy": BMT, "code": "model.numerics", "message": "m", "source": "s"}
    over["models"] = {"notes": {"kimi-k2": [note]}}
    file.write_text(json.dumps(over))
    bmm(
        *(*SMALL, "--site", "q_absorb", "--device", "cpu", "--tune", str(file)),
        *("--tokens", "1", "--blocks", "3", "--seconds", "0"),
    )
    after = json.loads(file.read_text())
    assert sorted(r["site"] for r in after["tuning"]["bmm"]) == ["q_absorb", "v_up"]
    assert after["models"] == over["models"]


def test_a_file_that_is_no_override_is_left_as_it_is(tmp_path):
    file = tmp_path / "notes.json"
    file.write_text('{"my": "notes"}')
    quick = ("--device", "cpu", "--tokens", "1", "--blocks", "3", "--seconds", "0")
    done = bmm(*SMALL, *quick, "--tune", str(file), code=2)
    assert "unknown section 'my'" in done.stderr
    assert file.read_text() == '{"my": "notes"}'
    done = bmm(*SMALL, *quick, "--tune", str(tmp_path / "none" / "x.json"), code=2)
    assert "cannot be written" in done.stderr


@pytest.mark.usefixtures("npu_sim")
def test_measured_on_the_simulated_npu_the_real_ops_are_called(tmp_path):
    found = bmm_json(
        *(*SMALL, "--measure", "--device", "sim"),
        *("--tokens", "1024", "--blocks", "3", "--seconds", "0"),
    )
    assert found["device"]["kind"] == "sim"
    assert found["device"]["cann"] == "9.0.0"
    assert {m["strategy"] for m in found["measured"]} == {T102, T012, BMT, BMM}
    assert all(0 < m["error_vs_fp32"] <= 2**-8 for m in found["measured"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--heads", "0"], "0 is not in the range"),
        (["--model", "kimi-k9"], "did you mean"),
        (["--cann", "7.0"], "older than the catalog"),
        (["--measure", "--device", "cpu", "--weight-format", "nz"], "planned, but not measured"),
    ],
)
def test_bad_input_is_an_error_in_four_parts(options, words):
    done = bmm(*SHAPE, *options, "--json", code=2)
    error = json.loads(done.stdout)["error"]
    assert words in done.stderr
    assert all(error[part] for part in ("what", "whom", "why", "remedy"))
