"""What the layers of one forward pass share: the rows of the RoPE tables.

Every layer rotates by the same positions, so their cos and sin are gathered once, by whichever
layer needs them first. That is not always layer 0: a pipeline stage may start later, and in hybrid
models the first layer may have no latent attention.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["gather_rope", "one_forward"]

Rows = tuple[torch.Tensor, torch.Tensor]

_FORWARD: ContextVar[dict[tuple[int, int], tuple[Rows, tuple[torch.Tensor, ...]]] | None] = (
    ContextVar("npu_backend_forward", default=None)
)


@contextmanager
def one_forward() -> Generator[None]:
    """Share RoPE rows between the layers called inside; for a host to put around its forward.

    A tensor of positions must not change inside. Without this context, and under torch.compile,
    each layer gathers for itself.
    """
    token = _FORWARD.set({})
    try:
        yield
    finally:
        _FORWARD.reset(token)


def _gather(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> Rows:
    return cos.index_select(0, positions), sin.index_select(0, positions)


def gather_rope(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> Rows:
    """Return the rows of both tables at some positions.

    Args:
        cos: ``(max_positions, rope)``.
        sin: Likewise.
        positions: ``(tokens,)`` int64.
    """
    if torch.compiler.is_compiling():
        return _gather(cos, sin, positions)
    shared = _FORWARD.get()
    if shared is None:
        return _gather(cos, sin, positions)
    key = (id(cos), id(positions))
    found = shared.get(key)
    if found is None:
        # Held with the rows: while they live, no other tensor can have their ids.
        found = shared[key] = (_gather(cos, sin, positions), (cos, sin, positions))
    return found[0]
