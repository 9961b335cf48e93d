"""The MLA layer in its textbook form: decompress keys and values, then causal attention.

Independent of everything that it is compared with: no absorption, no latent attention, no paged
cache, no op. From the original weights, as a checkpoint has them, in fp32 or fp64:

    q          = q_b(norm(q_a(x)))   or q_proj(x)        per head (nope, rope)
    c, k_rope  = kv_a(x)                                 one latent, one key for all heads
    k_nope, v  = kv_b(norm(c))                           per head
    out        = softmax([q_nope, R q_rope] . [k_nope, R k_rope] / sqrt(nope + rope)) . v

R rotates the pairs (2i, 2i + 1) by ``position * theta ** (-2i / rope)``. Source: DeepSeek-V2
(arXiv:2405.04434), section 2.1, with the interleaved pairs of its released checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen

__all__ = ["MlaReference", "MlaShape", "dequantized", "mla_reference"]


@frozen
class MlaShape:
    """Dimensions of one layer on one rank.

    Args:
        heads: Local heads.
        nope: Head width without RoPE.
        rope: Head width of the RoPE part; may be 0.
        v: Head width of the values.
        latent: Width of the compressed keys and values.
        q_lora: Width of the compressed query; None where the layer has ``q_proj``.
        epsilon: Of both norms.
        rotates: False where the RoPE part is not rotated.
        theta: Base of the angles.
    """

    heads: int
    nope: int
    rope: int
    v: int
    latent: int
    q_lora: int | None = None
    epsilon: float = 1e-6
    rotates: bool = True
    theta: float = 10000.0

    @property
    def scale(self) -> float:
        """Factor on the scores: ``(nope + rope) ** -0.5``."""
        return float((self.nope + self.rope) ** -0.5)


@frozen(eq=False)
class MlaReference:
    """What the layer computes, one entry a sequence.

    Args:
        outputs: ``(asked tokens, heads, v)``, before the output projection.
        latents: ``(tokens, latent)``, normed: what the latent cache holds.
        keys: ``(tokens, rope)``, rotated, components in their own (interleaved) order.
        q_loras: ``(asked tokens, q_lora)``, normed; empty where the layer has none.
    """

    outputs: tuple[torch.Tensor, ...]
    latents: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    q_loras: tuple[torch.Tensor, ...] = ()


def dequantized(
    weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``(out, in)`` as floats: where it is quantized times one scale a row ``(out,)``, or
    one for each of equal parts of a row ``(out, parts)``."""
    dense = weight.to(dtype)
    if scale is None:
        return dense
    by = scale.to(dtype).reshape(len(scale), -1)
    parts = dense.reshape(*by.shape, -1) * by.unsqueeze(-1)
    return parts.reshape(dense.shape)


_ROWS = 1024
"""Rows of a weight that are widened at a time."""


def _project(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T`` for ``(out, in)``, widened and dequantized some rows at a time."""
    parts = []
    for start in range(0, weight.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        some = dequantized(weight[rows], None if scale is None else scale[rows], x.dtype)
        parts.append(x @ some.t())
    return torch.cat(parts, dim=-1)


def _norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    mean_square = (x * x).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + epsilon) * gamma.to(x.dtype)


def _rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the pairs of ``(tokens, ..., rope)`` as complex numbers; the order stays."""
    rope = x.shape[-1]
    rates = theta ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    angles = positions.double().reshape(-1, *[1] * (x.dim() - 1)) * rates
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], rope // 2, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def mla_reference(
    shape: MlaShape,
    weights: Mapping[str, torch.Tensor],
    gammas: Mapping[str, torch.Tensor],
    sequences: Sequence[torch.Tensor],
    first: Sequence[int],
    *,
    scales: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> MlaReference:
    """Compute the layer for some sequences, position 0 first, without rounding to 16 bits.

    Args:
        shape: Dimensions.
        weights: ``fused_qkv_a_proj`` (q_lora + latent + rope, hidden) and ``q_b_proj``, or
            ``q_proj`` and ``kv_a_proj_with_mqa``; and ``kv_b_proj`` (heads * (nope + v), latent).
        gammas: ``q_a_layernorm`` and ``kv_a_layernorm``.
        sequences: ``(length, hidden)`` each.
        first: First position of each sequence whose output is asked.
        scales: Scales of each quantized weight, ``(out,)`` or ``(out, parts)``.
        dtype: fp32, or fp64 for fp32 layers.
    """
    given = dict(scales or {})

    def project(tokens: torch.Tensor, name: str, rows: slice = slice(None)) -> torch.Tensor:
        scale = given.get(name)
        return _project(tokens, weights[name][rows], None if scale is None else scale[rows])

    lengths = [len(s) for s in sequences]
    x = torch.cat([s.to(dtype) for s in sequences])
    positions = torch.cat([torch.arange(n) for n in lengths])
    asked = torch.cat([torch.arange(n) >= f for n, f in zip(lengths, first, strict=True)])

    width = shape.latent + shape.rope
    if shape.q_lora is None:
        q = project(x[asked], "q_proj")
        down_kv = project(x, "kv_a_proj_with_mqa")
        q_lora = None
    else:
        down_kv = project(x, "fused_qkv_a_proj", slice(shape.q_lora, shape.q_lora + width))
        down_q = project(x[asked], "fused_qkv_a_proj", slice(shape.q_lora))
        q_lora = _norm(down_q, gammas["q_a_layernorm"], shape.epsilon)
        q = project(q_lora, "q_b_proj")
    latents = _norm(down_kv[:, : shape.latent], gammas["kv_a_layernorm"], shape.epsilon)
    keys = down_kv[:, shape.latent :]
    q = q.reshape(-1, shape.heads, shape.nope + shape.rope)
    q_nope, q_rope = q[..., : shape.nope], q[..., shape.nope :]
    if shape.rotates and shape.rope:
        keys = _rotate(keys, positions, shape.theta)
        q_rope = _rotate(q_rope, positions[asked], shape.theta)
    up = project(latents, "kv_b_proj").reshape(-1, shape.heads, shape.nope + shape.v)
    k_nope, v = up[..., : shape.nope], up[..., shape.nope :]

    counts = [n - f for n, f in zip(lengths, first, strict=True)]

    def by(parts: list[int], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.split(tensor, parts))

    outputs = []
    rows = zip(
        by(counts, q_nope),
        by(counts, q_rope),
        by(lengths, k_nope),
        by(lengths, keys),
        by(lengths, v),
        first,
        strict=True,
    )
    for q_n, q_r, k_n, k_r, values, start in rows:
        scores = torch.einsum("qhd,khd->hqk", q_n, k_n) + torch.einsum("qhd,kd->hqk", q_r, k_r)
        at_query = torch.arange(start, start + len(q_n)).unsqueeze(-1)
        future = torch.arange(len(k_n)).unsqueeze(0) > at_query
        scores = (scores * shape.scale).masked_fill(future, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return MlaReference(
        outputs=tuple(outputs),
        latents=by(lengths, latents),
        keys=by(lengths, keys),
        q_loras=() if q_lora is None else by(counts, q_lora),
    )
