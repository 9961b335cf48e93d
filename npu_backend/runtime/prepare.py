"""Prepare a layer's strategies and bind their callables, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from attrs import frozen

from npu_backend.deployment import Phase
from npu_backend.errors import NpuBackendError, PrepareError
from npu_backend.offers import SITE_WEIGHTS, SITES, Offer
from npu_backend.plan import LayerPlan, TableEntry
from npu_backend.runtime.amend import check_copies
from npu_backend.runtime.cache import LayerCache
from npu_backend.runtime.dispatch import phase_callables
from npu_backend.runtime.impl import Unit
from npu_backend.runtime.shapes import fixed_shape
from npu_backend.runtime.weights import Prepared

__all__ = ["Callables", "prepare_layer"]

Key = tuple["str | None", Offer]
Calls = Mapping[Phase, Callable[..., Any]]


@frozen
class Callables:
    """What a prepared layer runs.

    Args:
        plan: The plan, amended by what the prepared tensors turned out to be.
        paths: The path of each phase that an offer serves.
        sites: The kernels of each site by phase.
    """

    plan: LayerPlan
    paths: Calls
    sites: Mapping[str, Calls]


class _Contiguous:
    """Makes weights contiguous in place, and can take it back."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make(self, weight: torch.Tensor) -> None:
        """Replace the bytes behind a weight: same object, name and size, other strides."""
        if not weight.is_contiguous():
            self._before.append((weight, weight.data))
            weight.data = weight.data.contiguous()

    def undo(self) -> None:
        """Give every weight its former bytes and strides back."""
        for weight, data in self._before:
            weight.data = data


def _bind_sites(
    plan: LayerPlan, units: Mapping[Key, Unit], prepared: Mapping[Key, Prepared], cache: LayerCache
) -> dict[str, Calls]:
    sites: dict[str, Calls] = {}
    for site in SITES:
        bound = {
            key: unit.bind(prepared[key], cache) for key, unit in units.items() if key[0] == site
        }

        def call_of(
            entry: TableEntry, _: Phase, bound: Mapping[Key, Any] = bound, site: str = site
        ) -> Callable[..., Any]:
            assert entry.offer is not None
            call: Callable[..., Any] = bound[site, entry.offer]
            return call

        where = f"{plan.layer}, batched matmul {site}"
        sites[site] = phase_callables(plan.table(site), call_of, where=where, path=False)
    return sites


def _bind_paths(
    plan: LayerPlan,
    units: Mapping[Key, Unit],
    prepared: Callable[[Key, Callable[..., Any] | None], Prepared],
    q_absorb: Calls,
    cache: LayerCache,
) -> Calls:
    """Bind each path once for each q_absorb callable that its phases have."""
    bound: dict[tuple[Offer, Any], Callable[..., Any]] = {}

    def call_of(entry: TableEntry, phase: Phase) -> Callable[..., Any]:
        assert entry.offer is not None
        kernel = q_absorb.get(phase) if "q_absorb" in entry.offer.uses else None
        key = (entry.offer, kernel)
        if key not in bound:
            unit = units[None, entry.offer]
            bound[key] = unit.bind(prepared((None, entry.offer), kernel), cache)
        return bound[key]

    served = [entry for entry in plan.path if entry.offer is not None]
    return phase_callables(served, call_of, where=f"{plan.layer}, path", path=True)


def _prepare(
    plan: LayerPlan,
    units: Mapping[Key, Unit],
    weights: Mapping[str, torch.Tensor],
    cache: LayerCache,
    others: Mapping[str, torch.Tensor],
    contiguous: _Contiguous,
) -> Callables:
    for (site, offer), unit in units.items():
        if site is not None and offer.envelope.contiguous:
            contiguous.make(unit.weights[SITE_WEIGHTS[site]])
    made: dict[Key, dict[str, torch.Tensor]] = {}
    planned = {r.name for r in plan.weights if r.copy_of is None}
    for key, unit in units.items():
        made[key] = unit.prepare()
        plan = check_copies(plan, unit, made[key], weights, others.values())

    mine = (weights, cache.tensors(), *made.values())
    for tensor in chain.from_iterable(tensors.values() for tensors in mine):
        fixed_shape(tensor)

    def prepared(key: Key, q_absorb: Callable[..., Any] | None = None) -> Prepared:
        unit = units[key]
        read = {*unit.offer.step_reads, *(f"{n}.scale" for n in unit.offer.step_reads)}
        return Prepared(
            made[key],
            weights={n: t for n, t in unit.weights.items() if n in read or n not in planned},
            q_absorb=q_absorb,
            layer=plan.layer,
            deployment=plan.deployment,
            offer=unit.offer,
            site=unit.site,
            ops=unit.weights.ops,
            device=unit.weights.device,
        )

    sites = _bind_sites(plan, units, {k: prepared(k) for k in units if k[0]}, cache)
    paths = _bind_paths(plan, units, prepared, sites["q_absorb"], cache)
    return Callables(plan, paths, sites)


def prepare_layer(
    plan: LayerPlan,
    units: Mapping[Key, Unit],
    weights: Mapping[str, torch.Tensor],
    cache: LayerCache,
    others: Mapping[str, torch.Tensor],
) -> Callables:
    """Prepare and bind every strategy of a layer.

    Copies of one layer exist beside its originals, never of two; a weight that a kernel needs
    contiguous is replaced in place. If anything fails the weights are as before.

    Raises:
        PrepareError: An implementation failed, or its copies are not as declared.
    """
    contiguous = _Contiguous()
    try:
        # Tensors made here are used by any later step, whatever mode the host loads in.
        with torch.inference_mode(False), torch.no_grad():
            made = _prepare(plan, units, weights, cache, others, contiguous)
        for unit in units.values():
            unit.weights.settle()
        return made
    except BaseException as err:
        for unit in reversed(list(units.values())):
            unit.weights.take_back()
        contiguous.undo()
        if isinstance(err, NpuBackendError) or not isinstance(err, Exception):
            raise
        raise PrepareError(
            "the layer cannot be prepared",
            whom=str(plan.layer),
            why=f"{type(err).__name__}: {err}",
            remedy="free memory, or correct what the reason names; the layer is as it was",
        ) from err
