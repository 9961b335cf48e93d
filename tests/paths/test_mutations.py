"""Wrong wiring is caught: each mutation of a path turns a proof red, and without it all are green.

The list is MUTATIONS: what is done wrong, in which path, and the claims of which one must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from npu_backend import Indexer, KvLayout, Phase
from npu_backend.runtime.cache import LayerCache
from npu_backend.runtime.prove import prove_layer
from npu_backend_builtin.impl import _kv as kv
from npu_backend_builtin.impl import _rope, absorb, mlapo, mlaprolog

OUTPUTS, CACHE, Q_LORA = "outputs", "cache", "q_lora"


def _static(**more):
    return {"quant": dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), "w8a8-static"), **more}


def _dynamic(**more):
    return {"quant": dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), "w8a8-dynamic"), **more}


def _mx(**more):
    return {"quant": dict.fromkeys(("fused_qkv_a_proj", "q_b_proj"), "mxfp8"), **more}


def _after_prepare(monkeypatch, target, change):
    """Change what an implementation prepared, in place of the right thing."""
    right = target.prepare

    def wrong(self, weights):
        made = right(self, weights)
        change(made, weights)
        return made

    monkeypatch.setattr(target, "prepare", wrong)


def _around_path(monkeypatch, target, change):
    """Call a path with other arguments, or give another result."""
    right = target.bind

    def bind(self, prepared, cache):
        path = right(self, prepared, cache)
        return lambda hidden, positions, slots: change(path, hidden, positions, slots)

    monkeypatch.setattr(target, "bind", bind)


def swapped_halves_of_mlaprolog(monkeypatch):
    def change(made, weights):
        fused = weights["fused_qkv_a_proj"]
        rows = weights.layer.kv_lora_rank + weights.layer.qk_rope_head_dim
        made["weight_dkv_kr"] = mlaprolog._turned(weights, fused[:rows])
        made["weight_dq"] = mlaprolog._turned(weights, fused[rows:])

    _after_prepare(monkeypatch, mlaprolog.MlaProlog, change)


def swapped_halves_of_mlapo(monkeypatch):
    """The query's rows first: the order of the checkpoint, which the op does not take."""
    rows = 1536 + 512 + 64
    monkeypatch.setattr(
        mlapo, "_down_order", lambda weights: torch.arange(rows, device=weights.device)
    )


def no_rope_reorder_of_mlapo(monkeypatch):
    monkeypatch.setattr(mlapo, "_half", torch.arange)


def neox_rope_of_absorb(monkeypatch):
    """Component i turns with i + rope / 2, as in NeoX, where the checkpoint has neighbours."""

    def neox(x, cos, sin, *, interleaved):
        half = x.shape[-1] // 2
        c, s = cos[..., :half].float(), sin[..., :half].float()
        a, b = x[..., :half].float(), x[..., half:].float()
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    monkeypatch.setattr(absorb, "rotate", neox)


def rope_of_the_other_direction(monkeypatch):
    right = LayerCache.tables

    def tables(self):
        cos, sin = right(self)
        return cos, -sin

    monkeypatch.setattr(LayerCache, "tables", tables)


def slots_off_by_one(target):
    def mutate(monkeypatch):
        _around_path(monkeypatch, target, lambda path, h, p, s: path(h, p, s + 1))

    return mutate


def positions_off_by_one(target):
    def mutate(monkeypatch):
        _around_path(monkeypatch, target, lambda path, h, p, s: path(h, (p - 1).clamp(min=0), s))

    return mutate


def stale_scales(name):
    """Scales of the checkpoint before, beside the weights of this one."""

    def mutate(monkeypatch):
        def change(made, weights):
            made[name] = made[name] * 1.25

        target = mlapo.Mlapo if name.startswith("descale") else mlaprolog.MlaProlog
        _after_prepare(monkeypatch, target, change)

    return mutate


def stale_mx_scales(monkeypatch):
    def change(made, weights):
        coded = made["dequant_scale_w_uq_qr"].view(torch.uint8)
        made["dequant_scale_w_uq_qr"] = (coded + 1).view(torch.float8_e8m0fnu)

    _after_prepare(monkeypatch, mlaprolog.MlaProlog, change)


