"""Proofs on a device: bytes by its allocator; the simulated NPU in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from npu_backend.catalog import load_catalog
from npu_backend.runtime.ledger import EXACT_STATISTIC, Ledger, LedgerRow
from npu_backend.runtime.prove.memory import MemoryWatch
from npu_backend.runtime.prove.release_claims import prove_bytes

ROOT = Path(__file__).parents[2]

PROVE = """
import json
from npu_backend.testing import sim
running = sim.start(soc="A3")
import torch
torch.npu.config.allow_internal_format = True
from npu_backend import Deployment, Indexer, MlaLayer
from npu_backend.runtime.prove import prove_model
layer = MlaLayer(
    layer_id=0, hidden_size=7168, num_heads=2, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, indexer=Indexer("own"),
)
from prove_builtins import BuiltIns
from npu_backend.planner import plan_model
here = Deployment(role="decode", cann=running.settings.cann, torch_npu=running.line)
plan = plan_model([layer], here, BuiltIns())
print(json.dumps(prove_model(plan, device="npu:0", rows=(2,)).to_dict()))
"""


@pytest.mark.skipif(find_spec("torch_npu") is None, reason="torch-npu is not installed")
def test_the_simulated_npus_allocator_frees_what_the_plan_says(tmp_path):
    # The planning stand-in of this folder, under a name that the child can import.
    source = (Path(__file__).parent / "conftest.py").read_text()
    (tmp_path / "prove_builtins.py").write_text(source)
    paths = [str(ROOT), str(ROOT / "plugins"), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", PROVE], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    layer = record["layers"][0]
    claims = {p["name"]: p for p in layer["proofs"]}
    assert record["passed"], [p["text"] for p in layer["proofs"] if not p["passed"]]
    figures = claims["bytes"]["figures"]
    line = load_catalog().versions.line_of(metadata.version("torch-npu"))
    fused = load_catalog().has_op("npu::npu_mla_prolog_v3", line)
    # kv_b_proj goes in any case; fused_qkv_a_proj, q_b_proj and w_kc where the fused path serves.
    kv_b = 2 * (128 + 128) * 512 * 2
    copied = (2112 * 7168 + 2 * 192 * 1536 + 2 * 128 * 512) * 2
    assert figures["planned"] == figures["freed"] == kv_b + fused * copied
    if line == "7.0":  # no requested_bytes there: blocks of 512 bytes, each with its slack
        assert 0 <= figures["allocator_freed"] - figures["freed"] < 4 * 1024
    else:
        assert figures["allocator"] == EXACT_STATISTIC
        assert figures["allocator_freed"] == figures["freed"]
    assert {s["path"] for s in layer["steps"]} == {"mlaprolog" if fused else "absorb"}
    assert layer["device"] == "npu:0"


class Device:
    """A device's memory module with figures of our choosing."""

    def __init__(self, **statistics):
        self.statistics = statistics

    def synchronize(self, device):
        pass

    def memory_stats(self, device):
        return self.statistics

    def memory_allocated(self, device):
        return 77


@pytest.fixture
def device(monkeypatch):
    """Return ``device(**statistics)``: a torch.device whose module is ours."""

    def make(**statistics):
        module = Device(**statistics)
        monkeypatch.setattr(torch, "pretend", module, raising=False)
        return module, types.SimpleNamespace(type="pretend")

    return make


@pytest.fixture
def released(tiny, plan_of):
    """A plan that releases kv_b_proj (16384 bytes), its ledger, and the weight."""
    plan = plan_of(tiny(), role="decode").layers[0]
    ledger = Ledger(0, (LedgerRow("kv_b_proj", "release", 16384, 16384, "swapped"),))
    return plan, ledger, {"kv_b_proj": torch.zeros(128, 64, dtype=torch.bfloat16)}


def watched(released, device, statistic, fell):
    plan, ledger, given = released
    module, place = device(**{statistic: 50_000})
    watch = MemoryWatch(given, place)
    given["kv_b_proj"].untyped_storage().resize_(0)
    module.statistics[statistic] -= fell
    return prove_bytes(plan, plan, ledger, watch)


def test_the_allocators_figure_is_part_of_the_proof(released, device):
    proof = watched(released, device, EXACT_STATISTIC, 16384)
    assert proof.passed, proof.text
    assert proof.figures["allocator_freed"] == 16384
    assert "by requested_bytes.all.current" in proof.text


@pytest.mark.parametrize("fell", [16383, 16385, 0])
def test_an_allocator_that_disagrees_by_one_byte_turns_bytes_red(released, device, fell):
    proof = watched(released, device, EXACT_STATISTIC, fell)
    assert not proof.passed
    assert f"fell by {fell}, planned are 16384" in proof.text


@pytest.mark.parametrize(("fell", "passed"), [(16384 + 1024, True), (16384 + 1025, False)])
def test_a_line_without_the_exact_figure_has_block_slack(released, device, fell, passed):
    proof = watched(released, device, "allocated_bytes.all.current", fell)
    assert proof.passed == passed


def test_a_device_without_statistics_still_says_what_is_allocated(device):
    _, place = device()
    assert MemoryWatch({}, place).allocator() == ("memory_allocated", 0)


def test_the_cpu_has_no_allocator_to_ask():
    assert MemoryWatch({}, torch.device("cpu")).allocator() == (None, None)
