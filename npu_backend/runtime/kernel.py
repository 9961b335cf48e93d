"""One kernel of one batched matmul, prepared and bound without a layer around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npu_backend.deployment import Deployment
from npu_backend.offers import BmmSpec, Offer, PluginInfo
from npu_backend.runtime.cache import LayerCache
from npu_backend.runtime.impl import Unit, resolve
from npu_backend.runtime.ops import Ops, ops_for
from npu_backend.runtime.weights import Prepared, Weights

__all__ = ["bind_kernel", "matmul_operands"]

_STRIDED_TAIL = 64
"""Columns behind the activation at q_absorb: the RoPE part of the query that it is a slice of."""


def matmul_operands(
    spec: BmmSpec,
    rows: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return activation ``(rows, B, K)`` and weight ``(B, K, N)`` in the layouts of a matmul.

    Args:
        spec: The matmul. A strided activation is a slice of a wider one, a strided weight has its
            last dimension not the fastest.
        rows: Rows of the activation.
        device: Where they live; ``meta`` for shapes too big to allocate.
        generator: Gives standard normal values on the CPU; without one, memory as it comes.
    """
    dtype = getattr(torch, spec.dtype)
    B, K, N = spec.shape
    wide = K + (_STRIDED_TAIL if spec.input_layout == "strided" else 0)
    shapes = [(rows, B, wide), (B, N, K) if spec.weight_layout == "strided" else (B, K, N)]
    if generator is None:
        x, weight = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    else:
        made = [torch.randn(shape, generator=generator) for shape in shapes]
        made[1] *= K**-0.5
        x, weight = (tensor.to(dtype).to(device) for tensor in made)
    return x[..., :K], weight.transpose(1, 2) if spec.weight_layout == "strided" else weight


def bind_kernel(
    offer: Offer,
    plugin: PluginInfo,
    spec: BmmSpec,
    deployment: Deployment,
    weight: torch.Tensor,
    *,
    ops: Ops | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Prepare and bind one offer's kernel, as a layer would.

    Args:
        offer: The offer.
        plugin: Whose it is.
        spec: The matmul.
        deployment: What it was offered for.
        weight: ``(B, K, N)``; a contiguous copy is used where the offer needs one.
        ops: The facade; default: that of the weight's device, its schemas checked.

    Returns:
        ``(rows, B, K) -> (rows, B, N)``.

    Raises:
        PrepareError: The implementation cannot be had, or fails.
        SchemaMismatchError: An op that it calls is absent or differs.
    """
    given = ops or ops_for(weight.device, deployment)
    held = weight.contiguous() if offer.envelope.contiguous else weight
    context: dict[str, Any] = {
        "layer": spec.layer,
        "deployment": deployment,
        "offer": offer,
        "site": spec.site,
        "ops": given,
        "device": weight.device,
    }
    unit = Unit(
        spec.site, offer, plugin, resolve(offer, plugin), Weights({spec.weight: held}, **context)
    )
    if ops is None:
        given.check(unit.ops(), unit.whom)
    with torch.no_grad():
        prepared = Prepared(unit.prepare(), weights={spec.weight: held}, q_absorb=None, **context)
        # A kernel writes no cache; an implementation that asks for one finds the smallest.
        cache = LayerCache.allocate(spec.layer, 1, device=weight.device, max_positions=1)
        return unit.bind(prepared, cache)
