"""The paged latent cache of one layer, and its RoPE tables.

RoPE layouts. A head's RoPE part leaves the projection *interleaved*: component ``2i`` and
``2i + 1`` are one pair, rotated by the angle ``position * theta ** (-2i / rope)``.

* ``interleaved``: the cache holds them as they came, ``(e0, o0, e1, o1, ...)``.
* ``half``: the cache holds all even components, then all odd ones, ``(e0, e1, ..., o0, o1, ...)``;
  every fused path and ``npu_interleave_rope`` write this one.
* ``none``: the layer does not rotate; the part, if there is one, is stored as it came.

A score is a sum over components, so queries must be in the layout of the keys: ``q_pe`` always is
in the layout of the layer's cache. Two layouts in one cache give wrong tokens without an error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import field, frozen

from npu_backend.errors import PrepareError
from npu_backend.model.records import KvLayout, MlaLayer
from npu_backend.runtime.forward import gather_rope

__all__ = ["LayerCache", "rope_tables"]


def rope_tables(
    rope: int,
    max_positions: int,
    *,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each ``(max_positions, rope)``: column ``i`` and ``i + rope / 2`` hold
    the angle of pair ``i``. Plain RoPE; a host with scaled RoPE brings its own tables."""
    exponent = torch.arange(0, rope, 2, dtype=torch.float64) / rope
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), theta**-exponent)
    both = torch.cat((angles, angles), -1)
    return both.cos().to(device, dtype), both.sin().to(device, dtype)


