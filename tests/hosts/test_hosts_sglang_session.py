"""A model's life under the adapter, with plain modules in the place of SGLang's, on the CPU."""

from __future__ import annotations

import functools
from types import SimpleNamespace as Record

import pytest

torch = pytest.importorskip("torch")

from npu_backend import PlanMismatchError, PrepareError  # noqa: E402
from npu_backend.hosts.sglang import adapter as adapters  # noqa: E402
from npu_backend.hosts.sglang import route as routes  # noqa: E402
from npu_backend.hosts.sglang.ranks import Verdict, agree  # noqa: E402
from npu_backend.hosts.sglang.settings import Machine  # noqa: E402
from npu_backend.hosts.sglang.updates import (  # noqa: E402
    EXPORT_REFUSAL,
    REFUSAL,
    Updates,
    role_switch_refusal,
)
from npu_backend.runtime import is_tombstone  # noqa: E402

from .conftest import ForwardMode, context  # noqa: E402

HIDDEN, Q, KV, NOPE, ROPE, V, HEADS = 7168, 1536, 512, 128, 64, 128, 2
MACHINE = Machine(soc="Ascend910_9391", cann="9.2.0", torch_npu="2.13.0")


class UnquantizedLinearMethod:
    """Known by name, as SGLang's is."""


@functools.cache
def values(inside, outside, seed):
    """Random weights, made once for all models of a seed."""
    generator = torch.Generator().manual_seed(seed + inside + outside)
    return torch.randn(outside, inside, generator=generator).to(torch.bfloat16) * 0.02


class Linear(torch.nn.Module):
    def __init__(self, inside, outside, seed):
        super().__init__()
        data = values(inside, outside, seed).clone()
        self.weight = torch.nn.Parameter(data, requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight), None


class Norm(torch.nn.Module):
    variance_epsilon = 1e-6

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16), False)


class DeepseekV2AttentionMLA(torch.nn.Module):
    """What the adapter reads of SGLang's class of this name."""

    def __init__(self, layer_id=0, seed=0, **changes):
        super().__init__()
        seed += layer_id
        self.layer_id, self.is_nextn, self.use_dsa = layer_id, False, False
        self.hidden_size, self.num_heads, self.num_local_heads = HIDDEN, HEADS, HEADS
        self.q_lora_rank, self.kv_lora_rank = Q, KV
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = NOPE, ROPE, V
        self.indexer = self.skip_topk = self.next_skip_topk = self.alt_stream = None
        self.use_deepseek_yarn_rope = True
        self.fused_qkv_a_proj_with_mqa = Linear(HIDDEN, Q + KV + ROPE, seed)
        self.q_b_proj = Linear(Q, HEADS * (NOPE + ROPE), seed)
        self.kv_b_proj = Linear(KV, HEADS * (NOPE + V), seed)
        self.o_proj = Linear(HEADS * V, HIDDEN, seed)
        self.q_a_layernorm, self.kv_a_layernorm = Norm(Q), Norm(KV)
        table = torch.arange(64.0)[:, None] / (10000 ** (torch.arange(0, ROPE, 2) / ROPE))
        self.rotary_emb = Record(cos_sin_cache=torch.cat((table.cos(), table.sin()), -1))
        self.w_kc = self.w_vc = None
        for name, value in changes.items():
            setattr(self, name, value)

    def post_load(self):
        split = self.kv_b_proj.weight.unflatten(0, (-1, NOPE + V)).split([NOPE, V], dim=1)
        w_kc = split[0].transpose(1, 2).contiguous().transpose(1, 2)
        w_vc = split[1].contiguous().transpose(1, 2).contiguous()
        for name, value in (("w_kc", w_kc), ("w_vc", w_vc)):
            held = getattr(self, name)
            setattr(self, name, value if held is None else held.copy_(value))

    def attn_mqa(self, q, k, v, batch, **more):
        """Stands for attention: what matters is who is asked, and with what."""
        self.asked = more
        return q.reshape(q.shape[0], -1)