def no_offset_of_mlapo(monkeypatch):
    _after_prepare(
        monkeypatch, mlapo.Mlapo, lambda made, weights: made.update(offset0=made["offset0"] * 0 + 9)
    )


def no_bias_of_mlapo(monkeypatch):
    _after_prepare(
        monkeypatch, mlapo.Mlapo, lambda made, weights: made.update(bias1=made["bias1"] * 0)
    )


def wrong_heads_of_mlaprolog(monkeypatch):
    def change(made, weights):
        made["weight_uk"] = made["weight_uk"].flip(0).contiguous()

    _after_prepare(monkeypatch, mlaprolog.MlaProlog, change)


def half_rope_order_in_an_interleaved_cache(monkeypatch):
    right = _rope.rotate
    monkeypatch.setattr(
        absorb, "rotate", lambda x, cos, sin, *, interleaved: right(x, cos, sin, interleaved=False)
    )


def packed_in_another_order(monkeypatch):
    """The scales before the key: the order of another engine's packed cache."""
    right = kv.write_rows

    def wrong(cache, rows, slots, *, nz):
        moved = torch.cat((rows[:, :512], rows[:, 640:], rows[:, 512:640]), -1)
        right(cache, moved, slots, nz=nz)

    monkeypatch.setattr(kv, "write_rows", wrong)


def ignored_factor(monkeypatch):
    right = LayerCache.allocate.__func__

    def allocate(cls, *args, **kwargs):
        return right(cls, *args, **kwargs)

    def encode(dtype, factor):
        rounded, _ = kv._rounder(dtype)
        return (lambda x: x) if factor is None else (lambda x: rounded(x.float()))

    monkeypatch.setattr(LayerCache, "allocate", classmethod(allocate))
    monkeypatch.setattr(kv, "_factored", encode)


def query_scale_of_another_head(monkeypatch):
    def change(path, h, p, s):
        result = path(h, p, s)
        return result._replace(q_nope_scale=result.q_nope_scale.flip(1))

    _around_path(monkeypatch, mlaprolog.MlaProlog, change)


def unnormed_q_lora(monkeypatch):
    def change(path, h, p, s):
        result = path(h, p, s)
        return result._replace(q_lora=result.q_lora * 1.25)

    _around_path(monkeypatch, mlaprolog.MlaProlog, change)


def absorbed_twice(monkeypatch):
    def change(path, h, p, s):
        result = path(h, p, s)
        return result._replace(q_nope=result.q_nope.roll(1, dims=1))

    _around_path(monkeypatch, absorb.Absorb, change)


@frozen
class Mutation:
    """One thing done wrong.

    Args:
        path: The path that is asked for.
        mutate: What is done.
        claims: Those of which at least one must fail.
        layer: Changes of the layer.
        soc: The chip.
    """

    path: str
    mutate: Callable[[Any], None]
    claims: frozenset[str]
    layer: dict[str, Any]
    soc: str = "A3"


def _m(path, mutate, claims, soc="A3", **layer):
    return Mutation(path, mutate, frozenset(claims), layer, soc)


INT8 = KvLayout(dtype="int8")
INTERLEAVED = KvLayout(rope="interleaved")
FP32 = {"dtype": "float32"}

