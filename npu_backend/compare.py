"""What differs between two plans, and whether a prefill and a decode plan can share a KV cache.

Works on the JSON form, so that plans of two machines, or of two releases, can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from npu_backend.errors import NpuBackendError
from npu_backend.explain import name_ids
from npu_backend.plan import SCHEMA
from npu_backend.plan_form import faults_of

__all__ = ["Comparison", "Difference", "compare_plans"]


@frozen
class Difference:
    """One thing that differs.

    Args:
        layer_id: The layer, or None for the plan as a whole.
        what: ``deployment.role``, ``v_up``, ``weight w_kc``, ``kv_layout`` and so on.
        a: Its form in the first plan, None where absent.
        b: Its form in the second plan, None where absent.
        why: Reasons that either plan gives for it.
    """

    layer_id: int | None
    what: str
    a: Any
    b: Any
    why: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "layer_id": self.layer_id,
            "what": self.what,
            "a": self.a,
            "b": self.b,
            "why": list(self.why),
        }


@frozen
class Comparison:
    """The whole comparison.

    Args:
        equal: Nothing differs, the fingerprints neither.
        differences: What differs, the plan as a whole first.
        pair: ``prefill`` and ``decode`` roles were compared.
        kv_conflicts: Ids of layers that do not agree, those of one plan only among them.
        kv_reasons: Why they cannot share one; empty where they can.
    """

    equal: bool
    differences: tuple[Difference, ...]
    pair: bool
    kv_conflicts: tuple[int, ...]
    kv_reasons: tuple[str, ...]

    @property
    def kv_agree(self) -> bool:
        """Whether the two can share a KV cache: one model, the same layers, and in each the same
        layout and sizes."""
        return not self.kv_reasons

    @property
    def ok(self) -> bool:
        """Equal plans, or a prefill and a decode plan whose KV layouts agree."""
        return self.kv_agree if self.pair else self.equal

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "schema": SCHEMA,
            "equal": self.equal,
            "prefill_decode_pair": self.pair,
            "kv_layouts_agree": self.kv_agree,
            "kv_conflicts": list(self.kv_conflicts),
            "kv_reasons": list(self.kv_reasons),
            "differences": [d.to_dict() for d in self.differences],
        }


FAULTS_TOLD = 8
"""Faults of a malformed plan that its error names; a file of another kind has hundreds."""


def _check(plan: Any, name: str) -> Mapping[str, Any]:
    faults = faults_of(plan)
    if faults:
        more = len(faults) - FAULTS_TOLD
        raise NpuBackendError(
            "the plan cannot be compared",
            whom=name,
            why=(*faults[:FAULTS_TOLD], *([f"and {more} faults more"] if more > 0 else ())),
            remedy="write plans with npu-backend plan MODEL --json",
        )
    return plan  # type: ignore[no-any-return]


def _reasons(layer: Mapping[str, Any], site: str | None) -> list[str]:
    found = []
    for refusal in layer.get("declined", ()):
        if refusal.get("site") == site and not str(refusal.get("hook")).startswith("release"):
            found += [
                f"{refusal['strategy']}: {r['code']}: {r['message']}" for r in refusal["reasons"]
            ]
    return found


def _only(a: list[str], b: list[str]) -> tuple[str, ...]:
    """Return what one side says and the other does not, the side named."""
    return (*(f"a: {t}" for t in a if t not in b), *(f"b: {t}" for t in b if t not in a))


def _layer(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    layer_id = int(a["layer_id"])
    found = []
    for what in ("is_nextn", "kv_layout"):
        if _differ(a[what], b[what]):
            found.append(Difference(layer_id, what, a[what], b[what]))
    for what, site in (("path", None), ("q_absorb", "q_absorb"), ("v_up", "v_up")):
        if _differ(a[what], b[what]):
            why = _only(_reasons(a, site), _reasons(b, site))
            found.append(Difference(layer_id, what, a[what], b[what], why))
    rows_a, rows_b = ({w["name"]: w for w in layer["weights"]} for layer in (a, b))
    for name in dict.fromkeys([*rows_a, *rows_b]):
        left, right = rows_a.get(name), rows_b.get(name)
        if _differ(left, right):
            why = _only(*(list(row["reasons"]) if row else [] for row in (left, right)))
            what = f"weight {name}"
            found.append(Difference(layer_id, what, _fate(left), _fate(right), why))
    if not found:
        # Beside a decision that differs, its reasons are told with it.
        for what in _keys_that_differ(a, b):
            found.append(Difference(layer_id, what, a.get(what), b.get(what)))
    return found


def _fate(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {k: v for k, v in row.items() if k not in ("name", "reasons")}


def compare_plans(a: Any, b: Any, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two plans in their JSON form.

    Raises:
        NpuBackendError: One of them is no plan of this schema.
    """
    return _compare(_check(a, names[0]), _check(b, names[1]))


