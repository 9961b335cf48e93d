"""``bind()``: hold a layer's plan against real tensors; what it returns can prepare and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch

from npu_backend.deployment import Phase
from npu_backend.errors import PlanMismatchError
from npu_backend.model.weights import DTYPE_BYTES, loaded_weights
from npu_backend.offers import SITES, Offer
from npu_backend.plan import LayerPlan, TableEntry
from npu_backend.runtime.amend import keep_aliased, living_holders, tensor_bytes
from npu_backend.runtime.bound import BoundLayer
from npu_backend.runtime.cache import LayerCache
from npu_backend.runtime.impl import Unit, resolve
from npu_backend.runtime.ops import Ops, ops_for
from npu_backend.runtime.tombstone import is_tombstone
from npu_backend.runtime.weights import Weights

__all__ = ["bind"]


def _weight_problems(plan: LayerPlan, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Return how the given tensors differ from the plan's loaded weights."""
    specs = {s.name: s for s in loaded_weights(plan.layer, plan.deployment.attn_tp_size)}
    found = []
    for row in plan.weights:
        if row.copy_of is not None:
            continue
        tensor = weights.get(row.name)
        if tensor is None:
            found.append(f"{row.name} is missing")
            continue
        if not isinstance(tensor, torch.Tensor):
            found.append(f"{row.name} is a {type(tensor).__name__}, not a tensor")
            continue
        if is_tombstone(tensor):
            found.append(f"{row.name} was released before: {tensor!r}")
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != row.dtype:
            found.append(f"{row.name} is {dtype}, the plan says {row.dtype}")
        if tensor_bytes(tensor) != row.bytes:
            found.append(f"{row.name} is {tensor_bytes(tensor)} bytes, the plan says {row.bytes}")
        spec = specs.get(row.name)
        # Scales and packed weights have no one shape; all else has.
        plain = (
            spec is not None
            and len(spec.shape) > 1
            and (torch.Size(spec.shape).numel() * DTYPE_BYTES.get(spec.dtype, 1) == spec.bytes)
        )
        if plain and spec is not None and tuple(tensor.shape) != spec.shape:
            found.append(f"{row.name} is {tuple(tensor.shape)}, the plan says {spec.shape}")
    return found


