"""A model at load: layer by layer, a bounded peak, and who is to blame where bytes stay."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
import torch

from npu_backend import Phase, PrepareError
from npu_backend.runtime import AliasWarning, bind, prepare_and_release


def _plans(h, count):
    return [h.plan(h.fused_layer(layer_id=i), role="decode") for i in range(count)]


def test_every_layer_is_released_and_the_account_adds_up(h):
    plans = _plans(h, 3)
    weights = {p.layer_id: h.weights(p.layer) for p in plans}
    bound, ledger = prepare_and_release(plans, lambda p: bind(p, weights[p.layer_id]))
    assert [layer.plan.layer_id for layer in bound] == [0, 1, 2]
    assert ledger.agrees
    assert ledger.freed == ledger.planned == sum(r.bytes for p in plans for r in p.released())
    assert json.loads(json.dumps(ledger.to_dict()))["freed"] == ledger.freed


def test_a_layer_that_fails_stops_there(h, monkeypatch):
    from npu_backend_builtin.impl.mlaprolog import MlaProlog

    plans = _plans(h, 3)
    weights = {p.layer_id: h.weights(p.layer) for p in plans}
    right = MlaProlog.prepare

    def failing(self, given):
        if given.layer.layer_id == 1:
            raise RuntimeError("out of memory")
        return right(self, given)

    monkeypatch.setattr(MlaProlog, "prepare", failing)
    seen = []
    with pytest.raises(PrepareError, match="out of memory"):
        prepare_and_release(plans, lambda p: bind(p, weights[p.layer_id]), done=seen.append)
    assert [layer.plan.layer_id for layer in seen] == [0]
    assert seen[0].ledger.freed
    for layer_id in (1, 2):
        assert all(float(t.float().abs().sum()) > 0 for t in weights[layer_id].values())


class Module:
    pass


def test_who_holds_a_storage_is_named(h):
    plan = h.plan(h.fused_layer(), role="decode")
    weights = h.weights(plan.layer)
    host = Module()
    host.kept_by_the_host = weights["q_b_proj"].data
    bound = h.bind(plan, weights)
    row = next(r for r in bound.plan.weights if r.name == "q_b_proj")
    assert row.action == "keep"
    assert "attribute kept_by_the_host of Module" in row.reasons[0]


def test_a_difference_is_a_warning_with_the_culprit(h, monkeypatch):
    """Somebody takes the weight's data between the check and the release."""
    from npu_backend.runtime import release

    plan = h.plan(h.fused_layer(), role="decode")
    weights = h.weights(plan.layer)
    bound = h.bind(plan, weights)
    bound.prepare()
    thief = Module()
    right = release._synchronize

    def stealing(device):
        thief.view = weights["q_b_proj"].data
        right(device)

    monkeypatch.setattr(release, "_synchronize", stealing)
    with pytest.warns(AliasWarning, match=r"q_b_proj is held by .*attribute view of Module"):
        ledger = bound.release()
    assert not ledger.agrees
    stayed = next(r.bytes for r in plan.weights if r.name == "q_b_proj")
    assert ledger.planned - ledger.freed == stayed


def test_a_host_may_reload_instead_of_keeping_a_copy(h):
    plan = h.plan(h.fused_layer(), role="decode", promises=["weight_update"], restore=True)
    weights = h.weights(plan.layer)
    saved = {name: t.detach().clone() for name, t in weights.items()}
    asked = []

    def reload(name):
        asked.append(name)
        return saved[name]

    bound = bind(plan, weights, reload=reload)
    bound.prepare()
    assert bound.release().freed
    back = bound.restore()
    assert list(back) == asked != []
    for name in back:
        assert torch.equal(weights[name], saved[name])
        assert weights[name].stride() == saved[name].stride()


def test_a_reload_of_something_else_leaves_the_layer_as_it_was(h):
    plan = h.plan(h.fused_layer(), role="decode", promises=["weight_update"], restore=True)
    bound = bind(plan, h.weights(plan.layer), reload=lambda name: torch.zeros(3))
    bound.prepare()
    gone = bound.release().freed
    with pytest.raises(PrepareError, match="returned another"):
        bound.restore()
    assert bound.ledger.freed == gone
    assert bound.released


PEAK = """
import json
from npu_backend.testing import sim
sim.start()
import torch
torch.npu.config.allow_internal_format = True
import npu_backend
from npu_backend import Deployment, MlaLayer
from npu_backend.runtime import bind, prepare_and_release
from npu_backend.runtime.prove import seeded_weights

backend = npu_backend.load(third_party=False)
layers = [MlaLayer(layer_id=i, hidden_size=7168, num_heads=4, q_lora_rank=1536, kv_lora_rank=512,
                   qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128) for i in range(6)]
plan = backend.plan(layers, Deployment(role="decode", soc="A3"))
device = torch.device("npu", 0)
weights = {l.layer_id: seeded_weights(l, 1).to(device) for l in layers}
torch.npu.synchronize()
name = "requested_bytes.all"
stats = torch.npu.memory_stats()
if f"{name}.current" not in stats:
    name = "allocated_bytes.all"
resident = stats[f"{name}.current"]
torch.npu.reset_peak_memory_stats()
bound, ledger = prepare_and_release(plan, lambda p: bind(p, weights[p.layer_id]))
stats = torch.npu.memory_stats()
copies = [sum(r.bytes for r in p.weights if r.copy_of) for p in plan]
print(json.dumps({"resident": resident, "peak": stats[f"{name}.peak"], "copies": copies,
                  "after": stats[f"{name}.current"], "freed": ledger.freed,
                  "agrees": ledger.agrees, "exact": name.startswith("requested")}))
"""


@pytest.mark.npu
def test_the_peak_is_what_is_resident_and_one_layers_copies(npu_device):
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["agrees"]
    if not found["exact"]:
        pytest.skip("this torch_npu counts whole blocks, up to 1 MiB more than a copy each")
    # A cast to NZ goes over one turned copy of one weight, which is gone before the next.
    one, largest = max(found["copies"]), 7168 * 1536 * 2
    assert found["peak"] <= found["resident"] + one + largest
    assert found["after"] == found["resident"] + sum(found["copies"]) - found["freed"]


def test_no_warning_where_everything_agrees(h):
    plan = h.plan(h.fused_layer(), role="decode")
    bound = h.bind(plan, h.weights(plan.layer))
    bound.prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bound.release(empty_cache=True).agrees
    assert h.step(bound, rows=2, phase=Phase.DECODE)