def _differ(a: Any, b: Any) -> bool:
    # By JSON text: Python takes true for 1 and 1.0.
    return json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True)


def _keys_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [
        k for k in dict.fromkeys([*a, *b]) if (k in a) != (k in b) or _differ(a.get(k), b.get(k))
    ]


def _of_keys(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(None, f"{prefix}{key}", a.get(key), b.get(key))
        for key in _keys_that_differ(a, b)
    ]


_SUMS = ("totals", "fingerprint")
"""What follows from the rest of a plan: told only where nothing else differs."""


def _plan_parts(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return what differs beside the layers and the sums."""
    found = _of_keys("model.", a["model"], b["model"])
    found += _of_keys("deployment.", a["deployment"], b["deployment"])
    if _differ(a["plugins"], b["plugins"]):
        plugins = [
            [f"{p['name']} ({p['dist']} {p['version']}) {p['status']}" for p in plan["plugins"]]
            for plan in (a, b)
        ]
        found.append(Difference(None, "plugins", plugins[0], plugins[1]))
    told = {"model", "deployment", "plugins", "layers", *_SUMS}
    if "mlp" in a and "mlp" in b:
        found += _of_keys("mlp.", *(_without(p["mlp"], _SUMS) for p in (a, b)))
        told.add("mlp")
    return found + _of_keys("", _without(a, told), _without(b, told))


def _without(plan: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {k: v for k, v in plan.items() if k not in keys}


def _compare(plan_a: Mapping[str, Any], plan_b: Mapping[str, Any]) -> Comparison:
    found = _plan_parts(plan_a, plan_b)
    layers_a = {row["layer_id"]: row for row in plan_a["layers"]}
    layers_b = {row["layer_id"]: row for row in plan_b["layers"]}
    for layer_id in sorted({*layers_a, *layers_b}):
        left, right = layers_a.get(layer_id), layers_b.get(layer_id)
        if left is None or right is None:
            found.append(Difference(layer_id, "layer", left and "planned", right and "planned"))
        else:
            found += _layer(left, right)
    # Where the sums alone differ, or the order of the layers, the plans still do.
    found = found or _of_keys("", plan_a, plan_b)
    conflicts, reasons = _cache(plan_a, plan_b, layers_a, layers_b)
    return Comparison(
        equal=not found,
        differences=tuple(found),
        pair={plan["deployment"]["role"] for plan in (plan_a, plan_b)} == {"prefill", "decode"},
        kv_conflicts=conflicts,
        kv_reasons=reasons,
    )


Layers = Mapping[int, Mapping[str, Any]]


def _cache(
    plan_a: Mapping[str, Any], plan_b: Mapping[str, Any], a: Layers, b: Layers
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the layers whose caches do not agree, and every reason against sharing (rule 6)."""
    reasons = []
    model_a, model_b = plan_a["model"], plan_b["model"]
    keys = ["model_type", "num_hidden_layers"]
    if all(model["source"].startswith("catalog ") for model in (model_a, model_b)):
        # Two bundled names are two models; folders of one model can be named as one likes.
        keys.insert(0, "name")
    for key in keys:
        if model_a[key] != model_b[key]:
            reasons.append(f"another model: {key} is {model_a[key]} in a and {model_b[key]} in b")
    one_sided = sorted(a.keys() ^ b.keys())
    if not a.keys() & b.keys():
        reasons.append("no layer in common")
    else:
        for name, ids in (("a", a.keys() - b.keys()), ("b", b.keys() - a.keys())):
            if ids:
                reasons.append(f"only {name} plans {name_ids(ids)}")
    differ: dict[str, list[int]] = {}
    for layer_id in sorted(a.keys() & b.keys()):
        left, right = (
            {"is_nextn": p["is_nextn"], **p["kv_layout"]} for p in (a[layer_id], b[layer_id])
        )
        for key in dict.fromkeys([*left, *right]):
            if left.get(key) != right.get(key):
                told = f"{key} is {left.get(key)} in a and {right.get(key)} in b"
                differ.setdefault(told, []).append(layer_id)
    reasons += [f"{name_ids(ids)}: {told}" for told, ids in differ.items()]
    conflicts = sorted({*one_sided, *(i for ids in differ.values() for i in ids)})
    return tuple(conflicts), tuple(reasons)
