"""Kernels for the attention ops that SGLang's NPU backend calls, which the simulated NPU has not.

They are SGLang's own on both sides of every comparison, so what they must do is read what the op
reads: each touches the pages, the rows and the weights that its arguments name, in plain float32.
A kernel on a storage that was released raises, as every kernel of the simulated NPU does.

SGLang hands ``npu_interleave_rope`` slices of wider rows, which the documents of the op exclude and
the simulated op refuses. Here they are made contiguous first; that a device takes them is not
shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npu_backend.testing.sim.alias import new_library
from npu_backend.testing.sim.kernels.base import host, to_device

__all__ = ["install"]

_KEPT: list[torch.library.Library] = []


def _ints(values: torch.Tensor | Sequence[int]) -> list[int]:
    return [int(v) for v in (values.cpu() if isinstance(values, torch.Tensor) else values)]


def _paged(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first ``length`` rows of a sequence: (length, width)."""
    size, width = cache.shape[1], cache.shape[-1]
    pages = table[: -(-length // size)].long()
    return cache.reshape(cache.shape[0], size, width)[pages].reshape(-1, width)[:length].float()


def _spans(ends: torch.Tensor | Sequence[int], rows: int) -> list[tuple[int, int]]:
    """Return (first, end) of each sequence's rows from the ends of all."""
    stops = [min(end, rows) for end in _ints(ends)]
    return list(zip([0, *stops], stops, strict=False))


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """(heads, width) against (rows, width): (heads, value width)."""
    return torch.softmax(query @ keys.T * scale, dim=-1) @ values


def _lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_key: torch.Tensor,
    block_table: torch.Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best rows of each token by ``sum_h weight_h relu(q_h k)``; -1 where there are fewer."""
    assert (layout_query, layout_key) == ("TND", "PA_BSND")
    op = "npu_lightning_indexer"
    q, k, w = host(query, op).float(), host(key, op), host(weights, op).float()
    table = host(block_table, op)
    chosen = torch.full((q.shape[0], 1, sparse_count), -1, dtype=torch.int32)
    lengths = _ints(actual_seq_lengths_key)
    for s, (first, end) in enumerate(_spans(actual_seq_lengths_query, q.shape[0])):
        keys = _paged(k, table[s], lengths[s])
        for row in range(first, end):
            seen = lengths[s] - (end - 1 - row)
            score = (torch.relu(q[row] @ keys[:seen].T) * w[row][:, None]).sum(0)
            best = score.topk(min(sparse_count, seen)).indices
            chosen[row, 0, : best.numel()] = best.to(torch.int32)
    return to_device(chosen, query), to_device(torch.empty(0), query)


def _sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_kv: torch.Tensor,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention over the rows that an indexer chose: (tokens, heads, latent)."""
    op = "npu_sparse_flash_attention"
    q = torch.cat((host(query, op), host(query_rope, op)), -1).float()
    k, rope = host(key, op), host(key_rope, op)
    table, chosen = host(block_table, op), host(sparse_indices, op)
    out = torch.zeros(query.shape)
    lengths = _ints(actual_seq_lengths_kv)
    for s, (first, end) in enumerate(_spans(actual_seq_lengths_query, q.shape[0])):
        latent = _paged(k, table[s], lengths[s])
        keys = torch.cat((latent, _paged(rope, table[s], lengths[s])), -1)
        for row in range(first, end):
            picked = chosen[row, 0][chosen[row, 0] >= 0].long()
            out[row] = _attend(q[row], keys[picked], latent[picked], scale_value)
    nothing = torch.empty(0)
    return (
        to_device(out.to(query.dtype), query),
        to_device(nothing, query),
        to_device(nothing, query),
    )


def _paged_attention_mla(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mla_vheadsize: int,
    out: torch.Tensor,
) -> None:
    """Decode attention over latent pages."""
    op = "_npu_paged_attention_mla"
    q, cache, table = host(query, op).float(), host(key_cache, op), host(block_table, op)
    for row, length in enumerate(_ints(context_lens)):
        keys = _paged(cache, table[row], length)
        values = keys[:, :mla_vheadsize]
        host(out, op)[row] = _attend(q[row], keys, values, scale_value).to(out.dtype)


def _scatter_nd_update_(
    target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """Write rows of ``updates`` at ``indices`` (rows, 1)."""
    op = "npu_scatter_nd_update_"
    host(target, op)[host(indices, op).reshape(-1).long()] = host(updates, op)
    return target


def _fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of packed sequences, and of rows over latent pages."""
    op = "npu_fused_infer_attention_score"
    assert query_rope is not None
    assert key_rope is not None
    assert input_layout == "TND"
    q = torch.cat((host(query, op), host(query_rope, op)), -1).float()
    k, rope, v = host(key, op), host(key_rope, op), host(value, op)
    out = torch.zeros(*q.shape[:2], v.shape[-1])
    assert actual_seq_lengths is not None
    spans = _spans(actual_seq_lengths, q.shape[0])
    for s, (first, end) in enumerate(spans):
        if block_table is None:
            heads = torch.cat((k[first:end], rope[first:end]), -1).float().transpose(0, 1)
            values = v[first:end].float().transpose(0, 1)
        else:
            assert actual_seq_lengths_kv is not None
            length, table = int(actual_seq_lengths_kv[s]), host(block_table, op)[s]
            latent = _paged(k.reshape(*k.shape[:2], -1), table, length)
            turned = _paged(rope.reshape(*rope.shape[:2], -1), table, length)
            heads = torch.cat((latent, turned), -1).expand(num_heads, -1, -1)
            values = latent.expand(num_heads, -1, -1)
        rows, seen = end - first, heads.shape[1]
        score = q[first:end].transpose(0, 1) @ heads.transpose(1, 2) * scale
        hidden = torch.ones(rows, seen, dtype=torch.bool).triu(1 + seen - rows)
        score = score.masked_fill(hidden, float("-inf"))
        out[first:end] = (torch.softmax(score, -1) @ values).transpose(0, 1)
    return to_device(out.to(query.dtype), query), to_device(torch.empty(0), query)


def _rotary_mul(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate (first half, second half) pairs."""
    op = "npu_rotary_mul"
    assert rotary_mode == "half"
    values = host(x, op).float()
    first, second = values.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    result = values * host(cos, op).float() + turned * host(sin, op).float()
    return to_device(result.to(x.dtype), x)


def _interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return _SIMULATED["npu_interleave_rope"](x.contiguous(), cos, sin)


_SIMULATED: dict[str, Any] = {}


def install() -> None:
    """Register the kernels for the simulated device, once in a process."""
    if _KEPT:
        return
    from npu_backend.testing.sim.kernels import rope

    _SIMULATED.update(rope.KERNELS)
    for namespace, kernels in {
        "npu": {
            "npu_lightning_indexer": _lightning_indexer,
            "npu_sparse_flash_attention": _sparse_flash_attention,
            "npu_scatter_nd_update_": _scatter_nd_update_,
            "npu_fused_infer_attention_score": _fused_infer_attention_score,
            "npu_rotary_mul": _rotary_mul,
            "npu_interleave_rope": _interleave_rope,
        },
        "atb": {"_npu_paged_attention_mla": _paged_attention_mla},
    }.items():
        library = new_library(namespace, "IMPL")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "PrivateUse1")
        _KEPT.append(library)
