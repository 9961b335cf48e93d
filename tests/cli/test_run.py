"""``run``: the main job, end to end, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_torch_npu = pytest.mark.skipif(
    find_spec("torch_npu") is None, reason="the simulated NPU needs torch-npu"
)

SMALL = ["deepseek-v2-lite", "--attn-tp-size", "4", "--layers", "0"]


def run(*args: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-m", "npu_backend", "run", *args],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def vendor(tmp_path: Path) -> str:
    """A distribution whose v_up kernel is wrong by one per cent of one head."""
    (tmp_path / "acme_wrong.py").write_text(
        "import npu_backend\n"
        "from npu_backend import Offer, hookimpl\n"
        "@hookimpl\n"
        "def select_bmm_kernel(bmm, deployment):\n"
        "    if bmm.site == 'v_up':\n"
        "        return Offer(strategy='acme_wrong', impl='acme_wrong:Wrong', reads=[bmm.weight])\n"
        "    return None\n"
        "class Wrong:\n"
        "    def prepare(self, weights):\n"
        "        return {}\n"
        "    def bind(self, prepared, cache):\n"
        "        weight = prepared.weights['w_vc']\n"
        "        def acme(x):\n"
        "            y = (x.transpose(0, 1) @ weight).transpose(0, 1).clone()\n"
        "            y[:, 0] *= 1.5\n"
        "            return y\n"
        "        return acme\n"
    )
    info = tmp_path / "acme_npu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-npu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[npu_backend.plugins]\nacme = acme_wrong\n")
    return str(tmp_path)


def test_a_run_on_the_cpu_proves_the_plan_and_says_what_that_shows():
    data = json.loads(run(*SMALL, "--role", "decode", "--device", "cpu", "--json").stdout)
    assert data["passed"] is True
    assert data["device"]["kind"] == "cpu"
    assert "limits" in data["device"]["does_not_show"]
    (layer,) = data["run"]["layers"]
    proofs = {p["name"]: p["passed"] for p in layer["proofs"]}
    assert proofs.keys() >= {"outputs", "cache", "equality", "bytes", "released", "unreachable"}
    assert all(proofs.values())
    freed = data["run"]["bytes"]
    # kv_b_proj of 4 local heads x (128 + 128) x 512, bf16: a decode worker never reads it again.
    assert freed == {"planned": 4 * 256 * 512 * 2, "freed": 4 * 256 * 512 * 2}
    assert data["plan"]["fingerprint"].startswith("sha256:")


@needs_torch_npu
def test_auto_takes_the_simulated_npu_and_its_allocator_agrees_to_the_byte():
    done = run(*SMALL, "--role", "decode", "--json")
    data = json.loads(done.stdout)
    assert data["passed"] is True
    assert data["device"]["kind"] == "sim"
    assert "numerics" in data["device"]["does_not_show"]
    proof = next(p for p in data["run"]["layers"][0]["proofs"] if p["name"] == "bytes")
    assert "requested_bytes" in proof["text"] or "allocated" in proof["text"]
    assert data["run"]["bytes"]["freed"] == data["run"]["bytes"]["planned"] > 0


@needs_torch_npu
def test_a_simulated_cann_is_the_one_asked_for_and_a_line_that_differs_is_told():
    done = run(
        *SMALL,
        "--role",
        "decode",
        "--cann",
        "9.0.0",
        "--torch-npu",
        "26.0",
        "--device",
        "sim",
        "--json",
    )
    data = json.loads(done.stdout)
    assert data["device"]["cann"] == "9.0.0"
    if data["device"]["torch_npu"] == "2.13.0":
        assert "planned for TorchNPU line 26.0, installed is 2.13.0 of line 26.2" in done.stderr


def test_people_read_path_kernels_bytes_errors_and_the_verdict():
    text = run(*SMALL, "--role", "decode", "--device", "cpu").stdout
    for word in (
        "absorb",
        "npu_transpose_batchmatmul",
        "kv_b_proj",
        "release",
        "error vs fp32",
        "after = before",
        "bytes freed",
        "planned",
        "equal",
        "all proofs hold",
        "CPU reference",
        "does not show",
    ):
        assert word in text, word


def test_a_wrong_kernel_of_a_vendor_fails_a_proof_and_exits_1(vendor):
    done = run(*SMALL, "--role", "decode", "--device", "cpu", "--json", code=1, PYTHONPATH=vendor)
    data = json.loads(done.stdout)
    assert data["passed"] is False
    assert data["plan"]["layers"][0]["v_up"][0]["provider"] == "acme (acme-npu 1.0)"
    failed = [p["name"] for p in data["run"]["layers"][0]["proofs"] if not p["passed"]]
    assert "outputs" in failed
    text = run(*SMALL, "--role", "decode", "--device", "cpu", code=1, PYTHONPATH=vendor).stdout
    assert "a proof FAILED" in text
    again = run(
        *SMALL,
        "--role",
        "decode",
        "--device",
        "cpu",
        "--no-third-party",
        "--json",
        PYTHONPATH=vendor,
    )
    assert json.loads(again.stdout)["passed"] is True


@pytest.mark.parametrize("role", ["null", "prefill"])
def test_extend_runs_through_the_plan_where_it_is_reachable(role):
    data = json.loads(run(*SMALL, "--role", role, "--device", "cpu", "--json").stdout)
    assert data["passed"] is True
    assert "extend" in {s["phase"] for s in data["run"]["layers"][0]["steps"]}


def test_a_quantization_that_is_not_executed_is_an_error_and_no_pass():
    done = run(
        "deepseek-v3",
        "--layers",
        "0",
        "--attn-tp-size",
        "32",
        "--quant",
        "fp8-block",
        "--soc",
        "A5",
        "--device",
        "cpu",
        code=2,
    )
    assert "mxfp8" in done.stderr


@needs_torch_npu
def test_the_kernel_librarys_own_mlapo_runs_on_the_simulated_npu():
    args = ["deepseek-v3", "--role", "decode", "--layers", "0", "--attn-tp-size", "64"]
    args += ["--kernels", "vllm-ascend", "--quant", "w8a8-static", "--request", "path=mlapo"]
    data = json.loads(run(*args, "--device", "sim", "--json").stdout)
    assert {step["path"] for step in data["run"]["layers"][0]["steps"]} == {"mlapo"}


@pytest.mark.parametrize("quant", ["w8a8-static", "w8a8-dynamic"])
def test_what_is_planned_and_not_executed_is_no_failed_proof(quant):
    done = run(*SMALL, "--quant", quant, "--dtype", "float16", "--device", "cpu", "--json", code=2)
    assert "is not executed yet" in json.loads(done.stdout)["error"]["what"]


def test_a_device_that_is_not_there_is_an_error():
    done = run(*SMALL, "--device", "npu", "--json", code=2)
    assert "--device npu" in json.loads(done.stdout)["error"]["whom"]
    assert "--device sim" in done.stderr
