"""The four batched matmuls ``(tokens, heads, K) x (heads, K, N) -> (tokens, heads, N)``.

None prepares anything: each multiplies with the loaded weight itself. A step without rows returns
an empty result and calls no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from npu_backend import Offer, PlanMismatchError
from npu_backend.runtime import LayerCache, Prepared, Weights

__all__ = ["Custom", "Explicit", "Plain", "Transposing"]

Kernel = Callable[[torch.Tensor], torch.Tensor]

_SWAP = (1, 0, 2)
_STRAIGHT = (0, 1, 2)


def _weight(prepared: Prepared) -> torch.Tensor:
    """Return the site's weight: the one that the offer reads, ``(heads, K, N)``."""
    (name,) = prepared.offer.reads
    return prepared.weights[name]


class _Direct:
    """A kernel that needs no preparation."""

    def prepare(self, weights: Weights) -> None:
        """Prepare nothing."""


class Transposing(_Direct):
    """``npu_transpose_batchmatmul`` with perm_x1 (1, 0, 2): it takes the tokens first."""

    ops = ("npu::npu_transpose_batchmatmul",)

    def bind(self, prepared: Prepared, cache: LayerCache) -> Kernel:
        """Return the kernel."""
        weight = _weight(prepared)
        heads, _, width = weight.shape
        multiply = prepared.ops.npu_transpose_batchmatmul

        def kernel(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 0:
                return x.new_empty((0, heads, width))
            return multiply(x, weight, perm_x1=_SWAP, perm_x2=_STRAIGHT, perm_y=_SWAP)

        return kernel


class Explicit(_Direct):
    """The same op behind a transposing copy of the activation, for shapes over its B x K limit."""

    ops = ("npu::npu_transpose_batchmatmul",)

    def bind(self, prepared: Prepared, cache: LayerCache) -> Kernel:
        """Return the kernel."""
        weight = _weight(prepared)
        heads, _, width = weight.shape
        multiply = prepared.ops.npu_transpose_batchmatmul

        def kernel(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 0:
                return x.new_empty((0, heads, width))
            turned = x.transpose(0, 1).contiguous()
            return multiply(turned, weight, perm_x1=_STRAIGHT, perm_x2=_STRAIGHT, perm_y=_SWAP)

        return kernel


def _not_contiguous(x: torch.Tensor, offer: Offer, whom: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"the activation {tuple(x.shape)} has strides {x.stride()}",
        whom=f"{whom}, {offer.strategy}",
        why="the op takes raw pointers, and the offer declares no copy of the activation "
        "(copies_input): the plan took it for contiguous",
        remedy="hand the attention output over contiguous, or request another kernel here",
        code="layout.contiguous",
    )


class Custom(_Direct):
    """``batch_matmul_transpose`` of a kernel library, which ignores strides.

    The weight is contiguous by the offer's envelope. The activation is copied only where the offer
    says so; elsewhere one that is not contiguous is an error, for the op would read it wrongly.
    """

    def ops(self, weights: Weights) -> Iterable[str]:
        """Return the op of the library that the plan chose."""
        return (weights.offer.mode,)

    def bind(self, prepared: Prepared, cache: LayerCache) -> Kernel:
        """Return the kernel."""
        weight = _weight(prepared)
        heads, _, width = weight.shape
        multiply = prepared.ops.batch_matmul_transpose
        offer, whom = prepared.offer, f"{prepared.layer}, batched matmul {prepared.site}"

        def copying(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty((x.shape[0], heads, width))
            if x.shape[0] != 0:
                multiply(x.contiguous(), weight, out)
            return out

        def kernel(x: torch.Tensor) -> torch.Tensor:
            if not x.is_contiguous():
                raise _not_contiguous(x, offer, whom)
            out = x.new_empty((x.shape[0], heads, width))
            if x.shape[0] != 0:
                multiply(x, weight, out)
            return out

        return copying if offer.copies_input else kernel


class Plain(_Direct):
    """``torch.bmm``: heads first in between, no limit, one more copy."""

    def bind(self, prepared: Prepared, cache: LayerCache) -> Kernel:
        """Return the kernel."""
        weight = _weight(prepared)

        def kernel(x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()

        return kernel
