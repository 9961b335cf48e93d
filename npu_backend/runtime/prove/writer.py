"""Write and read a layer's cache by its KV layout, independently of every path.

What a prefill worker's transfer leaves in a decode worker's cache, and what a proof looks at.
"""

from __future__ import annotations

import torch

from npu_backend.model.records import KvLayout

__all__ = ["in_rope_layout", "poison_slots", "read_slots", "write_slots"]


def in_rope_layout(keys: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """Return rotated keys ``(..., rope)``, given in interleaved order, in the layout's order."""
    if layout.rope != "half":
        return keys
    return torch.cat((keys[..., 0::2], keys[..., 1::2]), dim=-1)


def _places(cache: torch.Tensor, slots: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """Return where each value of each slot lies in the flat cache: ``(slots, width)``."""
    _, size, _, width = cache.shape
    block, offset = (slots // size).unsqueeze(-1), (slots % size).unsqueeze(-1)
    column = torch.arange(width).unsqueeze(0)
    start = block * size * width
    if layout.cache_mode != "PA_NZ":
        return start + offset * width + column
    inner = 32 if cache.dtype.itemsize == 1 else 16
    return start + (column // inner) * size * inner + offset * inner + column % inner


def _elements(tensor: torch.Tensor, flat: bool = True) -> torch.Tensor:
    """Return a tensor's elements; 8-bit ones as bytes, for few ops take every 8-bit dtype."""
    seen = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return seen.view(-1) if flat else seen


def write_slots(
    cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, layout: KvLayout
) -> None:
    """Write ``(slots, width)`` into a paged cache, rounded to its dtype."""
    places = _places(cache, slots, layout).to(cache.device)
    _elements(cache)[places] = _elements(rows.to(cache.device, cache.dtype), flat=False)


def read_slots(cache: torch.Tensor, slots: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """Return ``(slots, width)`` of a paged cache, on the CPU."""
    found = _elements(cache.detach().cpu())[_places(cache, slots, layout)]
    return found.view(cache.dtype)


def poison_slots(cache: torch.Tensor, slots: torch.Tensor, layout: KvLayout) -> None:
    """Fill slots with what no step writes, so that one that misses them cannot pass: NaN, in 8-bit
    caches the byte 0x7f, which is e4m3's NaN, int8's largest value and a scale of 3e38."""
    shape = (len(slots), cache.shape[-1])
    if cache.dtype.itemsize == 1:
        rows = torch.full(shape, 0x7F, dtype=torch.uint8).view(cache.dtype)
    else:
        rows = torch.full(shape, float("nan"))
    write_slots(cache, slots, rows, layout)
