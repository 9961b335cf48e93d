"""The batched matmuls of a layer: what must be multiplied, and who reads which weight for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from npu_backend.deployment import Deployment, Phase
from npu_backend.model.records import MlaLayer
from npu_backend.model.weights import WeightSpec
from npu_backend.offers import SITE_WEIGHTS, BmmSpec
from npu_backend.planner.readers import Readers, add
from npu_backend.planner.tables import Cells, Served

__all__ = ["bmm_readers", "bmm_spec", "site_cells"]


def site_cells(path: Sequence[Served], site: str) -> Cells:
    """Return the cells in which the paths that serve use a site, adjacent rows joined."""
    cells: dict[Phase, list[tuple[int, int | None]]] = {}
    for run in path:
        if run.by is not None and site in run.by.offer.uses:
            cells.setdefault(run.phase, []).append(run.tokens)
    joined: dict[Phase, tuple[tuple[int, int | None], ...]] = {}
    for phase, ranges in cells.items():
        out: list[tuple[int, int | None]] = []
        for low, high in sorted(ranges):
            if out and out[-1][1] is not None and out[-1][1] + 1 == low:
                out[-1] = (out[-1][0], high)
            else:
                out.append((low, high))
        joined[phase] = tuple(out)
    return {p: joined[p] for p in Phase if p in joined}


def bmm_spec(layer: MlaLayer, deployment: Deployment, site: str, cells: Cells) -> BmmSpec:
    """Return the matmul of a site: at q_absorb the activation is a slice of q, so strided."""
    absorb = site == "q_absorb"
    bounds = [high for ranges in cells.values() for _, high in ranges]
    known = [b for b in bounds if b is not None]
    return BmmSpec(
        layer=layer,
        site=site,
        B=layer.local_heads(deployment.attn_tp_size),
        K=layer.qk_nope_head_dim if absorb else layer.kv_lora_rank,
        N=layer.kv_lora_rank if absorb else layer.v_head_dim,
        dtype=layer.dtype,
        weight_dtype=layer.bmm_dtype,
        weight_layout=layer.w_kc_layout if absorb else layer.w_vc_layout,
        input_layout="strided" if absorb else "contiguous",
        phases=frozenset(cells),
        max_tokens=max(known) if len(known) == len(bounds) else None,
    )


def bmm_readers(
    site: str, before: Readers, weights: Mapping[str, WeightSpec]
) -> Callable[[Sequence[Served]], Readers]:
    """Return a function from who serves a site to everybody's readers.

    A kernel that multiplies with a prepared copy does not read the site's weight, so the reader
    ``SITE@phase`` stands only where the serving kernel reads it.
    """
    suffix = f"{site}@"
    weight = SITE_WEIGHTS[site]
    others: Readers = {
        name: kept
        for name, who in before.items()
        if (kept := tuple(r for r in who if not (name == weight and r.startswith(suffix))))
    }

    def readers_of(served: Sequence[Served]) -> Readers:
        readers: Readers = {}
        for run in served:
            if run.by is not None:
                add(readers, weights, sorted(run.by.offer.step_reads), f"{site}@{run.phase}")
        merged = dict(others)
        for name, who in readers.items():
            merged[name] = (*who, *(r for r in merged.get(name, ()) if r not in who))
        return merged

    return readers_of
