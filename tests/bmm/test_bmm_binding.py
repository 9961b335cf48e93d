"""Bound kernels: no copy that is not declared, one comparison, one graph on each side of 1024."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from npu_backend import Deployment, Phase, PlanMismatchError
from npu_backend.catalog import load_catalog
from npu_backend.planner import matmul
from npu_backend.runtime.kernel import bind_kernel, matmul_operands

T102 = "npu_transpose_batchmatmul[1,0,2]"
T012 = "npu_transpose_batchmatmul[0,1,2]"
BMT = "batch_matmul_transpose"
BMM = "torch.bmm"


class _Copies(TorchDispatchMode):
    """Counts copies of the activation, and copies of such copies."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        # The tensors are held, so that no later storage gets the address of one that died.
        self.held = [x]
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "_to_copy"):
            source = args[1] if name == "copy_" else args[0]
            storages = {t.untyped_storage().data_ptr() for t in self.held}
            if source.untyped_storage().data_ptr() in storages:
                self.count += 1
                self.held.append(out)
        return out


@pytest.mark.parametrize("site", ["v_up", "q_absorb"])
@pytest.mark.parametrize("strategy", [T102, T012, BMT, BMM])
def test_the_activation_is_copied_once_and_only_where_the_offer_says_so(backend, site, strategy):
    spec = matmul(site, 4, 128, 256)
    plan = backend.plan_bmm(spec, Deployment(soc="A3", cann="9.0.0"))
    x, weight = matmul_operands(spec, 7, generator=torch.Generator().manual_seed(0))
    assert x.is_contiguous() == (site == "v_up")
    (candidate,) = [c for c in plan.candidates if c.strategy == strategy]
    kernel = bind_kernel(candidate.offer, candidate.plugin, spec, plan.deployment, weight)
    with _Copies(x) as seen:
        kernel(x)
    # The explicit transpose always, the op that ignores strides for a strided query.
    wanted = strategy == T012 or (strategy == BMT and site == "q_absorb")
    assert seen.count == wanted
    assert candidate.offer.copies_input == wanted


def test_an_activation_whose_copy_is_not_declared_is_refused_where_strides_are_ignored(backend):
    spec = matmul("v_up", 4, 128, 256)
    plan = backend.plan_bmm(spec, Deployment(soc="A3", cann="9.0.0"))
    (candidate,) = [c for c in plan.candidates if c.strategy == BMT]
    _, weight = matmul_operands(spec, 1, generator=torch.Generator())
    kernel = bind_kernel(candidate.offer, candidate.plugin, spec, plan.deployment, weight)
    strided = torch.zeros(3, 4, 256, dtype=torch.bfloat16)[..., :128]
    with pytest.raises(PlanMismatchError, match=r"layout\.contiguous"):
        kernel(strided)
    assert kernel(strided.contiguous()).shape == (3, 4, 256)


def test_the_op_that_wants_a_preallocated_result_is_given_one_and_the_weight_is_contiguous(backend):
    """Recorded by the facade that the kernel calls."""
    spec = matmul("q_absorb", 4, 128, 256)
    plan = backend.plan_bmm(spec, Deployment(soc="A3", cann="9.0.0"))
    (candidate,) = [c for c in plan.candidates if c.strategy == BMT]
    seen = []

    class Ops:
        def batch_matmul_transpose(self, a, b, c):
            seen.append((a, b, c))

    x, weight = matmul_operands(spec, 5, generator=torch.Generator())
    assert not weight.is_contiguous()
    kernel = bind_kernel(
        candidate.offer, candidate.plugin, spec, plan.deployment, weight, ops=Ops()
    )
    out = kernel(x)
    ((a, b, c),) = seen
    assert c is out
    assert tuple(c.shape) == (5, 4, 256)
    assert a.is_contiguous() and b.is_contiguous() and c.is_contiguous()  # noqa: PT018
    kernel(x)
    assert seen[1][1] is b


# --- torch.compile -------------------------------------------------------------------------------


ACROSS = (3, 1023, 1024, 1025, 1500, 7, 2, 2048)
"""The first is not the number of heads, 2: the compiler would take the two sizes for one."""


