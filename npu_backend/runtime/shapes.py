"""Tell torch.compile that a tensor's sizes never change."""

from __future__ import annotations

import torch

__all__ = ["fixed_shape"]


def fixed_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Mark every size of a tensor as constant for torch.compile, and return the tensor.

    With ``dynamic=True`` the compiler takes sizes that are equal by chance (64 rows, 64 heads) for
    the same number, and compiles again when the rows change. Weights and caches have one shape for
    good. As ``torch._dynamo.mark_static``, without importing the compiler, which takes seconds.
    """
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]
    return tensor