MUTATIONS = {
    "mlaprolog: q and kv halves swapped": _m("mlaprolog", swapped_halves_of_mlaprolog, [CACHE]),
    "mlaprolog: heads of w_kc in another order": _m(
        "mlaprolog", wrong_heads_of_mlaprolog, [OUTPUTS]
    ),
    "mlaprolog: slots off by one": _m(
        "mlaprolog", slots_off_by_one(mlaprolog.MlaProlog), [CACHE, OUTPUTS]
    ),
    "mlaprolog: positions off by one": _m(
        "mlaprolog", positions_off_by_one(mlaprolog.MlaProlog), [CACHE]
    ),
    "mlaprolog: rotated the other way": _m("mlaprolog", rope_of_the_other_direction, [CACHE]),
    "mlaprolog: stale scale of q_a": _m(
        "mlaprolog",
        stale_scales("dequant_scale_w_dkv_kr"),
        [CACHE],
        **_dynamic(),
    ),
    "mlaprolog: stale scale of q_b": _m(
        "mlaprolog", stale_scales("dequant_scale_w_uq_qr"), [OUTPUTS], **_dynamic()
    ),
    "mlaprolog: stale MX scales": _m("mlaprolog", stale_mx_scales, [OUTPUTS], soc="A5", **_mx()),
    "mlaprolog: q_lora that is not the normed one": _m(
        "mlaprolog", unnormed_q_lora, [Q_LORA], indexer=Indexer("own")
    ),
    "mlaprolog: query scales of another head": _m(
        "mlaprolog", query_scale_of_another_head, [OUTPUTS], **_dynamic(kv_layout=INT8)
    ),
    "mlapo: q and kv halves swapped": _m("mlapo", swapped_halves_of_mlapo, [CACHE], **_static()),
    "mlapo: RoPE rows not reordered": _m("mlapo", no_rope_reorder_of_mlapo, [CACHE], **_static()),
    "mlapo: slots off by one": _m(
        "mlapo", slots_off_by_one(mlapo.Mlapo), [CACHE, OUTPUTS], **_static()
    ),
    "mlapo: stale scale of q_a": _m(
        "mlapo", stale_scales("descale0"), [CACHE, OUTPUTS], **_static()
    ),
    "mlapo: stale scale of q_b": _m("mlapo", stale_scales("descale1"), [OUTPUTS], **_static()),
    "mlapo: another offset": _m("mlapo", no_offset_of_mlapo, [CACHE], **_static()),
    "mlapo: no quant_bias": _m("mlapo", no_bias_of_mlapo, [OUTPUTS], **_static()),
    "absorb: neox RoPE": _m("absorb", neox_rope_of_absorb, [CACHE], **FP32),
    "absorb: half order in an interleaved cache": _m(
        "absorb", half_rope_order_in_an_interleaved_cache, [CACHE], kv_layout=INTERLEAVED
    ),
    "absorb: slots off by one": _m("absorb", slots_off_by_one(absorb.Absorb), [CACHE, OUTPUTS]),
    "absorb: positions off by one": _m("absorb", positions_off_by_one(absorb.Absorb), [CACHE]),
    "absorb: heads rolled": _m("absorb", absorbed_twice, [OUTPUTS]),
    "absorb: packed cache in another order": _m(
        "absorb", packed_in_another_order, [CACHE], kv_layout=KvLayout(dtype="int8_packed")
    ),
    "absorb: factor of the cache ignored": _m(
        "absorb", ignored_factor, [CACHE], kv_layout=KvLayout(dtype="int8")
    ),
}


def _proof(mutation, make_layer, plan_layer):
    layer = make_layer(**mutation.layer)
    plan = plan_layer(layer, soc=mutation.soc, requests=[f"path={mutation.path}"])
    assert mutation.path in [e.strategy for e in plan.path if Phase.DECODE in e.phases]
    return prove_layer(plan, rows=(3,))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_turns_a_proof_red(monkeypatch, make_layer, plan_layer, name):
    mutation = MUTATIONS[name]
    mutation.mutate(monkeypatch)
    proof = _proof(mutation, make_layer, plan_layer)
    failed = {p.name for p in proof.failed}
    assert failed & mutation.claims, [(p.name, p.text) for p in proof.proofs]


@pytest.mark.parametrize(
    "mutation",
    {(m.path, str(m.layer), m.soc): m for m in MUTATIONS.values()}.values(),
    ids=lambda m: f"{m.path} {m.layer or 'plain'}",
)
def test_without_mutation_every_proof_is_green(make_layer, plan_layer, mutation):
    proof = _proof(evolve(mutation, mutate=lambda _: None), make_layer, plan_layer)
    assert proof.passed, [(p.name, p.text) for p in proof.failed]