class Model(torch.nn.Module):
    config = Record(model_type="deepseek_v3", num_hidden_layers=2)

    def __init__(self, layers=2, **changes):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            DeepseekV2AttentionMLA(layer_id, **changes) for layer_id in range(layers)
        )
        self.load()

    def load(self):
        for layer in self.layers:
            layer.post_load()


class Pool:
    """Caches by layer id, as SGLang's NPU pool gives them."""

    def __init__(self, page=128, dtype=torch.bfloat16):
        self.made, self.page, self.dtype = {}, page, dtype

    def get_kv_buffer(self, layer_id):
        if layer_id not in self.made:
            shape = (2, self.page, 1)
            self.made[layer_id] = (
                torch.zeros((*shape, KV), dtype=self.dtype),
                torch.zeros((*shape, ROPE), dtype=self.dtype),
            )
        return self.made[layer_id]


class Runner:
    startup_weight_load = None
    is_draft_worker = False
    kv_cache_dtype = torch.bfloat16

    def __init__(self, model):
        self.model = model
        self.model_config = Record(hf_config=model.config, model_path="model")
        self.token_to_kv_pool = Pool()


@pytest.fixture
def loaded(backend, modules):
    """Return ``load(environ, **context) -> (adapter, runner)``, after load and pool."""

    def load(environ=None, *, model=None, pool=True, **arguments):
        published = {"disaggregation_mode": "decode", **arguments}
        modules(runtime_context=context(**published))
        environ = {"SGLANG_NPU_USE_MLAPO": "1", **(environ or {})}
        adapter = adapters.Adapter(
            adapters.Environment.read(environ),
            machine=lambda: MACHINE,
            backend=lambda: backend,
            environ=environ,
        )
        runner = Runner(model or Model())
        adapter.after_load(None, runner)
        if pool:
            adapter.after_pool(None, runner)
        return adapter, runner

    return load


def batch(mode):
    return Record(forward_mode=ForwardMode[mode], out_cache_loc=torch.tensor([128, 129, 130]))


def unreached(*_, **__):
    raise AssertionError("SGLang's own function was reached")


def step(attention, mode="DECODE", rows=3):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16)
    hook = routes.hooks(lambda layer_id, rows: rows)["forward_mla_prepare_npu"]
    return hook(unreached, attention, torch.arange(rows) + 4, hidden, batch(mode), None, False)


def core(attention, prepared, gate=None):
    q_pe, k_pe, q_nope, k_nope, one, zero, positions, chosen = prepared
    hook = routes.hooks(lambda layer_id, rows: rows)["forward_mla_core_npu"]
    inner = (q_pe, k_pe, q_nope, k_nope, one, zero, positions, chosen)
    return hook(unreached, attention, *inner, gate)


def test_what_goes_is_gone_before_there_is_a_pool_and_steps_are_served_after(loaded):
    adapter, runner = loaded(pool=False)
    session = adapter.sessions[id(runner.model)]
    assert session.ledger.agrees
    first = runner.model.layers[0]
    assert is_tombstone(first.w_kc)
    assert is_tombstone(first.fused_qkv_a_proj_with_mqa.weight)
    assert not is_tombstone(first.w_vc)
    assert routes.route_of(first) is None
    adapter.after_pool(None, runner)

    prepared = step(first)

    caches = runner.token_to_kv_pool.get_kv_buffer(0)
    assert prepared[1] is caches[1]
    assert prepared[3] is caches[0]
    assert len(prepared) == 8, "what forward_mla_core_npu is given"
    assert caches[0].reshape(-1, KV)[[128, 129, 130]].abs().sum() > 0
    output = core(first, prepared)
    assert output.shape == (3, HIDDEN)
    assert first.asked["save_kv_cache"] is False
    assert "topk_indices" not in first.asked


