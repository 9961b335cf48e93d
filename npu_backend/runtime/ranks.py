"""All ranks of a group must hold one plan; one that failed says so, and nobody hangs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from attrs import frozen

from npu_backend.errors import PlanMismatchError
from npu_backend.plan import LayerPlan, ModelPlan

__all__ = ["FAILED", "compare_fingerprints"]

FAILED = "FAILED"
"""The digest with which a rank joins that has no plan to compare, for it failed before."""

_SHOWN = 12
"""Differences that a message tells; the rest is counted."""


@frozen
class _Mine:
    digest: str
    decisions: Any


def _told(plan: LayerPlan) -> dict[str, Any]:
    """Return a layer's decisions with weights by name, as differences are told."""
    decisions = plan.decisions()
    weights = {
        name: {"dtype": dtype, "bytes": size, "action": action}
        for name, dtype, size, action in decisions["weights"]
    }
    return {**decisions, "weights": weights}


def _describe(plan: LayerPlan | ModelPlan | Iterable[LayerPlan] | str) -> _Mine:
    if isinstance(plan, str):
        return _Mine(plan, None)
    if isinstance(plan, LayerPlan):
        return _Mine(plan.fingerprint, _told(plan))
    layers = tuple(plan)
    decisions = {f"layer {layer.layer_id}": _told(layer) for layer in layers}
    digest = (
        plan.fingerprint
        if isinstance(plan, ModelPlan)
        else json.dumps([layer.fingerprint for layer in layers])
    )
    return _Mine(digest, decisions)


def _flat(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {path: json.dumps(value)}
    found: dict[str, str] = {}
    for key, part in items:
        found |= _flat(part, f"{path}.{key}" if path else str(key))
    return found


def _differences(one: Any, other: Any) -> list[str]:
    a, b = _flat(one), _flat(other)
    keys = [k for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k)]
    told = [f"{k}: {a.get(k, 'absent')} against {b.get(k, 'absent')}" for k in keys[:_SHOWN]]
    if len(keys) > _SHOWN:
        told.append(f"and {len(keys) - _SHOWN} more")
    return told


def compare_fingerprints(
    plan: LayerPlan | ModelPlan | Iterable[LayerPlan] | str,
    group: dist.ProcessGroup | None = None,
    *,
    error: BaseException | str | None = None,
) -> str:
    """Compare the amended plan over a process group; every rank must call it, also a failed one.

    Args:
        plan: ``layer.plan`` of a bound layer, several of them, a model's plan, or a bare digest. A
            rank that has none gives :data:`FAILED`.
        group: The process group; default: all ranks.
        error: What went wrong on this rank, for the others to read.

    Returns:
        The digest that all ranks have.

    Raises:
        PlanMismatchError: On every rank, if one differs or has failed; with the differences.
    """
    mine = _describe(plan)
    size = dist.get_world_size(group)
    told: list[Any] = [None] * size
    dist.all_gather_object(told, (mine.digest, None if error is None else str(error)), group=group)
    digests = [digest for digest, _ in told]
    if len(set(digests)) == 1 and digests[0] != FAILED:
        return mine.digest

    # Only now, when all must stop anyway, are the decisions worth sending.
    all_decisions: list[Any] = [None] * size
    dist.all_gather_object(all_decisions, mine.decisions, group=group)
    why = [f"rank {r}: {digest}" for r, digest in enumerate(digests)]
    why += [f"rank {r} failed: {text}" for r, (_, text) in enumerate(told) if text]
    usable = [r for r in range(size) if digests[r] != FAILED and all_decisions[r] is not None]
    for rank in usable[1:]:
        if digests[rank] != digests[usable[0]]:
            found = _differences(all_decisions[usable[0]], all_decisions[rank])
            why += [f"rank {usable[0]} against rank {rank}, {line}" for line in found]
    failed = [r for r in range(size) if digests[r] == FAILED]
    what = (
        f"rank {', '.join(map(str, failed))} failed before the plan could be compared"
        if failed
        else "the ranks do not hold the same plan"
    )
    raise PlanMismatchError(
        what,
        whom=f"process group of {size} ranks",
        why=why,
        remedy="give every rank the same model, deployment, plugins and versions; "
        "nothing may be released before they agree",
    )
