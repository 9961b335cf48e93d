"""Rotation and cache writes from plain ops, for what the fused ops do not take."""

from __future__ import annotations

import torch

__all__ = ["rotate", "write_rows"]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last dimension; fp32 inside, rounded once.

    Args:
        x: ``(..., rope)``, interleaved.
        cos: Broadcastable to ``x``; column ``i`` of the first half is the angle of pair ``i``.
        sin: Likewise.
        interleaved: Return the pairs side by side; else half layout, all first components and then
            all second ones.
    """
    pairs = x.shape[-1] // 2
    c, s = cos[..., :pairs].float(), sin[..., :pairs].float()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    first, second = even * c - odd * s, odd * c + even * s
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2).to(x.dtype)
    return torch.cat((first, second), -1).to(x.dtype)


def _without_padding(
    current: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and slots in which padded tokens repeat what another token writes.

    A negative slot is padding. Dropping such rows would make shapes depend on values, which no
    captured graph can; so they write the first real token's row once more, and where there is none,
    what slot 0 holds already.
    """
    real = slots >= 0
    first = real.to(torch.int32).argmax().reshape(1)
    slot = slots.index_select(0, first).clamp(min=0)
    row = torch.where(
        real.any(), rows.index_select(0, first), current.index_select(0, slot).to(rows.dtype)
    )
    return torch.where(real.unsqueeze(-1), rows, row), torch.where(real, slots, slot)


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, nz: bool) -> None:
    """Write one row a token into a paged cache.

    Args:
        cache: ``(blocks, block_size, 1, width)``.
        rows: ``(tokens, width)``.
        slots: ``(tokens,)`` int64; negative ones write nothing.
        nz: The cache's bytes are laid out as ``(blocks, width / C, block_size, C)``, C 32 for
            8-bit elements and 16 for others.
    """
    blocks, size, _, width = cache.shape
    if width == 0:
        return
    rows = rows.to(cache.dtype)
    if cache.dtype.itemsize == 1:
        # Not every op that follows takes every 8-bit dtype; bytes are bytes.
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    if nz:
        inner = 32 if cache.dtype.itemsize == 1 else 16
        target = cache.view(blocks, width // inner, size, inner)
        current = target.transpose(1, 2).reshape(-1, width)
        rows, slots = _without_padding(current, rows, slots)
        target[slots // size, :, slots % size, :] = rows.reshape(-1, width // inner, inner)
        return
    flat = cache.view(-1, width)
    rows, slots = _without_padding(flat, rows, slots)
    flat.index_copy_(0, slots, rows)