def test_each_function_gives_as_many_values_as_sglang_unpacks_whatever_path_serves(loaded):
    """0.5.23 unpacks eight results of mlaprolog into seven names."""
    hook = routes.hooks(lambda layer_id, rows: rows)["npu_mla_preprocess"]
    hidden = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    for mlapo in ("1", "0"):
        _, runner = loaded({"SGLANG_NPU_USE_MLAPO": mlapo})
        first, one, zero = runner.model.layers[0], batch("DECODE"), object()
        found = hook(unreached, first, hidden, torch.arange(3), one, zero)
        assert len(found) == 9
        assert found[5] is one
        assert found[6] is zero
        assert len(step(first)) == 8
        assert not hasattr(first, "mla_preprocess"), "SGLang's own object is never made"


def test_a_layer_that_is_not_the_first_has_its_own_cos_and_sin(loaded):
    """0.5.23 computes them in layer 0: stale on a later stage, or where it is no MLA layer."""
    _, runner = loaded()
    first, second = runner.model.layers
    alone = [t.clone() for t in (step(second)[0], step(second)[2])]
    hook = routes.hooks(lambda layer_id, rows: rows)["forward_mla_prepare_npu"]
    other = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    hook(unreached, first, torch.arange(3) + 40, other, batch("DECODE"), None, False)
    again = step(second)
    assert torch.equal(alone[0], again[0])
    assert torch.equal(alone[1], again[2])


def test_an_indexer_s_own_query_runs_beside_the_path_on_the_module_s_stream():
    """0.5.23 gives ``wait_event`` a stream; the runtime records an event and waits for that."""
    asked = []

    class Layer:
        def preprocess_beside(self, *inputs, **more):
            asked.append(more)
            return "result", more["other"]()

    route = routes.Route.__new__(routes.Route)
    route.layer, route.other = Layer(), lambda hidden: hidden + 1
    route.again, route.phases = (False, True), (None, routes.Phase.DECODE)
    side = object()
    one = Record(forward_mode=1, out_cache_loc=torch.tensor([1]))
    found = route.preprocess(Record(alt_stream=side), torch.ones(1, 2), torch.tensor([0]), one)
    assert found[0] == "result"
    assert torch.equal(found[1], torch.full((1, 2), 2.0))
    assert asked[0]["stream"] is side
    assert asked[0]["phase"] is routes.Phase.DECODE


def test_a_gate_is_applied_before_the_output_projection(loaded):
    _, runner = loaded()
    first = runner.model.layers[0]
    first._apply_gated = lambda values, gate: values * gate
    plain = core(first, step(first))
    assert torch.equal(
        core(first, step(first), gate=torch.zeros(1, dtype=plain.dtype)), torch.zeros_like(plain)
    )
    assert plain.abs().sum() > 0


def test_a_module_without_a_route_is_sglang_s(loaded):
    hooks = routes.hooks(lambda layer_id, rows: rows)
    other = DeepseekV2AttentionMLA()
    for name, hook in hooks.items():
        count = {"forward_mla_core_npu": 8, "forward_dsa_core_npu": 9, "npu_mla_preprocess": 4}
        given = tuple(range(count.get(name, 5)))
        seen = []
        hook(lambda *args, seen=seen: seen.append(args), other, *given)
        assert seen[0][0] is other
        assert seen[0][1 : len(given) + 1] == given


def test_a_mode_without_a_phase_is_refused_by_name(loaded):
    _, runner = loaded()
    with pytest.raises(Exception, match="the forward mode 7 has no phase"):
        step(runner.model.layers[0], "PREBUILT")


def test_a_phase_that_is_not_planned_does_not_read_what_is_gone(loaded):
    _, runner = loaded()
    with pytest.raises(Exception, match="extend"):
        step(runner.model.layers[0], "EXTEND")


def test_no_rows_give_no_rows(loaded):
    _, runner = loaded()
    q_pe, _, q_nope, *_ = step(runner.model.layers[0], "IDLE", rows=0)
    assert (q_pe.shape, q_nope.shape) == ((0, HEADS, ROPE), (0, HEADS, KV))


