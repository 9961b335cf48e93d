"""Sort what plugins said into legal candidates, refusals, and prohibitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from attrs import field, frozen

from npu_backend.catalog import Catalog
from npu_backend.model.records import MlaLayer
from npu_backend.model.weights import WeightSpec, nz_castable
from npu_backend.offers import SITE_WEIGHTS, Answer, Decline, Forbid, Offer, PluginInfo, Reason
from npu_backend.plan import DeclineRecord
from npu_backend.planner.tables import Candidate

__all__ = ["BMM_HOOK", "PATH_HOOK", "RELEASE_HOOK", "Sorted", "sort_answers"]

PATH_HOOK = "select_preprocess_path"
BMM_HOOK = "select_bmm_kernel"
RELEASE_HOOK = "release_weights"


@frozen
class Sorted:
    """What the answers to one question amount to.

    Args:
        candidates: Legal, unforbidden offers in call order.
        declined: Every refusal so far.
        forbids: Prohibitions by strategy.
        known: Every strategy anybody spoke of, by name.
    """

    candidates: tuple[Candidate, ...]
    declined: tuple[DeclineRecord, ...]
    forbids: Mapping[str, tuple[tuple[PluginInfo, Forbid], ...]] = field(factory=dict)
    known: frozenset[str] = frozenset()


def _weight_reasons(
    offer: Offer, site: str | None, weights: Mapping[str, WeightSpec], catalog: Catalog
) -> list[Reason]:
    """Return why an offer cannot be trusted or served with these weights."""
    reasons: list[Reason] = []
    named = offer.reads | offer.reads_once | offer.copied | {w for _, w in offer.aliases}
    if unknown := sorted(named - set(weights)):
        # A misspelt read would let the weight be freed under the strategy's feet.
        reasons.append(
            Reason(
                "plugin.failed",
                f"the offer names weights the layer does not have: {', '.join(unknown)} "
                f"(it has {', '.join(weights)})",
            )
        )
    elif site is not None and (
        other := sorted(named - {SITE_WEIGHTS[site], f"{SITE_WEIGHTS[site]}.scale"})
    ):
        # Paths are decided by then: a reader found here would come too late for their copies.
        reasons.append(
            Reason(
                "plugin.failed",
                f"a kernel of {site} multiplies with {SITE_WEIGHTS[site]}; the offer also names "
                f"{', '.join(other)}",
            )
        )
    elif not named:
        reasons.append(
            Reason("plugin.failed", "the offer declares no weight that it reads or copies")
        )
    if offer.envelope.format == "nz" and not unknown:
        cast_ = [n for n in sorted(named) if len(weights[n].shape) > 1]
        for name in cast_:
            spec = weights[name]
            # A projection (out, in) multiplies as (K, N) = (in, out); w_kc, w_vc are (heads, K, N).
            k, n = (spec.shape[1], spec.shape[0]) if len(spec.shape) == 2 else spec.shape[1:]
            if why := nz_castable(catalog, spec.dtype, k, n):
                reasons.append(Reason("format.nz", f"{name} cannot be cast to FRACTAL_NZ: {why}"))
    return reasons


def _kv_reason(offer: Offer, layer: MlaLayer) -> list[Reason]:
    if offer.kv_layouts is None or layer.kv_layout in offer.kv_layouts:
        return []
    can = "; ".join(sorted(str(k) for k in offer.kv_layouts)) or "none"
    return [
        Reason(
            "kv.layout",
            f"the layer's KV layout is {layer.kv_layout}, the strategy can write: {can}",
        )
    ]


def sort_answers(
    answers: Iterable[Answer],
    *,
    hook: str,
    site: str | None,
    layer: MlaLayer,
    weights: Mapping[str, WeightSpec],
    catalog: Catalog,
) -> Sorted:
    """Sort the answers of one hook for one layer or one batched matmul."""
    offers: list[tuple[PluginInfo, Offer]] = []
    declined: list[DeclineRecord] = []
    forbids: dict[str, list[tuple[PluginInfo, Forbid]]] = {}
    known: set[str] = set()

    def refuse(strategy: str, plugin: PluginInfo, reasons: Iterable[Reason]) -> None:
        declined.append(DeclineRecord(hook, site, strategy, plugin.provider, tuple(reasons)))

    for answer in answers:
        if answer.failure is not None:
            refuse(answer.plugin.name, answer.plugin, [answer.failure.reason])
        for record in answer.records:
            strategy = cast("Offer | Decline | Forbid", record).strategy
            known.add(strategy)
            if isinstance(record, Offer):
                offers.append((answer.plugin, record))
            elif isinstance(record, Decline):
                refuse(strategy, answer.plugin, record.reasons)
            elif isinstance(record, Forbid):
                forbids.setdefault(strategy, []).append((answer.plugin, record))
                refuse(strategy, answer.plugin, record.reasons)

    candidates = []
    for order, (plugin, offer) in enumerate(offers):
        reasons = _weight_reasons(offer, site, weights, catalog)
        if site is None:
            reasons += _kv_reason(offer, layer)
        reasons += [
            Reason(
                "plugin.forbidden",
                f"{forbidder.provider} forbids {offer.strategy}: "
                + "; ".join(str(r) for r in forbid.reasons),
            )
            for forbidder, forbid in forbids.get(offer.strategy, ())
        ]
        if reasons:
            refuse(offer.strategy, plugin, reasons)
        else:
            candidates.append(Candidate(offer, plugin, order))
    return Sorted(
        tuple(candidates),
        tuple(declined),
        {name: tuple(rows) for name, rows in forbids.items()},
        frozenset(known),
    )
