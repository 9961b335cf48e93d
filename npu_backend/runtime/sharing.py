"""Bound layers that stand on the same weights: what one still reads, another does not free."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from npu_backend.errors import WeightReleasedError
from npu_backend.plan import LayerPlan
from npu_backend.runtime.storages import shares
from npu_backend.runtime.tombstone import is_tombstone

if TYPE_CHECKING:
    from npu_backend.runtime.bound import BoundLayer

__all__ = ["enlist", "read_elsewhere", "refuse_buried"]

_living: weakref.WeakSet[BoundLayer] = weakref.WeakSet()


def enlist(layer: BoundLayer) -> None:
    """Note that a layer was bound; forgotten with the layer."""
    _living.add(layer)


def _needed(layer: BoundLayer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the loaded weights that a layer reads from now on.

    What its own plan releases counts until it is prepared, for copies are made of it.
    """
    keep = {r.name for r in layer.plan.weights if r.action == "keep" or not layer.prepared}
    for name, tensor in layer.weights.items():
        if name in keep and not is_tombstone(tensor):
            yield name, tensor


def read_elsewhere(layer: BoundLayer) -> dict[str, str]:
    """Return the weights planned to go that another bound layer still reads, and which layer."""
    found: dict[str, str] = {}
    others = [other for other in _living if other is not layer]
    for row in layer.plan.released() if others else ():
        mine = layer.weights[row.name]
        for other in others:
            names = [n for n, t in _needed(other) if t is mine or shares(t, mine)]
            if names:
                found[row.name] = (
                    f"another bound layer ({other.plan.layer}), which reads {', '.join(names)}"
                )
                break
    return found


def refuse_buried(
    plan: LayerPlan, weights: Mapping[str, torch.Tensor], own: list[str], doing: str
) -> None:
    """Refuse to go on where another bound layer released a weight of this one.

    Args:
        plan: The layer's plan.
        weights: Its loaded weights.
        own: Names of what this layer released itself.
        doing: What is about to happen, in the message.

    Raises:
        WeightReleasedError: It names the weights; nothing was done.
    """
    gone = [n for n, t in weights.items() if n not in own and is_tombstone(t)]
    if gone:
        raise WeightReleasedError(
            f"{doing} after another bound layer had released its weights",
            layer=plan.layer_id,
            weight=", ".join(gone),
            why="two bound layers were given the same parameters, and one released them",
            remedy="bind a layer's parameters once, or prepare every layer before one is released; "
            "nothing was done",
        )