def test_a_second_call_for_the_same_model_changes_nothing(loaded):
    adapter, runner = loaded()
    session = adapter.sessions[id(runner.model)]
    adapter.after_load(None, runner)
    assert adapter.sessions == {id(runner.model): session}


def test_a_pool_of_another_page_size_stops_for_weights_are_gone(loaded):
    adapter, runner = loaded(pool=False)
    runner.token_to_kv_pool = Pool(page=64)
    with pytest.raises(PlanMismatchError, match="not that of the plan"):
        adapter.after_pool(None, runner)


def test_a_pool_behind_another_is_found(loaded):
    adapter, runner = loaded(pool=False)
    runner.token_to_kv_pool = Record(full_kv_pool=Pool())
    adapter.after_pool(None, runner)
    assert routes.route_of(runner.model.layers[1]) is not None


def test_lora_on_a_projection_leaves_sglang_alone(loaded, caplog):
    class BaseLayerWithLoRA(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.weight = base, base.weight

    model = Model()
    model.layers[1].q_b_proj = BaseLayerWithLoRA(model.layers[1].q_b_proj)
    adapter, _ = loaded(model=model, enable_lora=True, environ={"SGLANG_NPU_USE_MLAPO": "0"})
    assert not adapter.sessions
    assert "LoRA is on projections of the layer" in caplog.text
    assert "q_b_proj" in caplog.text


# --- later ----------------------------------------------------------------------------------------


def updater(model):
    return Record(get_model=lambda: model)


@pytest.mark.parametrize("restore", ["0", "1"])
def test_new_weights_are_served_and_what_was_gone_goes_again(loaded, restore):
    adapter, runner = loaded(
        {"NPU_BACKEND_SGLANG_PROMISES": "weight_update", "NPU_BACKEND_SGLANG_RESTORE": restore}
    )
    first = runner.model.layers[0]
    assert is_tombstone(first.w_kc) == (restore == "1")
    before = step(first)[2].clone()
    fresh = Model(seed=77)
    updates = Updates(lambda model: adapter.sessions.get(id(model)))

    def load(_):
        own = dict(runner.model.named_parameters())
        for name, value in fresh.named_parameters():
            own[name].data.copy_(value)
        runner.model.load()
        return True, "ok"

    assert updates.update(load, updater(runner.model)) == (True, "ok")
    after = step(first)[2]
    assert not torch.equal(before, after)
    _, other = loaded(model=fresh)
    assert torch.equal(after, step(other.model.layers[0])[2])
    assert is_tombstone(first.w_kc) == (restore == "1")


def test_steps_are_refused_while_new_weights_come(loaded):
    adapter, runner = loaded(
        {"NPU_BACKEND_SGLANG_PROMISES": "weight_update", "NPU_BACKEND_SGLANG_RESTORE": "1"}
    )
    updates = Updates(lambda model: adapter.sessions.get(id(model)))
    updates.begin(lambda _: None, updater(runner.model))
    with pytest.raises(PrepareError, match="update"):
        step(runner.model.layers[0])
    updates.end(lambda _, **__: None, updater(runner.model), run_post_load=False)
    step(runner.model.layers[0])


def refuse(*_, **__):
    raise RuntimeError("not now")


def test_a_session_of_updates_that_sglang_refuses_leaves_the_model_serving(loaded):
    adapter, runner = loaded(
        {"NPU_BACKEND_SGLANG_PROMISES": "weight_update", "NPU_BACKEND_SGLANG_RESTORE": "1"}
    )
    first = runner.model.layers[0]
    before = step(first)[2].clone()
    updates = Updates(lambda model: adapter.sessions.get(id(model)))
    with pytest.raises(RuntimeError, match="not now"):
        updates.begin(refuse, updater(runner.model))
    assert torch.equal(step(first)[2], before)
    assert is_tombstone(first.w_kc)
    # It was no session: an update by itself is stood around again.
    assert updates.update(lambda _: (True, "ok"), updater(runner.model)) == (True, "ok")
    assert torch.equal(step(first)[2], before)


def test_where_one_layer_cannot_come_back_the_others_serve_on(loaded, monkeypatch):
    adapter, runner = loaded(
        {"NPU_BACKEND_SGLANG_PROMISES": "weight_update", "NPU_BACKEND_SGLANG_RESTORE": "1"}
    )
    session = adapter.sessions[id(runner.model)]
    layers = runner.model.layers
    before = [step(layer)[2].clone() for layer in layers]
    assert len(layers) > 1
    monkeypatch.setattr(session.parts[-1].bound, "before_update", refuse)
    with pytest.raises(RuntimeError, match="not now"):
        session.before_update()
    for layer, values in zip(layers, before, strict=True):
        assert torch.equal(step(layer)[2], values)
    assert is_tombstone(layers[0].w_kc)


def test_without_a_promise_the_engine_is_told_to_refuse(loaded):
    adapter, runner = loaded()
    session = adapter.sessions[id(runner.model)]
    assert session.update_refusal is not None
    for layer in runner.model.layers:
        assert "PROMISES=weight_update" in getattr(layer, REFUSAL)
        assert "PROMISES=export" in getattr(layer, EXPORT_REFUSAL)
    updates = Updates(lambda model: adapter.sessions.get(id(model)))
    assert updates.update(lambda _: (False, "refused"), updater(runner.model)) == (False, "refused")


def test_a_session_of_refused_updates_changes_nothing_and_says_so(loaded, caplog):
    """SGLang begins and ends them unasked; at the end it derives w_kc from what is gone."""
    adapter, runner = loaded()
    first = runner.model.layers[0]
    before = step(first)[2].clone()
    updates = Updates(lambda model: adapter.sessions.get(id(model)))
    updates.begin(refuse, updater(runner.model))
    assert "PROMISES=weight_update" in caplog.text
    updates.end(refuse, updater(runner.model), run_post_load=True)
    assert torch.equal(step(first)[2], before)


class NPUW8A8Int8DynamicLinearMethod:
    """Known by name, as SGLang's is."""


def as_dynamic_int8(linear):
    """Leave a linear layer as SGLang's processing after a load does: int8, turned, a flat scale."""
    weight = linear.weight.data.float()
    scale = weight.abs().amax(dim=1) / 127
    data = torch.round(weight / scale[:, None]).to(torch.int8)
    linear.weight = torch.nn.Parameter(data.t().contiguous(), requires_grad=False)
    linear.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    linear.quant_method = NPUW8A8Int8DynamicLinearMethod()


@pytest.mark.parametrize("promises", ["", "weight_update"])
def test_w8a8_is_not_updated_for_sglang_would_turn_it_twice(loaded, promises):
    model = Model()
    for layer in model.layers:
        as_dynamic_int8(layer.q_b_proj)
        as_dynamic_int8(layer.fused_qkv_a_proj_with_mqa)
    adapter, _ = loaded({"NPU_BACKEND_SGLANG_PROMISES": promises} if promises else {}, model=model)
    for layer in model.layers:
        refusal = getattr(layer, REFUSAL)
        assert "is w8a8-dynamic: SGLang turns such weights" in refusal
        assert "restart with the new weights" in refusal
        assert "PROMISES" not in refusal, "a promise does not help"
    before = step(model.layers[0])[2].clone()
    updates = Updates(lambda model: adapter.sessions.get(id(model)))
    updates.begin(refuse, updater(model))
    updates.end(refuse, updater(model), run_post_load=True)
    assert torch.equal(step(model.layers[0])[2], before)


def test_a_model_that_sglang_serves_alone_is_updated_by_sglang_alone():
    updates = Updates(lambda model: None)
    assert updates.begin(lambda _: "began", updater(None)) == "began"
    assert updates.end(lambda _, **__: "ended", updater(None), run_post_load=True) == "ended"
    assert updates.update(lambda _, path: path, updater(None), "path") == "path"


def test_waking_weights_are_prepared_anew_and_a_waking_cache_is_not(loaded):
    adapter, runner = loaded({"NPU_BACKEND_SGLANG_PROMISES": "weight_update"})
    bound = adapter.sessions[id(runner.model)].parts[0].bound
    adapter.around_wake(lambda *_: None, None, Record(tags=["kv_cache"]))
    assert bound.generation == 0
    adapter.around_wake(lambda *_: None, None, Record(tags=["weights"]))
    assert bound.generation == 1
    adapter.around_wake(lambda *_: None, None, Record(tags=None))
    assert bound.generation == 2


def test_a_role_is_refused_where_a_layer_does_not_cover_it(loaded):
    adapter, _ = loaded()
    refusal = role_switch_refusal(adapter.sessions.values(), "prefill")
    assert "without extend" in refusal
    assert role_switch_refusal(adapter.sessions.values(), "decode") is None
    assert role_switch_refusal(adapter.sessions.values(), "nonsense") is None
    assert role_switch_refusal([], "prefill") is None


# --- standing aside -------------------------------------------------------------------------------


def test_a_failure_after_binding_leaves_everything_as_it_was(loaded, monkeypatch, caplog):
    from npu_backend.hosts.sglang import session

    bind = session.bind

    def failing(plan, tensors, **options):
        bound = bind(plan, tensors, **options)
        if plan.layer_id == 1:
            raise PrepareError("no room", whom="layer 1", why="x", remedy="y")
        return bound

    monkeypatch.setattr(session, "bind", failing)
    model = Model()
    strides = [layer.w_kc.stride() for layer in model.layers]
    values = [layer.w_kc.clone() for layer in model.layers]
    adapter, _ = loaded(model=model)
    assert not adapter.sessions
    for layer, stride, value in zip(model.layers, strides, values, strict=True):
        assert layer.w_kc.stride() == stride
        assert torch.equal(layer.w_kc, value)
        assert not is_tombstone(layer.w_kc)
        assert REFUSAL not in vars(layer)
    assert caplog.text.count("as if npu-backend were not installed") == 1
    assert "no room" in caplog.text


def test_strides_come_back_where_a_kernel_had_its_weight_turned():
    """SGLang's own release is a copy's only while w_kc is strided: facts of its loader."""
    from npu_backend.hosts.sglang.translate import layer_of
    from npu_backend.hosts.sglang.weights import HostWeights

    attention = DeepseekV2AttentionMLA()
    attention.post_load()
    before, values = attention.w_kc.stride(), attention.w_kc.clone()
    layer = layer_of(attention, adapters.read_settings(context(), {}))
    weights = HostWeights(attention, layer)
    attention.w_kc.data = attention.w_kc.data.contiguous()
    assert attention.w_kc.stride() != before
    weights.as_loaded()
    assert attention.w_kc.stride() == before
    assert torch.equal(attention.w_kc, values)


def test_reasons_that_ranks_share_are_told_once_with_the_ranks():
    verdict = Verdict(((0, "a"), (2, "a"), (3, "b")), rank=2)
    assert not verdict.go_on
    assert verdict.words == ("rank 0, 2: a", "rank 3: b")
    assert agree(None, None).go_on
    assert agree(ValueError("x"), None).words == ("rank 0: ValueError: x",)


def test_a_group_that_cannot_be_known_leaves_sglang_alone(loaded, monkeypatch, caplog):
    def unknown(_):
        raise RuntimeError("parallel name 'tp_group' has not been written")

    monkeypatch.setattr(adapters, "tp_group", unknown)
    adapter, runner = loaded(pool=False)
    assert not adapter.sessions
    assert "tp_group" in caplog.text
    assert not is_tombstone(runner.model.layers[0].w_kc)


def test_ranks_that_may_join_later_are_no_group_to_agree_with(make_context, monkeypatch):
    from npu_backend.hosts.sglang import ranks

    group = Record(world_size=4, cpu_group="cpu group")
    made = make_context(tp_group=group, elastic_ep_backend=None)
    assert ranks.tp_group(made) is None, "no process group at all"
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    assert ranks.tp_group(made) == "cpu group"
    with pytest.raises(RuntimeError, match="join later"):
        ranks.tp_group(make_context(tp_group=group, elastic_ep_backend="mooncake"))
    alone = make_context(tp_group=Record(world_size=1, cpu_group="own"), elastic_ep_backend=None)
    assert ranks.tp_group(alone) is None


# --- shadow ---------------------------------------------------------------------------------------


def shadowed(loaded, **more):
    environ = {"NPU_BACKEND_SGLANG_SHADOW": "1", **more}
    adapter, runner = loaded(environ)
    return adapter.shadows[id(runner.model)], runner.model.layers


def test_shadow_tells_paths_and_releases_that_are_read(loaded):
    shadow, layers = shadowed(loaded, NPU_BACKEND_SGLANG_PROMISES="local_prefill,weight_update")
    mode = batch("DECODE").forward_mode
    shadow.stepped(layers[0], "absorb", mode, 3)
    layers[0].fused_qkv_a_proj_with_mqa.weight.untyped_storage().resize_(0)
    shadow.stepped(layers[0], "absorb", mode, 3)
    told = [str(d) for d in shadow.differences]
    assert told[0] == "layer 0: SGLang ran absorb in decode, the plan says mlaprolog"
    assert told[1].startswith("layer 0: UNSAFE: SGLang freed fused_qkv_a_proj, and ")
    assert "host:mha@extend" in told[1]
    assert "update" in told[1]
    assert len(told) == 2, "each once"


def test_shadow_counts_what_sglang_holds_after_the_first_step_of_a_phase(loaded, caplog):
    caplog.set_level("INFO")
    shadow, layers = shadowed(loaded)
    mode = batch("DECODE").forward_mode
    for _ in range(2):
        for layer in layers:
            shadow.stepped(layer, "mlaprolog", mode, 3)
    lines = [r.getMessage() for r in caplog.records if "after the first" in r.getMessage()]
    totals = shadow.plan.totals.release
    assert lines == [
        "npu-backend (shadow): after the first decode step: 0 differences, 0 unsafe; the plan "
        f"releases {totals} bytes, of which SGLang holds {totals}"
    ]
    assert shadow.report().count("the plan releases") == 2 * 4


def test_a_release_that_nobody_reads_is_none_of_shadow_s_business(loaded):
    shadow, layers = shadowed(loaded)
    layers[0].w_kc.untyped_storage().resize_(0)
    shadow.stepped(layers[0], "mlaprolog", batch("DECODE").forward_mode, 3)
    assert shadow.differences == []


def test_what_the_plan_absorbs_with_is_not_read_where_sglang_has_a_copy(loaded):
    """SGLang's preprocess object absorbs with its own copy of w_kc in every phase but extend."""
    shadow, layers = shadowed(loaded, SGLANG_NPU_USE_MLAPO="0")
    assert "q_absorb@decode" in shadow.plan.layers[0].weight("w_kc").readers
    layers[0].w_kc.untyped_storage().resize_(0)
    shadow.stepped(layers[0], "absorb", batch("DECODE").forward_mode, 3)
    assert [str(d) for d in shadow.differences] == ["layer 0: SGLang freed w_kc, the plan keeps it"]


def test_the_watching_hooks_change_nothing(loaded):
    shadow, layers = shadowed(loaded)
    from npu_backend.hosts.sglang import shadow as watching

    hooks = watching.hooks(lambda attention: shadow if shadow.watches(attention) else None)

    def original(m, positions, hidden, one, *rest):
        return hooks["forward_mlaprolog"](lambda *_: None, object()) or ("result", rest)

    hidden = torch.zeros(3, HIDDEN)
    result = hooks["forward_mla_prepare_npu"](original, layers[0], None, hidden, batch("DECODE"), 7)
    assert result == ("result", (7,))
    assert shadow.differences == []
