"""What holds for every layer, deployment and set of plugin answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_backend import (
    Decline,
    Deployment,
    DeploymentError,
    Envelope,
    Forbid,
    Indexer,
    Keep,
    KvLayout,
    MlaLayer,
    ModelError,
    Offer,
    Phase,
    Reason,
    Release,
    RequestUnmetError,
    SelectionError,
)
from npu_backend.deployment import PROMISES
from npu_backend.model import loaded_weights
from npu_backend.offers import Answer, Failure, PluginInfo
from npu_backend.planner import plan_model

EXAMPLES = 2000

NAMES = (
    "fused_qkv_a_proj",
    "q_proj",
    "kv_a_proj_with_mqa",
    "q_b_proj",
    "kv_b_proj",
    "w_kc",
    "w_vc",
)
PATHS = ("absorb", "mlaprolog", "mlapo", "acme_path")
KERNELS = ("torch.bmm", "batch_matmul_transpose", "acme_bmm")
INT8 = ("none", "w8a8-static", "w8a8-dynamic")
QUANTS = (*INT8, "mxfp8", "fp8-block")
"""8-bit floats plan on A5 only, so most models are drawn without."""
BOUNDS = (1, 2, 64, 1023, 1024, 1025, 65535, 65536)

rows = st.one_of(
    st.just((1, None)),
    st.tuples(st.sampled_from(BOUNDS), st.one_of(st.none(), st.sampled_from(BOUNDS))).filter(
        lambda r: r[1] is None or r[0] <= r[1]
    ),
)
phase_sets = st.sets(st.sampled_from(list(Phase)), min_size=1)
reasons = st.lists(
    st.builds(Reason, st.sampled_from(["dtype", "acme.no"]), st.just("because")),
    min_size=1,
    max_size=2,
)


@st.composite
def layers(draw: Any) -> list[MlaLayer]:
    found = []
    quants = draw(st.sampled_from([INT8, INT8, INT8, QUANTS]))
    dtype = draw(st.sampled_from(["bfloat16", "bfloat16", "bfloat16", "float32"]))
    for layer_id in range(draw(st.integers(1, 3))):
        lora = draw(st.sampled_from([None, 1536, 2048, 232]))
        rope = draw(st.sampled_from([0, 64]))
        has_rope = rope > 0 and draw(st.booleans())
        found.append(
            MlaLayer(
                layer_id=layer_id,
                is_nextn=draw(st.booleans()),
                model_type=draw(st.sampled_from(["deepseek_v3", "kimi_k3"])),
                hidden_size=draw(st.sampled_from([1024, 6144, 7168])),
                num_heads=draw(st.sampled_from([16, 64, 96, 128])),
                q_lora_rank=lora,
                kv_lora_rank=512,
                qk_nope_head_dim=draw(st.sampled_from([128, 192, 256])),
                qk_rope_head_dim=rope,
                v_head_dim=draw(st.sampled_from([128, 256])),
                use_rope=has_rope,
                dtype=dtype,
                quant={n: draw(st.sampled_from(quants)) for n in NAMES[:5]},
                w_kc_layout=draw(st.sampled_from(["strided", "contiguous"])),
                indexer=Indexer(
                    draw(st.sampled_from(["own", "shared", "none"])), draw(st.sampled_from(QUANTS))
                ),
                kv_layout=KvLayout(
                    cache_mode=draw(st.sampled_from(["PA_BSND", "PA_NZ"])),
                    block_size=draw(st.sampled_from([16, 100, 128])),
                    rope=draw(st.sampled_from(["half", "interleaved"])) if has_rope else "none",
                ),
            )
        )
    return found


requests = st.lists(
    st.one_of(
        st.sampled_from([f"path={p}" for p in (*PATHS, "fused")]),
        st.sampled_from([f"v_up={k}" for k in KERNELS]),
        st.sampled_from([f"q_absorb={k}" for k in KERNELS]),
        st.just("path=absorb@nextn"),
    ),
    max_size=2,
)

deployments = st.builds(
    Deployment,
    role=st.sampled_from(["null", "prefill", "decode"]),
    soc=st.sampled_from(["A2", "A3", "A5", "310P"]),
    cann=st.sampled_from(["8.1.RC1", "8.5.0", "9.0.0", "9.1.0", "9.2.0"]),
    kernels=st.sampled_from(["sgl-kernel-npu", "vllm-ascend", "none"]),
    attn_tp_size=st.sampled_from([1, 2, 16]),
    host=st.sampled_from([None, "sglang", "vllm-ascend"]),
    phases=st.one_of(st.none(), phase_sets),
    max_tokens=st.one_of(
        st.none(), st.dictionaries(st.sampled_from(list(Phase)), st.sampled_from(BOUNDS))
    ),
    requests=requests,
    graph_capture=st.booleans(),
    batch_invariant=st.sampled_from([False, False, True]),
    promises=st.sets(st.sampled_from(PROMISES)),
    restore=st.booleans(),
)

weights = st.sets(st.sampled_from(NAMES), max_size=3)


def offers(names: tuple[str, ...], path: bool) -> st.SearchStrategy[Offer]:
    return st.builds(
        Offer,
        strategy=st.sampled_from(names),
        impl=st.just("acme:object"),
        envelope=st.builds(
            Envelope, phases=phase_sets, tokens=rows, format=st.sampled_from(["any", "nz"])
        ),
        reads=weights,
        copies=weights,
        aliases=st.dictionaries(st.just("shared"), st.sampled_from(NAMES), max_size=1),
        uses=st.sets(st.sampled_from(["q_absorb", "v_up"])) if path else st.just(()),
        q_lora=st.sampled_from([None, "float", "int8"]) if path else st.none(),
        kv_layouts=st.one_of(st.none(), st.just([KvLayout()])) if path else st.none(),
        capture_slot=st.none() if path else st.sampled_from([None, "slot"]),
    )


def answers(names: tuple[str, ...], path: bool) -> st.SearchStrategy[list[Any]]:
    record = st.one_of(
        offers(names, path),
        st.builds(Decline, strategy=st.sampled_from(names), reasons=reasons),
        st.builds(Forbid, strategy=st.sampled_from(names), reasons=reasons),
        st.just("failure"),
    )
    return st.lists(record, max_size=4)


votes = st.lists(
    st.one_of(
        st.builds(Release, st.sampled_from((*NAMES, "nonsense")), st.just("may go")),
        st.builds(Keep, st.sampled_from(NAMES), st.just("must stay")),
    ),
    max_size=6,
)

ACME = PluginInfo("acme", "acme-npu", "1.0")


class Scripted:
    """The built-ins behind a vendor whose answers are drawn; records what was said."""

    def __init__(
        self, builtins: Any, path: list[Any], kernels: list[Any], votes: list[Any]
    ) -> None:
        self.builtins, self.path, self.kernels, self.votes = builtins, path, kernels, votes

    def _vendor(self, records: list[Any], hook: str) -> tuple[Answer, ...]:
        return tuple(
            Answer(ACME, failure=Failure(hook, "raised"))
            if record == "failure"
            else Answer(ACME, (record,))
            for record in records
        )

    def ask_paths(self, layer: Any, deployment: Any) -> tuple[Answer, ...]:
        return (*self._vendor(self.path, "path"), *self.builtins.ask_paths(layer, deployment))

    def ask_bmm(self, bmm: Any, deployment: Any) -> tuple[Answer, ...]:
        return (*self._vendor(self.kernels, "bmm"), *self.builtins.ask_bmm(bmm, deployment))

    def ask_release(self, layer: Any, deployment: Any, readers: Any) -> tuple[Answer, ...]:
        return (
            *self._vendor(self.votes, "release"),
            *self.builtins.ask_release(layer, deployment, readers),
        )


OUTCOMES: Counter[str] = Counter()


def _covered(table: Any, phase: Phase) -> list[tuple[int, int | None]]:
    return sorted((e.tokens for e in table if phase in e.phases), key=lambda r: r[0])


def _assert_exact(table: Any, phase: Phase, bound: int | None) -> None:
    """The entries of a phase cover 1..bound without gap or overlap."""
    expected = 1
    ranges = _covered(table, phase)
    for index, (low, high) in enumerate(ranges):
        assert low == expected, (phase, ranges)
        if high is None:
            assert index == len(ranges) - 1
            assert bound is None
            return
        expected = high + 1
    assert expected - 1 == bound, (phase, ranges, bound)


def _check(plan: Any, deployment: Deployment, script: Scripted) -> None:
    for layer in plan.layers:
        reach = deployment.reach(is_nextn=layer.layer.is_nextn)
        # Tables cover exactly what is reachable.
        assert {p for e in layer.path for p in e.phases} == set(reach)
        for phase, bound in reach.items():
            _assert_exact(layer.path, phase, bound)
        for site in ("q_absorb", "v_up"):
            cells = Counter()
            for e in layer.path:
                if e.offer is not None and site in e.offer.uses:
                    cells.update({(p, e.tokens): 1 for p in e.phases})
            used = {p for p, _ in cells}
            assert {p for e in layer.table(site) for p in e.phases} == used
            for phase in used:
                wanted = sorted((r for p, r in cells if p is phase), key=lambda r: r[0])
                got = _covered(layer.table(site), phase)
                assert _rows(wanted) == _rows(got)
        # No released weight has a reader; no Keep vote is overridden.
        kept = {v.weight for v in script.votes if isinstance(v, Keep)}
        names = {s.name for s in loaded_weights(layer.layer, deployment.attn_tp_size)}
        for w in layer.weights:
            if w.action == "release":
                assert w.readers == ()
                assert w.name in names
            if w.action == "restore":
                assert deployment.restore
                assert w.readers
                assert all(deployment.is_promised(r) for r in w.readers)
            if w.name in kept:
                assert w.action == "keep"
            # Every step that the tables can run finds its weights: checked against the offers.
        alive = {w.name for w in layer.weights if w.action == "keep"}
        promised = {p for p in reach if deployment.is_promised(f"x@{p}")}
        for site in ("path", "q_absorb", "v_up"):
            for e in layer.table(site):
                if e.offer is not None and not set(e.phases) <= promised:
                    assert e.offer.step_reads & names <= alive
        # Requests are met, or there was an error.
        for request in deployment.requests:
            if request.kind == "path" and request.nextn == layer.layer.is_nextn:
                if request.name != "fused":
                    assert any(e.strategy == request.name for e in layer.path)
            elif request.kind != "path" and layer.table(request.kind):
                assert any(e.strategy == request.name for e in layer.table(request.kind))
        # One KV layout per layer: whoever serves can write it.
        for e in layer.path:
            if e.offer is not None and e.offer.kv_layouts is not None:
                assert layer.kv_layout in e.offer.kv_layouts
        # Declines are never empty.
        assert all(d.reasons for d in layer.declined)
        # Unasked, no serving offer copies what a counting reader still reads.
        wanted_names = {r.name for r in deployment.requests}
        for e in layer.path:
            if (
                e.offer is not None
                and e.strategy not in wanted_names
                and "fused" not in wanted_names
            ):
                for name in e.offer.copied:
                    readers = layer.weight(name).readers
                    if deployment.restore:
                        readers = tuple(r for r in readers if not deployment.is_promised(r))
                    # A kernel's own copy can only take readers away after paths are decided.
                    assert not readers, (e.strategy, name, readers)


def _rows(ranges: Any) -> list[list[int | None]]:
    joined: list[list[int | None]] = []
    for low, high in ranges:
        if joined and joined[-1][1] is not None and joined[-1][1] + 1 == low:
            joined[-1][1] = high
        else:
            joined.append([low, high])
    return joined


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(layers(), deployments, answers(PATHS, True), answers(KERNELS, False), votes)
def test_every_plan_is_complete_safe_and_repeatable(
    backend, layer_list, deployment, path, kernels, vote
):
    script = Scripted(backend.registry, path, kernels, vote)
    try:
        plan = plan_model(layer_list, deployment, script)
    except (RequestUnmetError, SelectionError, DeploymentError, ModelError) as err:
        OUTCOMES[type(err).__name__] += 1
        assert err.why
        if isinstance(err, RequestUnmetError):
            assert deployment.requests
        elif isinstance(err, SelectionError):
            # Rule 2: every reason, so every strategy that anybody spoke of is among them.
            assert err.code in ("phase", "tokens.limit")
            told = {why.partition(",")[0] for why in err.why}
            builtin = PATHS[:3] if "batched matmul" not in err.whom else KERNELS[:2]
            assert set(builtin) <= told, (builtin, err)
        return
    OUTCOMES["planned"] += 1
    _check(plan, deployment, script)
    assert plan_model(layer_list, deployment, script).to_json() == plan.to_json()


def test_most_examples_reached_a_plan():
    total = sum(OUTCOMES.values())
    assert total >= EXAMPLES
    assert OUTCOMES["planned"] >= total // 4, OUTCOMES
