"""What differs between two plans, and whether a prefill and a decode plan can share a KV cache.

Works on the JSON form, so that plans of two machines, or of two releases, can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from npu_backend.errors import NpuBackendError
from npu_backend.plan import SCHEMA

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
        equal: Both fingerprints are the same.
        differences: What differs, the plan as a whole first.
        pair: ``prefill`` and ``decode`` roles were compared.
        kv_agree: There are layers that both plan, and their KV layouts agree.
        kv_conflicts: Ids of layers that do not agree.
    """

    equal: bool
    differences: tuple[Difference, ...]
    pair: bool
    kv_agree: bool
    kv_conflicts: tuple[int, ...]

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
            "differences": [d.to_dict() for d in self.differences],
        }


def _check(plan: Any, name: str) -> Mapping[str, Any]:
    problem = None
    if not isinstance(plan, Mapping):
        problem = "it is not a JSON object"
    elif plan.get("schema") != SCHEMA:
        problem = f"its schema is {plan.get('schema')!r}, this release reads {SCHEMA}"
    else:
        missing = [k for k in ("deployment", "fingerprint", "layers") if k not in plan]
        if missing:
            problem = f"it lacks {', '.join(missing)}"
        elif not isinstance(plan["layers"], list) or not all(
            isinstance(row, Mapping) and "layer_id" in row for row in plan["layers"]
        ):
            problem = "its layers are not a list of layer plans"
    if problem:
        raise NpuBackendError(
            "the plan cannot be compared",
            whom=name,
            why=problem,
            remedy="write plans with npu-backend plan MODEL --json",
        )
    return plan  # type: ignore[no-any-return]


_BROKEN = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)
"""What reading a plan of another shape than the schema's ends in."""


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
        if a.get(what) != b.get(what):
            found.append(Difference(layer_id, what, a.get(what), b.get(what)))
    for what, site in (("path", None), ("q_absorb", "q_absorb"), ("v_up", "v_up")):
        if a.get(what) != b.get(what):
            why = _only(_reasons(a, site), _reasons(b, site))
            found.append(Difference(layer_id, what, a.get(what), b.get(what), why))
    rows_a = {w["name"]: w for w in a.get("weights", ())}
    rows_b = {w["name"]: w for w in b.get("weights", ())}
    for name in dict.fromkeys([*rows_a, *rows_b]):
        parts = [
            None if row is None else {k: row[k] for k in ("dtype", "bytes", "action")}
            for row in (rows_a.get(name), rows_b.get(name))
        ]
        if parts[0] != parts[1]:
            why = _only(
                list(rows_a.get(name, {}).get("reasons", ())),
                list(rows_b.get(name, {}).get("reasons", ())),
            )
            found.append(Difference(layer_id, f"weight {name}", parts[0], parts[1], why))
    return found


def compare_plans(a: Any, b: Any, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two plans in their JSON form.

    Raises:
        NpuBackendError: One of them is no plan of this schema.
    """
    plan_a, plan_b = _check(a, names[0]), _check(b, names[1])
    try:
        return _compare(plan_a, plan_b)
    except _BROKEN as err:
        raise NpuBackendError(
            "a plan is not of the form that its schema says",
            whom=" or ".join(names),
            why=f"{type(err).__name__}: {err}",
            remedy="write plans with npu-backend plan MODEL --json",
        ) from err


def _compare(plan_a: Mapping[str, Any], plan_b: Mapping[str, Any]) -> Comparison:
    found = []
    for key in ("name", "model_type"):
        left, right = (p.get("model", {}).get(key) for p in (plan_a, plan_b))
        if left != right:
            found.append(Difference(None, f"model.{key}", left, right))
    for key in dict.fromkeys([*plan_a["deployment"], *plan_b["deployment"]]):
        left, right = plan_a["deployment"].get(key), plan_b["deployment"].get(key)
        if left != right:
            found.append(Difference(None, f"deployment.{key}", left, right))
    plugins = [
        [f"{p['name']} ({p['dist']} {p['version']}) {p['status']}" for p in plan.get("plugins", ())]
        for plan in (plan_a, plan_b)
    ]
    if plugins[0] != plugins[1]:
        found.append(Difference(None, "plugins", plugins[0], plugins[1]))
    for key in ("options", "parallel", "layouts"):
        left, right = ((plan.get("mlp") or {}).get(key) for plan in (plan_a, plan_b))
        if left != right:
            found.append(Difference(None, f"mlp.{key}", left, right))
    layers_a = {row["layer_id"]: row for row in plan_a["layers"]}
    layers_b = {row["layer_id"]: row for row in plan_b["layers"]}
    conflicts = []
    for layer_id in sorted({*layers_a, *layers_b}):
        left, right = layers_a.get(layer_id), layers_b.get(layer_id)
        if left is None or right is None:
            found.append(Difference(layer_id, "layer", left and "planned", right and "planned"))
            continue
        if left.get("kv_layout") != right.get("kv_layout"):
            conflicts.append(layer_id)
        found += _layer(left, right)
    roles = {str(plan["deployment"].get("role")) for plan in (plan_a, plan_b)}
    return Comparison(
        equal=plan_a["fingerprint"] == plan_b["fingerprint"],
        differences=tuple(found),
        pair=roles == {"prefill", "decode"},
        kv_agree=bool(layers_a.keys() & layers_b.keys()) and not conflicts,
        kv_conflicts=tuple(conflicts),
    )
