"""What the rows of a layer's cache mean, independently of every path that writes them.

Source: the descriptions of npu_mla_prolog_v3 and of the attention op that reads its packed cache
(kv_quant_sparse_flash_attention) in ops-transformer.
"""

from __future__ import annotations

import torch
from attrs import frozen

from npu_backend.model.records import PACKED_TILE, KvLayout, MlaLayer
from npu_backend.runtime.cache import LayerCache
from npu_backend.runtime.prove.writer import in_rope_layout, read_slots, write_slots

__all__ = ["CacheRows"]

_TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def _to_8_bit(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    top = _TOP[dtype]
    if dtype == torch.int8:
        return torch.round(values).clamp(-top - 1, top).to(dtype)
    return values.clamp(-top, top).to(dtype)


@frozen(eq=False)
class CacheRows:
    """Latents and keys of one layer, in and out of its cache.

    Args:
        layer: The layer.
        layout: Its KV layout.
        latent_factor: What a quantized latent was multiplied with, on the CPU; else None.
        key_factor: Likewise of the key.
    """

    layer: MlaLayer
    layout: KvLayout
    latent_factor: torch.Tensor | None = None
    key_factor: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: MlaLayer, cache: LayerCache) -> CacheRows:
        """Return the reader and writer of a cache."""
        factors = [
            None if factor is None else factor.detach().cpu().reshape(-1)
            for factor in (cache.latent_factor, cache.key_factor)
        ]
        return cls(layer, cache.layout, *factors)

    def write(
        self, cache: LayerCache, slots: torch.Tensor, latent: torch.Tensor, key: torch.Tensor
    ) -> None:
        """Write normed latents ``(slots, latent)`` and rotated keys ``(slots, rope)``, whose
        components are in their own (interleaved) order."""
        key = in_rope_layout(key, self.layout)
        eight, dtype = cache.k_nope.dtype, getattr(torch, self.layer.dtype)
        if self.layout.packed:
            tiles = latent.float().reshape(len(latent), -1, PACKED_TILE)
            scale = tiles.abs().amax(-1) / _TOP[eight]
            scale[scale == 0] = 1.0
            values = _to_8_bit(tiles / scale[..., None], eight).reshape(len(latent), -1)
            parts = [values, key.to(dtype).contiguous(), scale.contiguous()]
            row = torch.cat([part.view(torch.uint8) for part in parts], -1)
            write_slots(cache.k_nope, slots, row.view(eight), self.layout)
            return
        for tensor, rows, factor in (
            (cache.k_nope, latent, self.latent_factor),
            (cache.k_rope, key, self.key_factor),
        ):
            if factor is not None:
                rows = _to_8_bit(rows.float() * factor, tensor.dtype)
            write_slots(tensor, slots, rows, self.layout)

    def read(
        self, k_nope: torch.Tensor, k_rope: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents and keys of slots as floats, keys in the layout's order.

        Args:
            k_nope: The raw latent cache.
            k_rope: The raw key cache.
            slots: ``(slots,)``.
        """
        rows = read_slots(k_nope, slots, self.layout)
        if self.layout.packed:
            width, rope = self.layer.kv_lora_rank, self.layer.qk_rope_head_dim
            raw = rows.contiguous().view(torch.uint8)
            key = (
                raw[:, width : width + 2 * rope].contiguous().view(getattr(torch, self.layer.dtype))
            )
            scale = raw[:, width + 2 * rope :].contiguous().view(torch.float32)
            tiles = rows[:, :width].float().reshape(len(rows), -1, PACKED_TILE)
            return (tiles * scale[..., None]).reshape(len(rows), width), key.float()
        latent, key = rows.float(), read_slots(k_rope, slots, self.layout).float()
        if self.latent_factor is not None:
            latent = latent / self.latent_factor
        if self.key_factor is not None:
            key = key / self.key_factor
        return latent, key

    def dense(self, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both caches as floats in ``(blocks, block_size, 1, width)``, on the CPU."""
        latent, key = self.read(cache.k_nope, cache.k_rope, torch.arange(cache.num_slots))
        shape = (-1, self.layout.block_size, 1)
        return latent.reshape(*shape, latent.shape[-1]), key.reshape(*shape, key.shape[-1])
