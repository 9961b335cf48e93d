"""Capture slots over the whole process: plans made apart must not share one either.

The planner settles the slots of one plan. A process may bind several (a target and a draft model),
and the slot of an op such as ``batch_matmul_transpose`` is keyed by rows alone, for the process.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from npu_backend.errors import PrepareError
from npu_backend.offers import SITES
from npu_backend.plan import LayerPlan
from npu_backend.planner.kernels import bmm_spec

__all__ = ["check_slots", "claim_slots"]

_HELD: WeakKeyDictionary[Any, dict[str, tuple[tuple[int, int, int], str]]] = WeakKeyDictionary()
"""Slots by the bound layer that holds them; they are free again when it dies."""


def _wanted(plan: LayerPlan) -> dict[str, tuple[tuple[int, int, int], str]]:
    if not plan.deployment.graph_capture:
        return {}
    cells = {phase: ((1, bound),) for phase, bound in plan.reach.items()}
    shapes = {s: bmm_spec(plan.layer, plan.deployment, s, cells).shape for s in SITES}
    return {
        entry.offer.capture_slot: (shapes[site], f"{plan.layer}, batched matmul {site}")
        for site in SITES
        for entry in plan.table(site)
        if entry.offer is not None and entry.offer.capture_slot
    }


def check_slots(plan: LayerPlan) -> None:
    """Check that no living layer of another plan holds a slot for another shape.

    Raises:
        PrepareError: One does.
    """
    for slot, (shape, whom) in _wanted(plan).items():
        for slots in _HELD.values():
            held, holder = slots.get(slot, (shape, ""))
            if held != shape:
                raise PrepareError(
                    f"(B, K, N) = {shape} would share the slot {slot}",
                    whom=whom,
                    why=f"{held} of {holder} holds it in this process, and it is keyed by rows: "
                    "two shapes with equal rows collide in captured graphs",
                    remedy="plan all layers of the process together, or request another kernel "
                    "for one of them",
                    code="capture.slot",
                )


def claim_slots(owner: Any, plan: LayerPlan) -> None:
    """Hold the slots of a prepared layer as long as the layer lives."""
    if wanted := _wanted(plan):
        _HELD[owner] = wanted
