"""Why a bound layer refuses a step: makers of errors, each given the step's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from npu_backend.deployment import Phase
from npu_backend.errors import (
    BoundExceededError,
    NpuBackendError,
    PlanMismatchError,
    PrepareError,
    WeightReleasedError,
)
from npu_backend.plan import LayerPlan

__all__ = [
    "host_serves",
    "let_go",
    "phase_needed",
    "stale",
    "unattached",
    "unplanned",
    "unprepared",
    "unused",
    "updating",
]

Make = Callable[[int], NpuBackendError]


def unprepared(plan: LayerPlan) -> Make:
    """A step before ``prepare()``."""

    def make(rows: int) -> NpuBackendError:
        return PrepareError(
            "a step came before prepare()",
            whom=str(plan.layer),
            why="no strategy is prepared yet",
            remedy="call layer.prepare() once after bind()",
        )

    return make


def unattached(plan: LayerPlan) -> Make:
    """A step before the host gave the layer its cache."""

    def make(rows: int) -> NpuBackendError:
        return PrepareError(
            "a step came before attach()",
            whom=str(plan.layer),
            why="the layer was bound without a cache, so that its weights go before one is sized",
            remedy="call layer.attach(cache) once the host has its KV cache",
        )

    return make


def updating(plan: LayerPlan) -> Make:
    """A step between ``before_update()`` and ``after_update()``."""

    def make(rows: int) -> NpuBackendError:
        return PrepareError(
            "the weights are being updated",
            whom=str(plan.layer),
            why="prepared copies are those of the weights before",
            remedy="call layer.after_update() once the new weights are there",
            code="promise.weight_update",
        )

    return make


def stale(plan: LayerPlan, names: Sequence[str]) -> NpuBackendError:
    """A step after a weight was written that a prepared copy was made of."""
    return PrepareError(
        f"{', '.join(names)} changed after it was prepared",
        whom=str(plan.layer),
        why="a prepared copy still holds the values before, and steps read the copy",
        remedy="put layer.before_update() and layer.after_update() around what writes weights",
        code="promise.weight_update",
    )


def unplanned(plan: LayerPlan, phase: Phase, gone: Sequence[str]) -> Make:
    """A step in a phase that the deployment said is unreachable.

    Args:
        plan: The plan.
        phase: The phase.
        gone: Names of what is released at the time of the step; looked at then.
    """

    def make(rows: int) -> NpuBackendError:
        reach = ", ".join(str(p) for p in plan.reach)
        why = f"the deployment reaches {reach}; {phase} is not among them"
        remedy = f"plan with {phase} reachable (--phases, --local-prefill, --role-switch)"
        if not gone:
            return BoundExceededError(
                f"a step in phase {phase}, which was not planned",
                whom=str(plan.layer),
                why=why,
                remedy=remedy,
                code="phase",
            )
        return WeightReleasedError(
            f"a step in phase {phase} came after a release that relied on its absence",
            layer=plan.layer_id,
            weight=", ".join(gone),
            why=why,
            remedy=remedy,
        )

    return make


def let_go(plan: LayerPlan, phase: Phase, *, compiling: bool) -> NpuBackendError:
    """A step that reads what was released restorably, where it cannot be brought back."""
    why = (
        "a compiled graph would bring it back at every call"
        if compiling
        else "its bound layer, which holds the way back, is gone"
    )
    return WeightReleasedError(
        f"a step in phase {phase} reads what was released restorably",
        layer=plan.layer_id,
        weight=", ".join(row.name for row in plan.weights if row.action == "restore"),
        why=why,
        remedy="call layer.restore() before it" if compiling else "keep the bound layer",
    )


def host_serves(plan: LayerPlan, phase: Phase) -> Make:
    """A step that the host's own code serves."""

    def make(rows: int) -> NpuBackendError:
        return PlanMismatchError(
            f"the host serves {phase} of this layer with its own code",
            whom=str(plan.layer),
            why=f"the plan's entry is host:mha, by {plan.deployment.host}",
            remedy="leave such steps to the host",
            code="phase",
        )

    return make


def unused(plan: LayerPlan, site: str, phase: Phase | None) -> Make:
    """A batched matmul that no path uses."""

    def make(rows: int) -> NpuBackendError:
        where = "" if phase is None else f" in {phase}"
        return PlanMismatchError(
            f"no path{where} uses {site}, so no kernel was chosen for it",
            whom=str(plan.layer),
            why="a fused path multiplies with w_kc itself, and the host its own phases",
            remedy=f"call {site} only where the plan has entries for it",
            code="phase",
        )

    return make


def phase_needed(plan: LayerPlan, site: str) -> NpuBackendError:
    """A call without phase where phases do not share one table."""
    entries = [
        f"{e.strategy}: {', '.join(map(str, e.phases))}, rows {e.tokens[0]}..{e.tokens[1] or 'any'}"
        for e in plan.table(site)
    ]
    return PlanMismatchError(
        f"{site} needs phase= in this plan",
        whom=str(plan.layer),
        why=("its phases do not share one table", *entries),
        remedy=f"call layer.{site}(x, phase=...), or take layer.{site}_for(phase) once",
        code="phase",
    )