@pytest.mark.npu(cann="9.2.0", soc="A3")
@pytest.mark.usefixtures("npu_sim")
def test_compiled_across_1024_on_the_real_torch_npu(backend, npu_device):
    from npu_backend.plan import TableEntry
    from npu_backend.runtime.dispatch import phase_callables

    spec = matmul("v_up", 2, 32, 24)
    plan = backend.plan_bmm(spec, Deployment(soc="A3", cann="9.2.0"))
    _, weight = matmul_operands(
        spec, 1, device=npu_device, generator=torch.Generator().manual_seed(1)
    )
    named = {c.strategy: c for c in plan.candidates}
    table = []
    for strategy, tokens in ((BMT, (1, 1024)), (T102, (1025, None))):
        c = named[strategy]
        table.append(
            TableEntry(strategy, "", (Phase.DECODE,), tokens, offer=c.offer, plugin=c.plugin)
        )
    calls = {
        e.strategy: bind_kernel(e.offer, e.plugin, spec, plan.deployment, weight) for e in table
    }
    call = phase_callables(table, lambda e, _: calls[e.strategy], where="here", path=False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call[Phase.DECODE], backend=counter, fullgraph=True, dynamic=True)
    for rows in ACROSS:
        x = torch.randn(rows, 2, 32, device=npu_device).bfloat16()
        assert torch.equal(compiled(x).cpu(), call[Phase.DECODE](x).cpu())
    assert counter.frame_count == 2


# --- tables, notes, invariance -------------------------------------------------------------------


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v3.2"])
def test_both_matmuls_of_mla_and_dsa_layers_have_tables(backend, model):
    import npu_backend

    layer = npu_backend.read_model(model, layers="5").layers[0]
    assert layer.has_indexer is (model == "deepseek-v3.2")
    plan = backend.plan([layer], Deployment(role="null", cann="9.0.0", requests="path=absorb"))
    tables = plan.layers[0]
    # q_absorb: B x K = 128 x 128 is below the limit; v_up: 128 x 512 is not.
    assert [e.strategy for e in tables.q_absorb] == [T102]
    assert [e.strategy for e in tables.v_up] == [T012]
    for table in (tables.q_absorb, tables.v_up):
        phases = [p for e in table for p in e.phases]
        assert Counter(phases) == dict.fromkeys(Deployment(role="null").reach(is_nextn=False), 1)


def test_a_note_forbids_a_kernel_for_a_model_and_names_its_source(plan_bmm):
    plan = plan_bmm("v_up", 96, 512, 128, matmul_options={"model_type": "kimi_k3"})
    (verdict,) = [v for v in plan.verdicts if v.strategy == BMT]
    assert verdict.candidate is None
    codes = {r.code: r.message for r in verdict.reasons}
    assert "Kimi-K3 is reported numerically divergent" in codes["model.numerics"]
    assert "sgl-project/sgl-kernel-npu" in codes["model.numerics"]
    others = plan_bmm("v_up", 96, 512, 128, matmul_options={"model_type": "kimi_k2"})
    assert next(v for v in others.verdicts if v.strategy == BMT).candidate is not None


def test_a_user_s_note_forbids_too(tmp_path):
    import json

    import npu_backend
    from npu_backend.api import Backend

    note = {"strategy": T102, "code": "model.numerics", "message": "differs", "source": "our lab"}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"models": {"notes": {"kimi-k2": [note]}}}))
    mine = npu_backend.load(third_party=False, catalog=file)
    spec = matmul("v_up", 64, 512, 128, model_type="kimi_k2")
    plan = Backend(mine.registry, mine.catalog).plan_bmm(
        spec, Deployment(catalog=mine.catalog, cann="9.0.0")
    )
    assert plan.table[0].strategy == T012
    (verdict,) = [v for v in plan.verdicts if v.strategy == T102]
    assert "differs [our lab]" in str(verdict.reasons[0])


def test_batch_invariance_is_one_strategy_or_an_error_that_says_why(plan_bmm, backend):
    from npu_backend import RequestUnmetError, read_model

    # K = 192 is no multiple of 128: on CANN 8.5 the op that takes 1024 rows is next.
    free = plan_bmm("q_absorb", 64, 192, 512, cann="8.5.0")
    assert [e.strategy for e in free.table] == [BMT, BMM]
    fixed = plan_bmm("q_absorb", 64, 192, 512, cann="8.5.0", batch_invariant=True)
    assert [(e.strategy, e.tokens) for e in fixed.table] == [(BMM, (1, None))]
    layers = read_model("glm-5.2", layers="5")
    with pytest.raises(RequestUnmetError) as caught:
        backend.plan(layers, Deployment(cann="8.5.0", batch_invariant=True, requests=f"v_up={BMT}"))
    assert "batch invariance asks one strategy for all row counts" in str(caught.value)
    assert "takes 1 to 1024 rows [CANN 8.5.0; sgl-kernel-npu" in str(caught.value)


def test_every_limit_of_the_four_kernels_has_a_source():
    catalog = load_catalog()
    for op in ("npu_transpose_batchmatmul", BMT):
        for key, row in catalog.limits[op].items():
            assert key == "op" or catalog.sources[row["source"]]
