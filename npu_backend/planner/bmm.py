"""One batched matmul by itself: the table that a layer with it would get, and every answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from npu_backend.deployment import Deployment, Phase
from npu_backend.model.records import MlaLayer
from npu_backend.model.weights import loaded_weights
from npu_backend.offers import Answer, BmmSpec, Reason
from npu_backend.plan import DeclineRecord, Table, TableEntry
from npu_backend.planner.answers import BMM_HOOK, sort_answers
from npu_backend.planner.kernels import bmm_readers
from npu_backend.planner.site import decide
from npu_backend.planner.tables import Candidate, cells_of_reach

__all__ = ["BmmPlan", "Verdict", "matmul", "plan_bmm"]


@frozen
class Verdict:
    """What can be said of one strategy for one matmul.

    Args:
        strategy: Its name.
        provider: ``NAME (DIST VERSION)``.
        candidate: The legal offer, or None where it is declined.
        reasons: Why it is declined, each with figure and source.
        serves: Row ranges that it serves in the table.
    """

    strategy: str
    provider: str
    candidate: Candidate | None
    reasons: tuple[Reason, ...]
    serves: tuple[tuple[int, int | None], ...]

    def refusals(self, rows: int | None = None) -> tuple[Reason, ...]:
        """Return why it may not multiply ``rows`` rows (None: any); empty where it may."""
        if self.candidate is None or rows is None:
            return self.reasons
        low, high = self.candidate.offer.envelope.tokens
        if low <= rows and (high is None or rows <= high):
            return self.reasons
        limits = self.candidate.offer.limits or (
            Reason(
                "tokens.limit", f"the offer covers rows {low}..{high or 'any'} [{self.provider}]"
            ),
        )
        told = "; ".join(limit.message for limit in limits)
        return (*self.reasons, Reason("tokens.limit", f"{rows} rows: {told}"))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        offer = None if self.candidate is None else self.candidate.offer
        return {
            "strategy": self.strategy,
            "provider": self.provider,
            "legal": offer is not None,
            "tokens": None if offer is None else list(offer.envelope.tokens),
            "copies_input": None if offer is None else offer.copies_input,
            "contiguous_weight": None if offer is None else offer.envelope.contiguous,
            "limits": [] if offer is None else [r.to_dict() for r in offer.limits],
            "reasons": [r.to_dict() for r in self.reasons],
            "serves": [list(rows) for rows in self.serves],
        }


@frozen
class BmmPlan:
    """The table of one matmul, and every strategy that was spoken of.

    Args:
        spec: The matmul.
        deployment: What it was planned for.
        table: Who serves which rows.
        verdicts: Every strategy, in call order.
    """

    spec: BmmSpec
    deployment: Deployment
    table: Table
    verdicts: tuple[Verdict, ...]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The legal offers in call order, whatever a measured order says."""
        found = [v.candidate for v in self.verdicts if v.candidate is not None]
        return tuple(sorted(found, key=lambda c: c.order))

    def entry(self, rows: int) -> TableEntry:
        """Return who multiplies ``rows`` rows; of several phases, the first that has an answer."""
        for entry in self.table:
            low, high = entry.tokens
            if low <= rows and (high is None or rows <= high):
                return entry
        raise LookupError(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        spec = self.spec
        return {
            "bmm": {
                "site": spec.site,
                "B": spec.B,
                "K": spec.K,
                "N": spec.N,
                "dtype": spec.dtype,
                "weight_dtype": spec.weight_dtype,
                "weight_layout": spec.weight_layout,
                "weight_format": spec.weight_format,
                "input_layout": spec.input_layout,
            },
            "deployment": self.deployment.to_dict(),
            "table": [entry.to_dict() for entry in self.table],
            "strategies": [verdict.to_dict() for verdict in self.verdicts],
        }


def matmul(
    site: str,
    B: int,
    K: int,
    N: int,
    *,
    dtype: str = "bfloat16",
    weight_layout: str | None = None,
    weight_format: str = "nd",
    model_type: str = "",
) -> BmmSpec:
    """Return a matmul of a layer that has it and of which nothing else is known.

    Args:
        site: ``q_absorb`` or ``v_up``.
        B: Local heads.
        K: Depth: ``qk_nope_head_dim`` or ``kv_lora_rank``.
        N: Width: ``kv_lora_rank`` or ``v_head_dim``.
        dtype: Of activation and weight.
        weight_layout: Default as hosts load it: ``w_kc`` strided, ``w_vc`` contiguous.
        weight_format: ``nd`` or ``nz``.
        model_type: For what a model as such forbids.
    """
    absorb = site == "q_absorb"
    layout = weight_layout or ("strided" if absorb else "contiguous")
    layer = MlaLayer(
        layer_id=0,
        model_type=model_type,
        hidden_size=K,
        num_heads=B,
        kv_lora_rank=N if absorb else K,
        qk_nope_head_dim=K if absorb else N,
        qk_rope_head_dim=0,
        v_head_dim=K if absorb else N,
        use_rope=False,
        dtype=dtype,
        w_kc_layout=layout if absorb else "strided",
        w_vc_layout="contiguous" if absorb else layout,
    )
    return BmmSpec(
        layer=layer,
        site=site,
        B=B,
        K=K,
        N=N,
        dtype=dtype,
        weight_dtype=dtype,
        weight_layout=layout,
        weight_format=weight_format,
        input_layout="strided" if absorb else "contiguous",
    )


def plan_bmm(spec: BmmSpec, deployment: Deployment, answers: Any) -> BmmPlan:
    """Decide one matmul by the same rules as every layer's.

    Args:
        spec: The matmul.
        deployment: What is planned for; its requests are not looked at.
        answers: Whoever is asked; see :class:`npu_backend.planner.Answers`.

    Raises:
        SelectionError: Some row count has no legal strategy.
    """
    reach = deployment.reach(is_nextn=False)
    cells = cells_of_reach(reach)
    weights = {w.name: w for w in loaded_weights(spec.layer, 1)}
    asked: tuple[Answer, ...] = answers.ask_bmm(spec, deployment)
    sorted_ = sort_answers(
        asked,
        hook=BMM_HOOK,
        site=spec.site,
        layer=spec.layer,
        weights=weights,
        catalog=deployment.catalog,
    )
    decided = decide(
        hook=BMM_HOOK,
        site=spec.site,
        sorted_=sorted_,
        cells=cells,
        requests=(),
        readers_of=bmm_readers(spec.site, {}, weights),
        deployment=deployment,
        shape=spec.shape,
        order=deployment.kernel_order(spec.site, spec.shape, spec.dtype),
    )
    if decided.uncovered is not None:
        raise decided.uncovered.error(
            f"batched matmul {spec.site}, (B, K, N) = {spec.shape}, {spec.dtype}"
        )
    serves: dict[Candidate, dict[tuple[int, int | None], list[Phase]]] = {}
    for run in decided.served:
        if run.by is not None:
            serves.setdefault(run.by, {}).setdefault(run.tokens, []).append(run.phase)
    return BmmPlan(spec, deployment, decided.table, _verdicts(decided.declined, sorted_, serves))


def _verdicts(
    declined: tuple[DeclineRecord, ...],
    sorted_: Any,
    serves: Mapping[Candidate, Mapping[tuple[int, int | None], list[Phase]]],
) -> tuple[Verdict, ...]:
    """Return one verdict for each strategy of each provider, legal ones first."""
    refused: dict[tuple[str, str], list[Reason]] = {}
    for record in declined:
        told = refused.setdefault((record.strategy, record.provider), [])
        told += [r for r in record.reasons if r not in told]
    rows = [
        Verdict(
            c.strategy,
            c.plugin.provider,
            c,
            (),
            tuple(sorted(serves.get(c, {}), key=lambda r: r[0])),
        )
        for c in sorted_.candidates
        if c in serves or (c.strategy, c.plugin.provider) not in refused
    ]
    rows += [
        Verdict(strategy, provider, None, tuple(reasons), ())
        for (strategy, provider), reasons in refused.items()
    ]
    return tuple(rows)
