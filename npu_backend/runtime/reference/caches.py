"""Writing rows into a latent cache, in place, by slot.

A paged cache is ``(blocks, block_size, 1, width)``; slot ``s`` is row ``s % block_size`` of block
``s // block_size``. In ``PA_NZ`` the same bytes are laid out as ``(blocks, width / C, block_size,
C)`` with C = 16 for 16-bit and 32-bit elements and 32 for 8-bit ones.
"""

from __future__ import annotations

import torch

__all__ = ["nz_inner", "nz_view", "write_rows"]


def nz_inner(dtype: torch.dtype) -> int:
    """Return the width of one FRACTAL_NZ column block: 32 for 8-bit elements, else 16."""
    return 32 if dtype.itemsize == 1 else 16


def nz_view(cache: torch.Tensor) -> torch.Tensor:
    """Return a PA_NZ cache as ``(blocks, width / C, block_size, C)``, sharing its memory."""
    blocks, size, _, width = cache.shape
    inner = nz_inner(cache.dtype)
    return cache.view(blocks, width // inner, size, inner)


def write_rows(
    op: str,
    cache: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    nz: bool = False,
    skip_negative: bool = False,
    unique: bool = False,
) -> None:
    """Write one row a token.

    Args:
        op: Who writes, for the messages.
        cache: ``(blocks, block_size, 1, width)``, contiguous.
        rows: ``(tokens, width)``.
        slots: ``(tokens,)``, any integer dtype.
        nz: The cache is laid out in FRACTAL_NZ.
        skip_negative: Negative slots are padding and nothing is written for them.
        unique: The op forbids two tokens in one slot.

    Raises:
        ValueError: A slot is outside the cache (a device would write over foreign memory), slots
            repeat where the op forbids it, or the cache is not contiguous.
    """
    if not cache.is_contiguous():
        raise ValueError(f"{op}: the cache must be contiguous, its strides are {cache.stride()}")
    blocks, size, _, _ = cache.shape
    slots = slots.reshape(-1).long()
    if skip_negative:
        kept = slots >= 0
        rows, slots = rows[kept], slots[kept]
    if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= blocks * size):
        wrong = slots[(slots < 0) | (slots >= blocks * size)].tolist()
        raise ValueError(f"{op}: slots {wrong} are outside the {blocks * size} slots of the cache")
    if unique and len(set(slots.tolist())) != slots.numel():
        raise ValueError(f"{op}: two tokens have the same slot; the op does not allow it")
    rows = rows.to(cache.dtype)
    if nz:
        inner = nz_inner(cache.dtype)
        target = nz_view(cache)
        target[slots // size, :, slots % size, :] = rows.reshape(rows.shape[0], -1, inner)
    else:
        cache.view(blocks * size, -1)[slots] = rows
