"""Prepare and release a whole model at load, layer by layer.

At most one layer's copies stand beside originals at a time, so the peak is what is resident plus
one layer's copies. Runs before the host sizes its KV cache: bytes freed later buy no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen

from npu_backend.plan import LayerPlan, ModelPlan
from npu_backend.runtime.bound import BoundLayer
from npu_backend.runtime.ledger import Ledger

__all__ = ["ModelLedger", "prepare_and_release"]


@frozen
class ModelLedger:
    """The account of a model's release, one ledger a layer."""

    layers: tuple[Ledger, ...]

    @property
    def planned(self) -> int:
        """Bytes that the plan says are freed."""
        return sum(ledger.planned for ledger in self.layers)

    @property
    def freed(self) -> int:
        """Bytes of storages that were seen to die."""
        return sum(ledger.freed for ledger in self.layers)

    @property
    def agrees(self) -> bool:
        """Whether every layer's ledger agrees with its plan."""
        return all(ledger.agrees for ledger in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "planned": self.planned,
            "freed": self.freed,
            "agrees": self.agrees,
            "layers": [ledger.to_dict() for ledger in self.layers],
        }


def prepare_and_release(
    plans: ModelPlan | Iterable[LayerPlan],
    bind_layer: Callable[[LayerPlan], BoundLayer],
    *,
    empty_cache: bool = True,
    done: Callable[[BoundLayer], None] | None = None,
) -> tuple[tuple[BoundLayer, ...], ModelLedger]:
    """Bind, prepare and release layer after layer.

    A layer that cannot be prepared stops here: it and all after it are as they were, and those
    before it are prepared and released as planned.

    Args:
        plans: The plan, or some of its layers.
        bind_layer: Binds one layer, usually without a cache:
            ``lambda plan: bind(plan, weights_of[plan.layer_id])``.
        empty_cache: Give free blocks back to the device at the end, so that the host sees them.
        done: Called after each layer.

    Returns:
        The bound layers, and the account.

    Raises:
        PrepareError: A layer cannot be prepared.
    """
    bound, ledgers = [], []
    for plan in plans:
        layer = bind_layer(plan)
        layer.prepare()
        ledgers.append(layer.release())
        bound.append(layer)
        if done is not None:
            done(layer)
    if empty_cache and bound and bound[0].device.type == "npu":
        torch.get_device_module(bound[0].device).empty_cache()
    return tuple(bound), ModelLedger(tuple(ledgers))
