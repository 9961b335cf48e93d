"""Attention over the latent cache, written from matmul and softmax: what a host's kernel would do.

All heads share one key and one value, the latent (multi-query attention), because ``w_kc`` was
multiplied into the query and ``w_vc`` follows in ``v_up``. Dense: with fewer tokens than an
indexer's top-k selects, a sparse layer attends to all of them too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["gather_rows", "latent_attention"]


def gather_rows(
    cache: torch.Tensor, block_table: torch.Tensor, length: int, *, nz: bool = False
) -> torch.Tensor:
    """Return the first ``length`` rows of a sequence from a paged cache, ``(length, width)``.

    Args:
        cache: ``(num_blocks, block_size, 1, width)``.
        block_table: ``(blocks,)``, the sequence's blocks in order.
        length: Tokens of the sequence.
        nz: The bytes are laid out as ``(num_blocks, width / C, block_size, C)``.
    """
    _, size, _, width = cache.shape
    blocks = cache[block_table[: -(-length // size)].to(cache.device)]
    if nz:
        inner = 32 if cache.dtype.itemsize == 1 else 16
        columns = blocks.reshape(len(blocks), width // inner, size, inner)
        blocks = columns.transpose(1, 2)
    return blocks.reshape(len(blocks) * size, width)[:length]


def latent_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    k_nope_cache: torch.Tensor,
    k_rope_cache: torch.Tensor,
    block_tables: torch.Tensor,
    sequence_lengths: Sequence[int],
    query_lengths: Sequence[int],
    *,
    scale: float,
    nz: bool = False,
) -> torch.Tensor:
    """Attend causally over the paged latent cache; fp32 inside, rounded once at the end.

    Args:
        q_nope: ``(tokens, heads, kv_lora_rank)``, already multiplied with ``w_kc``.
        q_pe: ``(tokens, heads, rope)``, in the RoPE layout of the cache.
        k_nope_cache: ``(num_blocks, block_size, 1, kv_lora_rank)``.
        k_rope_cache: ``(num_blocks, block_size, 1, rope)``.
        block_tables: ``(sequences, blocks)``.
        sequence_lengths: Tokens of each sequence, those of this step included.
        query_lengths: Tokens of each sequence in this step, its last ones; they sum to ``tokens``.
        scale: Factor on the scores: ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``.
        nz: Both caches are laid out in FRACTAL_NZ.

    Returns:
        ``(tokens, heads, kv_lora_rank)`` of the dtype of ``q_nope``.
    """
    outputs = []
    start = 0
    for table, length, count in zip(block_tables, sequence_lengths, query_lengths, strict=True):
        latent = gather_rows(k_nope_cache, table, length, nz=nz).float()
        key = gather_rows(k_rope_cache, table, length, nz=nz).float()
        part = slice(start, start + count)
        # (count, heads, width) x (width, length) -> (count, heads, length)
        scores = torch.matmul(q_nope[part].float(), latent.t())
        scores = (scores + torch.matmul(q_pe[part].float(), key.t())) * scale
        at_query = torch.arange(length - count, length).reshape(-1, 1, 1)
        future = (torch.arange(length).reshape(1, 1, -1) > at_query).to(scores.device)
        # Softmax written out: on some chips torch_npu's own calls what the simulation lacks.
        scores = scores.masked_fill(future, float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        outputs.append(torch.matmul(weights, latent))
        start += count
    return torch.cat(outputs).to(q_nope.dtype)
