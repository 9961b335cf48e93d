"""The facade: references on the CPU, real ops elsewhere, schemas checked before any step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from importlib import metadata

import pytest
import torch

from npu_backend import Offer, SchemaMismatchError
from npu_backend.catalog import load_catalog
from npu_backend.runtime import reference
from npu_backend.runtime.ops import device, schemas
from npu_backend.runtime.ops.cpu import CpuOps
from npu_backend.runtime.ops.device import DeviceOps
from npu_backend.runtime.ops.schemas import check_schemas

CATALOG = load_catalog()


@pytest.fixture
def registered(monkeypatch):
    """Only what a test defines is registered under torch_npu's namespace.

    The facade is given the test's own table, so that what the process has loaded beside it, such as
    the real torch_npu, changes nothing.
    """
    table = defaultdict(list)
    library = torch.library.Library("npu", "FRAGMENT")

    def define(schema):
        parsed = torch._C.parse_schema(f"npu::{schema}")
        table[parsed.name].append(parsed)
        if not torch._C._jit_get_schemas_for_operator(parsed.name):
            library.define(schema)

    for module in (schemas, device):
        monkeypatch.setattr(module, "installed_schemas", lambda op: tuple(table.get(op, ())))
    yield define
    library._destroy()


def _check(*names, line="26.2", library="sgl-kernel-npu"):
    check_schemas(names, catalog=CATALOG, line=line, library=library, whom="layer 7, path")


def test_the_catalogs_own_schema_is_accepted(registered):
    registered(CATALOG.schemas["lines"]["26.2"]["ops"]["npu::npu_rms_norm"][0])
    _check("npu::npu_rms_norm")


def test_an_absent_op_is_named_with_line_and_schema(registered):
    with pytest.raises(SchemaMismatchError) as caught:
        _check("npu::npu_interleave_rope", line="26.1")
    text = str(caught.value)
    assert "npu::npu_interleave_rope is planned and not installed (TorchNPU line 26.1)" in text
    assert "catalog, line 26.1: npu_interleave_rope(Tensor x" in text
    assert "installed: absent" in text
    assert "layer 7, path" in text


def test_another_schema_is_told_with_both(registered):
    registered("npu_interleave_rope(Tensor x, Tensor cos_sin) -> Tensor")
    with pytest.raises(SchemaMismatchError) as caught:
        _check("npu::npu_interleave_rope")
    text = str(caught.value)
    assert "has another schema" in text
    assert "catalog, line 26.2: npu_interleave_rope(Tensor x, Tensor cos, Tensor sin)" in text
    assert "installed: npu::npu_interleave_rope(Tensor x, Tensor cos_sin)" in text


def test_the_schema_of_the_installed_line_counts(registered):
    """npu_format_cast of line 7.3 is right where line 7.3 is installed, and wrong with 26.2."""
    for schema in CATALOG.schemas["lines"]["7.3"]["ops"]["npu::npu_format_cast"]:
        registered(schema)
    _check("npu::npu_format_cast", line="7.3")
    with pytest.raises(SchemaMismatchError, match="has another schema"):
        _check("npu::npu_format_cast", line="26.2")


def test_a_vendors_own_op_need_only_be_there(registered):
    registered("fastest_bmm(Tensor a, Tensor b) -> Tensor")
    _check("npu::fastest_bmm")
    with pytest.raises(SchemaMismatchError, match=r"catalog, line 26\.2: not recorded"):
        _check("npu::slowest_bmm")


def test_the_two_libraries_are_never_confused(registered):
    registered(CATALOG.schemas["libraries"]["sgl-kernel-npu"]["ops"]["npu::mla_preprocess"][0])
    _check("npu::mla_preprocess")
    ops = DeviceOps(CATALOG, "26.2", "vllm-ascend")
    with pytest.raises(SchemaMismatchError, match="_C_ascend::mla_preprocess is not installed"):
        ops.mla_preprocess()
    assert DeviceOps(CATALOG, "26.2", "sgl-kernel-npu").mla_preprocess.name() == (
        "npu::mla_preprocess"
    )


def test_the_second_version_of_the_cache_write_is_used_where_the_line_has_it(registered):
    for version in ("", "_v2"):
        name = f"npu::npu_kv_rmsnorm_rope_cache{version}"
        registered(CATALOG.schemas["lines"]["7.2"]["ops"][name][0])
    new, old = (DeviceOps(CATALOG, line, "none") for line in ("7.2", "7.1"))
    assert new._kv.name() == "npu::npu_kv_rmsnorm_rope_cache_v2"
    assert old._kv.name() == "npu::npu_kv_rmsnorm_rope_cache"
    new.check(["npu::npu_kv_rmsnorm_rope_cache"], "layer 7")


def test_a_planned_op_is_checked_when_the_layer_is_bound(h):
    class Impl:
        ops = ("vendor::fastest",)

        def prepare(self, weights):
            raise AssertionError("nothing is prepared")

        def bind(self, prepared, cache):
            raise AssertionError

    h.plugin(Impl=Impl)
    offer = Offer(strategy="fast", impl="fake_plugin:Impl", reads=("w_vc",))
    with pytest.raises(SchemaMismatchError, match="there is no reference of it on the CPU") as err:
        h.bind(h.plan(answers=h.BuiltIns(v_up=[offer])))
    assert "fake-dist" in str(err.value)


def test_every_reference_stands_behind_an_op_of_the_same_results():
    ops = CpuOps()
    x, w = torch.randn(3, 2, 4), torch.randn(2, 4, 5)
    found = ops.npu_transpose_batchmatmul(x, w, perm_x1=(1, 0, 2))
    assert torch.equal(found, reference.npu_transpose_batchmatmul(x, w, perm_x1=(1, 0, 2)))
    out = torch.empty(3, 2, 5)
    ops.batch_matmul_transpose(x, w, out)
    assert torch.equal(out, found)
    values, scale = ops.npu_dynamic_quant(torch.randn(3, 8))
    assert (values.dtype, scale.shape) == (torch.int8, (3,))


FAKES = {
    "npu_transpose_batchmatmul": lambda o, n: o.npu_transpose_batchmatmul(
        n(3, 2, 4), n(2, 4, 5), perm_x1=(1, 0, 2)
    ),
    "npu_transpose_batchmatmul straight": lambda o, n: o.npu_transpose_batchmatmul(
        n(2, 3, 4), n(2, 5, 4), perm_x2=(0, 2, 1)
    ),
    "npu_rms_norm": lambda o, n: o.npu_rms_norm(n(3, 8), n(8), 1e-6),
    "npu_interleave_rope": lambda o, n: o.npu_interleave_rope(
        n(3, 2, 1, 8), n(3, 1, 1, 8), n(3, 1, 1, 8)
    ),
    "npu_dynamic_quant": lambda o, n: o.npu_dynamic_quant(n(3, 8)),
    "npu_quantize": lambda o, n: o.npu_quantize(n(3, 8), n(1), None, torch.qint8, -1),
    "npu_quant_matmul": lambda o, n: o.npu_quant_matmul(
        n(3, 8).to(torch.int8), n(8, 4).to(torch.int8), n(4), output_dtype=torch.bfloat16
    ),
    "npu_mla_prolog_v3": lambda o, n: o.npu_mla_prolog_v3(
        n(3, 8),
        n(8, 6),
        n(6, 2 * 6),
        n(2, 4, 5),
        n(8, 7),
        n(6),
        n(5),
        n(3, 2),
        n(3, 2),
        n(1, 16, 1, 5),
        n(1, 16, 1, 2),
        cache_index=torch.arange(3, device=n(1).device),
        query_norm_flag=True,
    ),
}


@pytest.mark.parametrize("name", FAKES)
def test_fake_kernels_agree_with_real_ones(name):
    """What torch.compile thinks comes out is what comes out."""
    ops = CpuOps()
    real = FAKES[name](ops, lambda *shape: torch.rand(*shape) + 0.5)
    fake = FAKES[name](ops, lambda *shape: torch.empty(*shape, device="meta"))
    pair = (real, fake) if isinstance(real, tuple) else ((real,), (fake,))
    for a, b in zip(*pair, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


ON_THE_SIMULATION = """
import json
from npu_backend.testing import sim
running = sim.start()
import torch
torch.npu.config.allow_internal_format = True
from npu_backend import Deployment, Indexer, MlaLayer, Phase
from npu_backend.offers import Answer, PluginInfo
from npu_backend.planner import plan_model
from npu_backend.runtime import LayerCache, bind
from npu_backend.runtime.prove.seeded import seeded_weights
from npu_backend_builtin import absorb, mlapo, mlaprolog, role_release, transpose_bmm