@frozen(eq=False, kw_only=True)
class LayerCache:
    """The cache of one layer, written by its preprocess path and read by attention.

    Args:
        layout: The layer's KV layout.
        k_nope: ``(blocks, block_size, 1, kv_lora_rank)``, the normed latent; packed, ``(blocks,
            block_size, 1, 656)``. In cache mode ``PA_NZ`` its bytes are laid out as ``(blocks,
            kv_lora_rank / C, block_size, C)``, C 32 for 8-bit elements and 16 for others.
        k_rope: ``(blocks, block_size, 1, qk_rope_head_dim)``, likewise; packed, without elements.
        cos: ``(max_positions, qk_rope_head_dim)`` as :func:`rope_tables`; None without RoPE.
        sin: Likewise.
        latent_factor: float32, multiplied into a quantized latent before it is rounded: ``(1,)``
            for ``int8`` and ``fp8``, ``(1, kv_lora_rank)`` for ``int8_channel``; else None.
        key_factor: Likewise of an ``int8_channel`` key, ``(1, qk_rope_head_dim)``; else None.
        clip_alpha: ``(1,)`` float32 for ``int8_packed``: 128 latents are clipped to this part of
            their largest magnitude before they are rounded; else None.
    """

    layout: KvLayout
    k_nope: torch.Tensor = field(repr=False)
    k_rope: torch.Tensor = field(repr=False)
    cos: torch.Tensor | None = field(default=None, repr=False)
    sin: torch.Tensor | None = field(default=None, repr=False)
    latent_factor: torch.Tensor | None = field(default=None, repr=False)
    key_factor: torch.Tensor | None = field(default=None, repr=False)
    clip_alpha: torch.Tensor | None = field(default=None, repr=False)

    @classmethod
    def allocate(
        cls,
        layer: MlaLayer,
        num_blocks: int,
        *,
        device: torch.device | str = "cpu",
        max_positions: int = 4096,
        rope_theta: float = 10000.0,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        latent_range: float = 8.0,
    ) -> LayerCache:
        """Return an empty cache in the layer's layout.

        Args:
            layer: The layer.
            num_blocks: Number of blocks; slots are ``num_blocks * block_size``.
            device: Where it lives.
            max_positions: Rows of the RoPE tables made here.
            rope_theta: Base of the RoPE tables made here.
            cos: A host's own table instead, ``(max_positions, rope)``.
            sin: Likewise.
            latent_range: Magnitude of a latent that a quantized cache still holds; a host has
                factors of its own, from its checkpoint.
        """
        layout = layer.kv_layout
        shape = (num_blocks, layout.block_size, 1)
        if layer.has_rope and (cos is None or sin is None):
            cos, sin = rope_tables(
                layer.qk_rope_head_dim,
                max_positions,
                theta=rope_theta,
                dtype=getattr(torch, layer.dtype),
                device=device,
            )
        top = 448.0 if layout.dtype == "fp8" else 127.0

        def factor(*size: int) -> torch.Tensor:
            return torch.full(size, top / latent_range, dtype=torch.float32, device=device)

        by_channel = layout.dtype == "int8_channel"
        latent_factor = factor(1, layer.kv_lora_rank) if by_channel else None
        return cls(
            layout=layout,
            k_nope=torch.zeros(
                (*shape, layer.latent_width),
                dtype=getattr(torch, layout.latent_dtype),
                device=device,
            ),
            k_rope=torch.zeros(
                (*shape, layer.key_width), dtype=getattr(torch, layer.key_dtype), device=device
            ),
            cos=cos if layer.has_rope else None,
            sin=sin if layer.has_rope else None,
            latent_factor=factor(1) if layout.quantizes_queries else latent_factor,
            key_factor=factor(1, layer.qk_rope_head_dim) if by_channel else None,
            clip_alpha=(torch.ones(1, device=device) if layout.dtype == "int8_packed" else None),
        )

    @property
    def num_slots(self) -> int:
        """Slots of the cache; a slot is ``block * block_size + offset``."""
        return self.k_nope.shape[0] * self.k_nope.shape[1]

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each ``(max_positions, qk_rope_head_dim)``.

        Raises:
            PrepareError: The cache was made for a layer without RoPE.
        """
        if self.cos is None or self.sin is None:
            raise PrepareError(
                "the cache has no RoPE tables",
                whom=f"a cache of {self.layout}",
                why="a path that rotates was bound to it",
                remedy="give cos and sin, or allocate the cache for the layer",
                code="rope.layout",
            )
        return self.cos, self.sin

    def rope_rows(self) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Return ``positions -> (cos, sin)``, each ``(tokens, qk_rope_head_dim)``, for steps.

        Inside :func:`npu_backend.runtime.one_forward` the rows are gathered once for all layers
        whose caches share their tables, by whichever layer asks first.

        Raises:
            PrepareError: The cache was made for a layer without RoPE.
        """
        cos, sin = self.tables()

        def rows(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gather_rope(cos, sin, positions)

        return rows

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the cache's tensors by name, the tables included."""
        named = {
            "k_nope": self.k_nope,
            "k_rope": self.k_rope,
            "cos": self.cos,
            "sin": self.sin,
            "latent_factor": self.latent_factor,
            "key_factor": self.key_factor,
            "clip_alpha": self.clip_alpha,
        }
        return {f"cache.{name}": t for name, t in named.items() if t is not None}

    def problems(self, layer: MlaLayer) -> list[str]:
        """Return how this cache differs from what the layer's plan says."""
        found = []
        if self.layout != layer.kv_layout:
            found.append(f"the cache is {self.layout}, the plan says {layer.kv_layout}")
        for name, tensor, width, dtype in (
            ("k_nope", self.k_nope, layer.latent_width, layer.kv_layout.latent_dtype),
            ("k_rope", self.k_rope, layer.key_width, layer.key_dtype),
        ):
            want = (self.layout.block_size, 1, width)
            if tensor.dim() != 4 or tuple(tensor.shape[1:]) != want:
                told = f"(blocks, {want[0]}, 1, {width})"
                found.append(f"{name} is {tuple(tensor.shape)}, not {told}")
            if str(tensor.dtype) != f"torch.{dtype}":
                found.append(f"{name} is {tensor.dtype}, the layout says {dtype}")
            if not tensor.is_contiguous():
                found.append(f"{name} is not contiguous (strides {tensor.stride()})")
        found += self._factor_problems(layer)
        if layer.has_rope:
            for name, table in (("cos", self.cos), ("sin", self.sin)):
                if table is None:
                    found.append(f"the layer rotates, and the cache has no {name} table")
                elif table.dim() != 2 or table.shape[1] != layer.qk_rope_head_dim:
                    found.append(
                        f"{name} is {tuple(table.shape)}, not (positions, {layer.qk_rope_head_dim})"
                    )
        return found

    def _factor_problems(self, layer: MlaLayer) -> list[str]:
        layout, found = layer.kv_layout, []
        by_channel = layout.dtype == "int8_channel"
        wanted = {
            "latent_factor": (1,) if layout.quantizes_queries else (1, layer.kv_lora_rank),
            "key_factor": (1, layer.qk_rope_head_dim),
            "clip_alpha": (1,),
        }
        needed = {
            "latent_factor": layout.quantizes_queries or by_channel,
            "key_factor": by_channel,
            "clip_alpha": layout.dtype == "int8_packed",
        }
        for name, shape in wanted.items():
            factor = getattr(self, name)
            if not needed[name]:
                if factor is not None:
                    found.append(f"{name} is given, and a cache of {layout.dtype} has none")
            elif factor is None:
                found.append(f"{name} is missing, and a cache of {layout.dtype} needs it")
            elif tuple(factor.shape) != shape or factor.dtype != torch.float32:
                found.append(f"{name} is {tuple(factor.shape)} {factor.dtype}, not {shape} float32")
        return found
