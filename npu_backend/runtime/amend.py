"""Amend a plan by what only tensors can tell: who shares a storage, and what copies really are.

A release may become a keep, never the reverse.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from math import prod

import torch
from attrs import evolve

from npu_backend.errors import PrepareError
from npu_backend.plan import LayerPlan, WeightPlan
from npu_backend.runtime.culprits import culprits, tensors_on
from npu_backend.runtime.impl import Unit
from npu_backend.runtime.storages import holders, span, unnamed_holders
from npu_backend.runtime.tombstone import is_tombstone, unswappable

__all__ = ["AliasWarning", "check_copies", "keep_aliased", "living_holders", "tensor_bytes"]


class AliasWarning(UserWarning):
    """A weight shares its storage, or does not, against what was declared."""


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor shows."""
    return int(prod(tensor.shape)) * tensor.element_size()


def keep_aliased(plan: LayerPlan, aliased: Mapping[str, str]) -> LayerPlan:
    """Return the plan with the named weights kept.

    Args:
        plan: The plan.
        aliased: Weight and who shares its storage, in words.
    """
    rows = tuple(
        evolve(
            row,
            action="keep",
            reasons=(f"weight.aliased: shares its storage with {aliased[row.name]}", *row.reasons),
        )
        if row.name in aliased and row.action != "keep" and row.copy_of is None
        else row
        for row in plan.weights
    )
    return plan if rows == plan.weights else plan.evolve(weights=rows)


def living_holders(
    plan: LayerPlan,
    weights: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
    *,
    host_keeps_storage: bool,
    elsewhere: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the weights planned to go whose storage something else keeps, and what does.

    Args:
        plan: The plan.
        weights: The given weights, planned or not.
        others: Tensors that live on: the cache's, and those the caller named.
        host_keeps_storage: Holders that neither the caller named nor Python sees are then the
            host's C++ and expected.
        elsewhere: Weights that another bound layer still reads, and which.
    """
    found: dict[str, str] = {}
    for row in plan.released():
        tensor = weights[row.name]
        if is_tombstone(tensor):
            continue
        if elsewhere is not None and row.name in elsewhere:
            found[row.name] = elsewhere[row.name]
            continue
        # The caller may name the weight itself among the living, say as a module's parameter.
        given = {**weights, **others}
        alive = {n: t for n, t in given.items() if n != row.name and t is not tensor}
        same = [n for n, t in weights.items() if n != row.name and t is tensor]
        named = [*same, *holders(tensor, alive)]
        if named:
            found[row.name] = ", ".join(dict.fromkeys(named))
        elif unnamed := _unnamed(tensor, host_keeps_storage=host_keeps_storage):
            found[row.name] = unnamed
    return found


def _unnamed(tensor: torch.Tensor, *, host_keeps_storage: bool) -> str | None:
    """Return in words what holds a weight that nobody named, or None.

    Where the host's C++ keeps storages their number says nothing. What Python can see on the bytes
    counts all the same, for reading it after the bytes are gone would end the process.
    """
    here = span(tensor)
    if here is not None and (count := unnamed_holders(tensor)):
        where = (here.start, here.nbytes, here.device, tensor)
        if not host_keeps_storage or tensors_on(*where):
            who = ", ".join(culprits(*where))
            told = f"{count} living tensor{'s' if count > 1 else ''} that nobody named"
            return f"{told}: {who}" if who else told
    return unswappable(tensor)


def _copy_rows(plan: LayerPlan, unit: Unit) -> list[WeightPlan]:
    """Return the plan's rows of the copies that a unit makes."""
    made = f"made by {unit.plugin.provider} while preparing"
    names = {f"{unit.offer.strategy}.{name}" for name in unit.offer.copied}
    names |= {f"{unit.plugin.dist}/{name}" for name in names}
    return [r for r in plan.weights if r.copy_of and r.name in names and made in r.reasons]


def _warn(message: str) -> None:
    warnings.warn(message, AliasWarning, stacklevel=4)


def check_copies(
    plan: LayerPlan,
    unit: Unit,
    prepared: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    others: Iterable[torch.Tensor],
) -> LayerPlan:
    """Hold what was prepared against what was declared.

    A prepared tensor on a loaded weight's storage that is declared an alias is as planned;
    undeclared (a cast that returned its input), the weight is kept and the copy counts no bytes. A
    declared alias that is a copy is told and counted. All else must add up to the declared bytes.

    Raises:
        PrepareError: The copies are more or fewer bytes than declared.
    """
    declared = dict(unit.offer.aliases)
    known = [s for t in others if (s := span(t)) is not None]
    own: dict[int, int] = {}
    unannounced: dict[int, tuple[str, int]] = {}
    surprises: dict[str, list[str]] = {}
    for name, tensor in prepared.items():
        shared = holders(tensor, weights)
        here = span(tensor)
        if shared:
            for weight in shared:
                if declared.get(name) != weight:
                    surprises.setdefault(weight, []).append(name)
        elif here is not None and not any(here.overlaps(k) for k in known):
            if name in declared:
                unannounced[here.identity] = (name, here.nbytes)
            else:
                own[here.identity] = here.nbytes
    # A storage that also carries a declared copy is counted there.
    unannounced = {i: v for i, v in unannounced.items() if i not in own}

    rows = _copy_rows(plan, unit)
    actual, fixed = sum(own.values()), [r for r in rows if r.copy_of not in surprises]
    free = [r for r in rows if r.copy_of in surprises]
    left = actual - sum(r.bytes for r in fixed)
    if not 0 <= left <= sum(r.bytes for r in free):
        told = ", ".join(f"{r.name} {r.bytes}" for r in rows) or "no copy"
        found = ", ".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in prepared.items())
        raise PrepareError(
            f"the copies made are {actual} bytes, declared are {sum(r.bytes for r in rows)}",
            whom=unit.whom,
            why=(f"declared: {told}", f"prepared: {found or 'nothing'}"),
            remedy="let the offer's copies (and aliases) say what prepare() makes",
            code="plugin.failed",
        )
    changes: dict[str, WeightPlan] = {}
    for row in free:
        size = min(left, row.bytes)
        left -= size
        which = ", ".join(surprises[str(row.copy_of)])
        reason = f"weight.aliased: {which} shares the storage of {row.copy_of}"
        changes[row.name] = evolve(row, bytes=size, reasons=(*row.reasons, reason))
    amended = tuple(changes.get(row.name, row) for row in plan.weights)
    for name, size in unannounced.values():
        weight = declared[name]
        _warn(
            f"{unit.whom}: {name} is declared to share the storage of {weight} and is a copy of "
            f"{size} bytes"
        )
        amended += (
            WeightPlan(
                f"{unit.offer.strategy}.{name}",
                str(prepared[name].dtype).removeprefix("torch."),
                size,
                "keep",
                (f"made by {unit.plugin.provider} while preparing, declared as an alias",),
                (),
                weight,
            ),
        )
    if amended != plan.weights:
        plan = plan.evolve(weights=amended)
    return keep_aliased(
        plan,
        {
            w: ", ".join(f"{unit.offer.strategy}.{n}" for n in names)
            for w, names in surprises.items()
            if w in {r.name for r in plan.weights}
        },
    )
