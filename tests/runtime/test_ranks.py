"""All ranks hold one plan, or all stop: two processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from npu_backend.runtime import FAILED, compare_fingerprints
import torch.distributed as dist
from npu_backend import Deployment, MlaLayer, PlanMismatchError
from npu_backend.offers import Answer, PluginInfo
from npu_backend.planner import plan_model
from npu_backend_builtin import absorb, role_release, transpose_bmm

rank, store, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)

class Answers:
    def ask(self, records):
        records = records if isinstance(records, tuple) else (records,)
        return (Answer(PluginInfo("built-in"), records),)
    def ask_paths(self, layer, deployment):
        return self.ask(absorb.select_preprocess_path(layer, deployment))
    def ask_bmm(self, bmm, deployment):
        return self.ask(transpose_bmm.select_bmm_kernel(bmm, deployment))
    def ask_release(self, layer, deployment, readers):
        return self.ask(role_release.release_weights(layer, deployment, readers))

def plan(role):
    layers = [MlaLayer(layer_id=i, hidden_size=64, num_heads=2, q_lora_rank=48, kv_lora_rank=32,
                       qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16) for i in range(2)]
    return plan_model(layers, Deployment(role=role, cann="9.1.0"), Answers())

mine = plan("decode" if rank == 0 or case != "differ" else "null")
what = {"layer": mine.layers[0], "layers": list(mine.layers)}.get(case, mine)
error = None
if case == "failed" and rank == 1:
    what, error = FAILED, ValueError("no weights on this rank")
if case == "digest":
    what = mine.fingerprint
try:
    print(json.dumps({"digest": compare_fingerprints(what, error=error)}))
except PlanMismatchError as err:
    print(json.dumps(err.to_dict()))
dist.destroy_process_group()
"""


def _run(case, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    store = tmp_path / f"store-{case}"
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(store), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in (0, 1)
    ]
    found = []
    for process in ranks:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.parametrize("case", ["model", "layers"])
def test_equal_plans_pass_with_their_digest(case, tmp_path):
    one, other = _run(case, tmp_path)
    assert one == other
    assert "sha256:" in one["digest"]


def test_different_plans_stop_every_rank_and_the_difference_is_shown(tmp_path):
    found = _run("differ", tmp_path)
    for error in found:
        assert error["type"] == "PlanMismatchError"
        assert error["what"] == "the ranks do not hold the same plan"
        assert any("rank 0 against rank 1, layer 0." in line for line in error["why"])
        assert any('"extend"' in line for line in error["why"])
        assert error["remedy"]
    assert found[0] == found[1]


def test_a_rank_that_failed_says_so_and_nobody_hangs(tmp_path):
    found = _run("failed", tmp_path)
    for error in found:
        assert error["what"] == "rank 1 failed before the plan could be compared"
        assert "rank 1 failed: no weights on this rank" in error["why"]
