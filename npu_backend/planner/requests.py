"""Explicit wishes: whom they bind, in which order they put offers, and whether they were met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen
from packaging.utils import canonicalize_name

from npu_backend.deployment import Deployment, Phase, Request
from npu_backend.model.records import MlaLayer
from npu_backend.planner.answers import Sorted
from npu_backend.planner.tables import Candidate, Cells, Served, overlap

__all__ = ["FUSED", "FUSED_ORDER", "Unmet", "active", "check", "matches", "preferred"]

FUSED = "fused"
"""The request ``path=fused``: per layer the first legal path of :data:`FUSED_ORDER`."""
FUSED_ORDER = ("mlaprolog", "mlapo")


@frozen
class Unmet:
    """A request that a layer does not meet, and why."""

    request: Request
    reasons: tuple[str, ...]


def active(deployment: Deployment, layer: MlaLayer, kind: str) -> tuple[Request, ...]:
    """Return the requests that bind a layer.

    A path binds main layers, and MTP layers with ``@nextn`` only. A kernel binds every layer whose
    paths use its site, with ``@nextn`` MTP layers only.
    """

    def binds(request: Request) -> bool:
        if layer.is_nextn:
            return request.nextn or kind != "path"
        return not request.nextn

    return tuple(r for r in deployment.requests if r.kind == kind and binds(r))


def matches(candidate: Candidate, request: Request) -> bool:
    """Whether an offer is what a request names."""
    if request.kind == "path" and request.name == FUSED:
        named = candidate.strategy in FUSED_ORDER
    else:
        named = candidate.strategy == request.name
    return named and (
        request.dist is None
        or canonicalize_name(candidate.plugin.dist) == canonicalize_name(request.dist)
    )


def _rank(candidate: Candidate, requests: Sequence[Request]) -> tuple[int, int] | None:
    for index, request in enumerate(requests):
        if matches(candidate, request):
            fused = request.kind == "path" and request.name == FUSED
            return index, FUSED_ORDER.index(candidate.strategy) if fused else 0
    return None


def preferred(
    candidates: Iterable[Candidate], requests: Sequence[Request]
) -> tuple[list[Candidate], frozenset[Candidate]]:
    """Return the candidates, requested ones first, and the set of requested ones."""
    ranks = {c: _rank(c, requests) for c in candidates}
    wanted = [c for c, rank in ranks.items() if rank is not None]
    wanted.sort(key=lambda c: (ranks[c] or (0, 0), c.order))
    rest = sorted((c for c, rank in ranks.items() if rank is None), key=lambda c: c.order)
    return [*wanted, *rest], frozenset(wanted)


def _named(request: Request, strategy: str) -> bool:
    if request.kind == "path" and request.name == FUSED:
        return strategy in FUSED_ORDER
    return strategy == request.name


def check(
    request: Request,
    sorted_: Sorted,
    candidates: Sequence[Candidate],
    extra_reasons: Sequence[str],
    cells: Cells,
    served: Sequence[Served],
) -> Unmet | None:
    """Return why a layer does not meet a request, or None where it does.

    A request must serve its whole legal, non-empty part of what is reachable beside idle.

    Args:
        candidates: The candidates that are still legal when the table is final.
        extra_reasons: Refusals found while the table was built.
    """
    beside_idle: Cells = {p: r for p, r in cells.items() if p is not Phase.IDLE}
    fitting = [c for c in candidates if matches(c, request)]
    legal = {c: part for c in fitting if (part := overlap(c.offer, beside_idle))}
    said = [
        f"{d.provider}: {reason}"
        for d in sorted_.declined
        if _named(request, d.strategy)
        for reason in d.reasons
    ] + list(extra_reasons)
    if not legal:
        if fitting:
            phases = ", ".join(str(p) for p in beside_idle) or "nothing"
            covered = {p for c in fitting for p in c.offer.envelope.phases}
            serves = ", ".join(str(p) for p in Phase if p in covered)
            idle = " beside idle, which meets no request" if Phase.IDLE in cells else ""
            said.append(f"phase: it serves {serves}; reachable here is {phases}{idle}")
        elif request.dist and (named := [c for c in candidates if _named(request, c.strategy)]):
            owners = sorted({canonicalize_name(c.plugin.dist) for c in named})
            said.append(f"distribution {request.dist} offers none; {', '.join(owners)} does")
        return Unmet(request, tuple(said) or ("no plugin offers or declines it here",))
    for run in served:
        if run.by is None or run.phase not in beside_idle or matches(run.by, request):
            continue
        low, high = run.tokens
        for part in legal.values():
            for first, last in part.get(run.phase, ()):
                if low <= (last or low) and first <= (high or first):
                    return Unmet(
                        request,
                        (
                            f"{run.by.strategy} of {run.by.plugin.provider} serves {run.phase} "
                            f"rows {low}..{high or 'any'}, which it could serve",
                            *said,
                        ),
                    )
    return None
