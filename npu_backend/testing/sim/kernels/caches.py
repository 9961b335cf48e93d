"""Writing rows into KV caches, by cache mode."""

from __future__ import annotations

import torch

from npu_backend.testing.sim.errors import OpRejectedError
from npu_backend.testing.sim.kernels.base import place

__all__ = ["page_slots", "write_blocks", "write_slots", "write_whole"]


def _checked(op: str, index: torch.Tensor, slots: int) -> torch.Tensor:
    """Return the mask of rows to write; negative slots are padding, others must exist once."""
    kept = index >= 0
    used = index[kept]
    if used.numel() and int(used.max()) >= slots:
        raise OpRejectedError(
            op,
            f"cache index {int(used.max())} is outside the {slots} slots of the cache "
            "(a device would write over foreign memory)",
            str(place()),
        )
    if len(set(used.tolist())) != used.numel():
        raise OpRejectedError(op, "the cache index has duplicates", str(place()))
    return kept


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as bytes: not every torch moves them element by element."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def write_slots(
    op: str, cache: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, *, nz: bool = False
) -> None:
    """Write one row a token into a paged cache.

    Args:
        op: Name for the messages.
        cache: (blocks, block size, 1, width), contiguous within a block; with ``nz`` its bytes are
            laid out as (blocks, width / 16, block size, 16), 32 wide in 8 bit.
        rows: (tokens, width) of the cache's dtype.
        index: (tokens,), slot of each token; negative means padding.
        nz: Whether the cache is laid out in FRACTAL_NZ.
    """
    cache, rows = _bytes(cache), _bytes(rows)
    blocks, size, _, width = cache.shape
    kept = _checked(op, index, blocks * size)
    rows, index = rows[kept], index[kept]
    if nz:
        inner = 16 if cache.element_size() == 2 else 32
        view = cache.view(blocks, width // inner, size, inner)
        view[index // size, :, index % size, :] = rows.view(-1, width // inner, inner)
    else:
        cache.view(blocks, size, width)[index // size, index % size] = rows


def write_blocks(
    op: str,
    cache: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    batch: int,
    *,
    nz: bool = False,
) -> None:
    """Write runs of rows, each run starting at the slot that ``starts`` gives for its block."""
    size = cache.shape[1]
    length = rows.shape[0] // max(batch, 1)
    runs = -(-length // size)
    offsets = torch.arange(length)
    index = starts.view(batch, runs)[:, offsets // size] + offsets % size
    write_slots(op, cache, rows, index.reshape(-1), nz=nz)


def write_whole(cache: torch.Tensor, rows: torch.Tensor) -> None:
    """Write all rows in order into a cache that has one slot a token."""
    _bytes(cache).copy_(_bytes(rows).view(cache.shape))


def page_slots(index: torch.Tensor, lengths: list[int], size: int) -> torch.Tensor:
    """Return the slot of each token, where an index gives the block of each page.

    Args:
        index: (pages,), the block that each page of each sequence goes to.
        lengths: Tokens of each sequence; each begins a page.
        size: Slots of a block.
    """
    slots, page = [], 0
    for length in lengths:
        offsets = torch.arange(length)
        slots.append(index[page + offsets // size] * size + offsets % size)
        page += -(-length // size)
    return torch.cat(slots) if slots else index[:0]
