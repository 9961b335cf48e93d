"""Prepare a layer's strategies and bind their callables, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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

__all__ = ["Callables", "PreparedLayer", "prepare_layer"]

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
        bound = {key: units[key].bind(made, cache) for key, made in prepared.items()
                 if key[0] == site}  # fmt: skip

        def call_of(
            entry: TableEntry, _: Phase, bound: Mapping[Key, Any] = bound, site: str = site
        ) -> Callable[..., Any]:
            assert entry.offer is not None
            call: Callable[..., Any] = bound[site, entry.offer]
            return call

        table = plan.table(site)
        sites[site] = phase_callables(
            table,
            call_of,
            where=f"{plan.layer}, batched matmul {site}",
            path=False,
            without={p for e in table if (site, e.offer) not in bound for p in e.phases},
        )
    return sites


def _bind_paths(
    plan: LayerPlan,
    units: Mapping[Key, Unit],
    prepared: Callable[[Key, Callable[..., Any] | None], Prepared],
    q_absorb: Calls,
    cache: LayerCache,
    lacking: Collection[Key],
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
    unbound = {p for e in plan.table("q_absorb") for p in e.phases} - q_absorb.keys()
    return phase_callables(
        served,
        call_of,
        where=f"{plan.layer}, path",
        path=True,
        without={
            phase
            for entry in served
            for phase in entry.phases
            if (None, entry.offer) in lacking
            or (phase in unbound and entry.offer is not None and "q_absorb" in entry.offer.uses)
        },
    )


@frozen(eq=False)
class PreparedLayer:
    """What a layer's strategies made; no callable yet, for those need a cache.

    Args:
        plan: The plan, amended by what the prepared tensors turned out to be.
        units: The strategies.
        made: The prepared tensors of each.
    """

    plan: LayerPlan
    units: Mapping[Key, Unit]
    made: Mapping[Key, Mapping[str, torch.Tensor]]

    def keep_addresses(self, before: PreparedLayer) -> PreparedLayer:
        """Return this with each copy written into the memory of the one before it.

        Captured graphs and callables that somebody kept then read the new values: no prepared copy
        can be older than its weight. A name that shares a loaded weight's storage stays as it is.
        """
        made: dict[Key, dict[str, torch.Tensor]] = {}
        with torch.no_grad():
            for key, tensors in self.made.items():
                aliases, old = dict(self.units[key].offer.aliases), before.made.get(key, {})
                made[key] = {}
                for name, tensor in tensors.items():
                    kept = old.get(name)
                    same = (
                        kept is not None
                        and name not in aliases
                        and (kept.shape, kept.dtype, kept.stride())
                        == (tensor.shape, tensor.dtype, tensor.stride())
                    )
                    if same and kept is not None:
                        kept.copy_(tensor)
                    made[key][name] = kept if same and kept is not None else tensor
        return PreparedLayer(self.plan, self.units, made)

    def without(self, gone: Collection[str]) -> PreparedLayer:
        """Return this without the names that share the storage of weights that are to go."""
        made = {}
        for key, tensors in self.made.items():
            shares = {n for n, weight in self.units[key].offer.aliases if weight in gone}
            made[key] = {n: t for n, t in tensors.items() if n not in shares}
        return PreparedLayer(self.plan, self.units, made)

    def with_shared(self, gone: Collection[str]) -> PreparedLayer:
        """Return this with the names again that share the storage of weights that are back."""
        made = {key: dict(tensors) for key, tensors in self.made.items()}
        for key, unit in self.units.items():
            lacking = [n for n, w in unit.offer.aliases if w not in gone and n not in made[key]]
            if lacking:
                fresh = unit.prepare()
                unit.weights.settle()
                made[key] |= {n: fresh[n] for n in lacking if n in fresh}
        return PreparedLayer(self.plan, self.units, made)

    def bind(self, cache: LayerCache, gone: Collection[str] = ()) -> Callables:
        """Bind the callables of every strategy to a cache.

        Args:
            cache: The layer's cache.
            gone: Weights that are released now: phases that read one are left out.

        Raises:
            PrepareError: An implementation failed.
        """
        lacking = {key for key, unit in self.units.items() if not unit.reads.isdisjoint(gone)}
        with torch.inference_mode(False), torch.no_grad():
            for tensor in cache.tensors().values():
                fixed_shape(tensor)
            bare = {key: self._prepared(key) for key in self.units if key[0] and key not in lacking}
            sites = _bind_sites(self.plan, self.units, bare, cache)
            paths = _bind_paths(
                self.plan, self.units, self._prepared, sites["q_absorb"], cache, lacking
            )
        return Callables(self.plan, paths, sites)

    def _prepared(self, key: Key, q_absorb: Callable[..., Any] | None = None) -> Prepared:
        unit = self.units[key]
        planned = {r.name for r in self.plan.weights if r.copy_of is None}
        return Prepared(
            self.made[key],
            weights={n: t for n, t in unit.weights.items() if n in unit.reads or n not in planned},
            q_absorb=q_absorb,
            layer=self.plan.layer,
            deployment=self.plan.deployment,
            offer=unit.offer,
            site=unit.site,
            ops=unit.weights.ops,
            device=unit.weights.device,
        )


def _prepare(
    plan: LayerPlan,
    units: Mapping[Key, Unit],
    weights: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
    contiguous: _Contiguous,
) -> PreparedLayer:
    for (site, offer), unit in units.items():
        if site is not None and offer.envelope.contiguous:
            contiguous.make(unit.weights[SITE_WEIGHTS[site]])
    made: dict[Key, dict[str, torch.Tensor]] = {}
    for key, unit in units.items():
        made[key] = unit.prepare()
        plan = check_copies(plan, unit, made[key], weights, others.values())
    for tensor in chain.from_iterable(tensors.values() for tensors in (weights, *made.values())):
        fixed_shape(tensor)
    return PreparedLayer(plan, units, made)


def prepare_layer(
    plan: LayerPlan,
    units: Mapping[Key, Unit],
    weights: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
    cache: LayerCache | None,
) -> tuple[PreparedLayer, Callables | None]:
    """Prepare every strategy of a layer, and bind it where there is a cache.

    Copies of one layer exist beside its originals, never of two; a weight that a kernel needs
    contiguous is replaced in place. If anything fails the weights are as before.

    Raises:
        PrepareError: An implementation failed, or its copies are not as declared.
    """
    contiguous = _Contiguous()
    try:
        # Tensors made here are used by any later step, whatever mode the host loads in.
        with torch.inference_mode(False), torch.no_grad():
            made = _prepare(plan, units, weights, others, contiguous)
        bound = None if cache is None else made.bind(cache)
        for unit in units.values():
            unit.weights.settle()
        return made, bound
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