def _norm_problems(plan: LayerPlan, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Return what is wrong with the norms, which paths read and no plan releases."""
    layer = plan.layer
    sizes = {"kv_a_layernorm": layer.kv_lora_rank}
    if layer.q_lora_rank is not None:
        sizes["q_a_layernorm"] = layer.q_lora_rank
    found = []
    for name, size in sizes.items():
        norm = weights.get(name)
        if norm is None:
            # A host that runs every path itself needs none here.
            if any(entry.offer is not None for entry in plan.path):
                found.append(f"{name} is missing: the norm's weight, ({size},), beside the plan's")
        elif not isinstance(norm, torch.Tensor):
            found.append(f"{name} is a {type(norm).__name__}, not a tensor")
        elif tuple(norm.shape) != (size,) or not norm.is_floating_point():
            dtype = str(norm.dtype).removeprefix("torch.")
            found.append(f"{name} is {dtype} {tuple(norm.shape)}, the layer's is float ({size},)")
    return found


def _check(
    plan: LayerPlan, weights: Mapping[str, torch.Tensor], cache: LayerCache | None
) -> torch.device:
    problems = _weight_problems(plan, weights) + _norm_problems(plan, weights)
    devices = {str(t.device) for t in weights.values() if isinstance(t, torch.Tensor)}
    if cache is not None:
        problems += cache.problems(plan.layer)
        devices |= {str(t.device) for t in cache.tensors().values()}
    if len(devices) > 1:
        problems.append(f"weights and cache are on {', '.join(sorted(devices))}")
    if problems:
        raise PlanMismatchError(
            "the tensors given are not those of the plan",
            whom=str(plan.layer),
            why=problems,
            remedy="give the layer's own tensors by the plan's names, or plan for these",
        )
    return torch.device(devices.pop())


def _visible(
    offer: Offer, names: Iterable[str], weights: Mapping[str, torch.Tensor], planned: set[str]
) -> dict[str, torch.Tensor]:
    """Return the named weights with their scales, and what stands beside the plan."""
    wanted = set(chain.from_iterable((n, f"{n}.scale") for n in names))
    return {n: t for n, t in weights.items() if n in wanted or n not in planned}


def _units(
    plan: LayerPlan, weights: Mapping[str, torch.Tensor], ops: Ops, device: torch.device
) -> dict[tuple[str | None, Offer], Unit]:
    """Return one unit for each strategy that serves, its implementation resolved."""
    planned = {r.name for r in plan.weights if r.copy_of is None}
    units: dict[tuple[str | None, Offer], Unit] = {}
    for site in (*SITES, None):
        for entry in plan.path if site is None else plan.table(site):
            offer, plugin = entry.offer, entry.plugin
            if offer is None or plugin is None or (site, offer) in units:
                continue
            declared = offer.reads | offer.reads_once | offer.copied | offer.step_reads
            context = Weights(
                _visible(offer, declared, weights, planned),
                layer=plan.layer,
                deployment=plan.deployment,
                offer=offer,
                site=site,
                ops=ops,
                device=device,
            )
            units[site, offer] = Unit(site, offer, plugin, resolve(offer, plugin), context)
    return units


def _served(table: Iterable[TableEntry]) -> set[Phase]:
    return {p for entry in table for p in entry.phases}


def _check_reach(plan: LayerPlan) -> None:
    """Refuse a plan whose path leaves a reachable phase to nobody; such a plan was edited."""
    if left := [p for p in plan.reach if p not in _served(plan.path)]:
        raise PlanMismatchError(
            f"the plan serves nobody in {', '.join(map(str, left))}",
            whom=str(plan.layer),
            why="the phase is reachable and no entry of the path's table names it",
            remedy="bind a plan as the planner made it",
        )


def bind(
    plan: LayerPlan,
    weights: Mapping[str, torch.Tensor],
    cache: LayerCache | None = None,
    *,
    host_keeps_storage: bool = False,
    also_alive: Mapping[str, torch.Tensor] | Iterable[torch.Tensor] = (),
    captured: bool = False,
    reload: Callable[[str], torch.Tensor] | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> BoundLayer:
    """Bind one layer's plan to its tensors. Nothing is prepared, changed or freed yet.

    Args:
        plan: The layer's plan.
        weights: Every loaded weight of the plan by its name, tensor or parameter; beside them what
            implementations read and no plan releases, above all the norms ``q_a_layernorm``
            ``(q_lora_rank,)`` and ``kv_a_layernorm`` ``(kv_lora_rank,)``.
        cache: The layer's cache and RoPE tables; None where weights are prepared and released
            before the host sizes its KV cache, which :meth:`BoundLayer.attach` gives later.
        host_keeps_storage: The host's C++ holds the storages of its parameters: release resizes
            them to zero instead of dropping them, and holders that nobody named are expected.
        also_alive: Tensors that live on whatever happens here, by name or not; a weight that shares
            a storage with one of them is kept.
        captured: Graphs were captured already, so nothing may be released.
        reload: Returns a weight by its name, on any device: restorable weights then come back by it
            and leave no copy in host memory.
        within: Entered around all that looks at original weights: a host that keeps them in another
            form (turned, say) shows them in the planner's inside.

    Returns:
        The layer; ``layer.plan`` is the amended plan, in which a weight whose storage something
        else keeps alive is kept.

    Raises:
        PlanMismatchError: The tensors or the cache are not those of the plan.
        PrepareError: An implementation cannot be imported or lacks a part.
        SchemaMismatchError: A planned op is absent, or its schema is not the catalog's.
    """
    _check_reach(plan)
    named = (
        dict(also_alive)
        if isinstance(also_alive, Mapping)
        else {f"also_alive[{i}]": t for i, t in enumerate(also_alive)}
    )
    with within():
        device = _check(plan, weights, cache)
        ops = ops_for(device, plan.deployment)
        units = _units(plan, weights, ops, device)
        for unit in units.values():
            ops.check(unit.ops(), unit.whom)
        others = {**({} if cache is None else cache.tensors()), **named}
        held = living_holders(plan, weights, others, host_keeps_storage=host_keeps_storage)
    return BoundLayer(
        plan=keep_aliased(plan, held),
        weights=weights,
        cache=cache,
        units=units,
        device=device,
        others=others,
        host_keeps_storage=host_keeps_storage,
        captured=captured,
        reload=reload,
        within=within,
    )