class Answers:
    def ask(self, name, records):
        records = records if isinstance(records, tuple) else (records,)
        return (Answer(PluginInfo(name), records),)
    def ask_paths(self, layer, deployment):
        return sum((self.ask(m.__name__, m.select_preprocess_path(layer, deployment))
                    for m in (mlaprolog, mlapo, absorb)), ())
    def ask_bmm(self, bmm, deployment):
        return self.ask("bmm", transpose_bmm.select_bmm_kernel(bmm, deployment))
    def ask_release(self, layer, deployment, readers):
        return self.ask("release", role_release.release_weights(layer, deployment, readers))

def layer(**changes):
    base = dict(layer_id=0, hidden_size=7168, num_heads=2, q_lora_rank=1536, kv_lora_rank=512,
                qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    return MlaLayer(**{**base, **changes})

STATIC = {"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"}
DYNAMIC = {"fused_qkv_a_proj": "w8a8-dynamic", "q_b_proj": "w8a8-dynamic"}
CASES = {
    "mlaprolog": (layer(indexer=Indexer("own")), "mlaprolog"),
    "mlaprolog int8": (layer(quant=DYNAMIC), "mlaprolog"),
    "mlapo": (layer(quant=STATIC), "mlapo"),
    "absorb": (layer(), "absorb"),
    "absorb int8": (layer(quant=DYNAMIC), "absorb"),
    "absorb static": (layer(quant=STATIC), "absorb"),
    "absorb small": (layer(hidden_size=64, q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=16,
                           qk_nope_head_dim=16, v_head_dim=16), "absorb"),
}
found = {}
here = dict(role="decode", cann=running.settings.cann, torch_npu=running.line)
lacks = [p for p in ("mlaprolog",) if not Deployment(**here).has_op("npu::npu_mla_prolog_v3")]
for name, (described, path) in CASES.items():
    if path in lacks:
        continue
    plan = plan_model([described], Deployment(requests=f"path={path}", **here), Answers())
    results = []
    for device in ("cpu", "npu:0"):
        device = torch.device(device)
        weights = seeded_weights(described, 1).to(device)
        cache = LayerCache.allocate(described, 2, device=device, max_positions=32)
        bound = bind(plan.layers[0], weights, cache)
        bound.prepare()
        hidden = torch.randn(4, described.hidden_size, generator=torch.Generator().manual_seed(0))
        args = (hidden.bfloat16().to(device), torch.arange(4).to(device),
                (torch.arange(4) + 5).to(device))
        def step():
            result = bound.preprocess(*args, phase=Phase.DECODE)
            out = bound.v_up(result.q_nope)
            return [t.float().cpu() for t in (*result, out, cache.k_nope, cache.k_rope)
                    if t is not None]
        before = step()
        ledger = bound.release()
        after = step()
        assert all(torch.equal(a, b) for a, b in zip(before, after)), name
        results.append(before)
    worst = max(((a - b).norm() / b.norm()).item() for a, b in zip(*results))
    found[name] = {"worst": worst, "ops": bound._units[None, plan.layers[0].path[0].offer]
                   .weights.ops.name, **ledger.to_dict()}
print(json.dumps(found))
"""


def test_on_the_simulated_npu_real_schemas_and_the_allocator_agree():
    """The same layers on CPU tensors and on the simulated device, whose ops, schemas, allocator and
    lifetimes are torch_npu's own."""
    try:
        metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        pytest.skip("torch-npu is not installed")
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_SIMULATION],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    line = load_catalog().versions.line_of(metadata.version("torch-npu"))
    # Lines before 7.3 have no npu_mla_prolog_v3; all the rest runs on every line.
    assert len(found) == (7 if load_catalog().has_op("npu::npu_mla_prolog_v3", line) else 5)
    for name, row in found.items():
        assert row["ops"] == "npu", name
        assert row["worst"] <= 2e-2, (name, row["worst"])
        assert row["agrees"], (name, row)
        slack = 0 if line != "7.0" else 4 * 1024
        assert 0 <= row["allocator_freed"] - row["planned"] <= slack, name
        assert row["planned"] > 0
        exact = "requested_bytes.all.current"
        assert row["allocator"] == (exact if line != "7.0" else "allocated_bytes.all.current")
