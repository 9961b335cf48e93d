"""References of the two batched matmuls that also transpose: (tokens, heads, K) x (heads, K, N)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_backend.runtime.reference.numerics import product

__all__ = ["batch_matmul_transpose", "npu_transpose_batchmatmul"]

_TRANSPOSING, _STRAIGHT, _SWAPPED = (1, 0, 2), (0, 1, 2), (0, 2, 1)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _perm(
    op: str,
    name: str,
    given: Sequence[int] | None,
    allowed: tuple[tuple[int, ...], ...],
    default: tuple[int, ...],
) -> tuple[int, ...]:
    perm = default if given is None else tuple(int(i) for i in given)
    if perm not in allowed:
        told = " or ".join(str(list(p)) for p in allowed)
        raise ValueError(f"{op}: {name} is {told}, not {list(perm)}")
    return perm


def npu_transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """Multiply head by head and put the tokens first. Strides are respected.

    Accumulates in fp32 and rounds once, to the dtype of the input.

    Args:
        input: ``(tokens, heads, K)`` with ``perm_x1`` (1, 0, 2), else ``(heads, tokens, K)``; fp16,
            bf16 or fp32.
        weight: ``(heads, K, N)``, or ``(heads, N, K)`` with ``perm_x2`` (0, 2, 1); dtype of input.
        bias: Not taken by the op.
        scale: Not modelled.
        perm_x1: Permutation to ``(heads, tokens, K)``; default (0, 1, 2).
        perm_x2: Permutation to ``(heads, K, N)``; default (0, 1, 2).
        perm_y: (1, 0, 2), which is also the default here.
        batch_split_factor: 1; others are not modelled.

    Returns:
        ``(tokens, heads, N)`` of the input's dtype.

    Raises:
        ValueError: Permutations, dtypes or shapes that the op does not take.
        NotImplementedError: A scale or a split of the batch.
    """
    op = "npu_transpose_batchmatmul"
    if bias is not None:
        raise ValueError(f"{op}: takes no bias")
    if scale is not None:
        raise NotImplementedError(f"{op}: the reference knows no scale")
    if batch_split_factor not in (None, 1):
        raise NotImplementedError(f"{op}: the reference knows no batch_split_factor but 1")
    first = _perm(op, "perm_x1", perm_x1, (_TRANSPOSING, _STRAIGHT), _STRAIGHT)
    second = _perm(op, "perm_x2", perm_x2, (_STRAIGHT, _SWAPPED), _STRAIGHT)
    _perm(op, "perm_y", perm_y, (_TRANSPOSING,), _TRANSPOSING)
    if input.dtype != weight.dtype or input.dtype not in _DTYPES:
        raise ValueError(f"{op}: one dtype of fp16, bf16, fp32; got {input.dtype}, {weight.dtype}")
    a, b = input.permute(first), weight.permute(second)
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"{op}: {tuple(a.shape)} does not multiply with {tuple(b.shape)}")
    return product(a, b).transpose(0, 1).to(input.dtype).contiguous()


def batch_matmul_transpose(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """Multiply head by head into a preallocated result.

    The op takes raw pointers and ignores strides, so that a tensor that is not contiguous gives
    wrong numbers without an error (sgl-project/sglang#13980); this reference refuses it instead.
    Accumulates in fp32 and rounds once, to the dtype of ``tensor_c``.

    Args:
        tensor_a: ``(tokens, heads, K)``, fp16 or bf16 (fp32 is taken too, for tests), contiguous.
        tensor_b: ``(heads, K, N)``, or in FRACTAL_NZ blocks ``(heads, N/16, K, 16)``; contiguous.
        tensor_c: ``(tokens, heads, N)``, contiguous; written.
        format_mode: ``ND``, ``NZ`` or None; what ``tensor_b`` is follows from its rank.
        quant_mode: Not modelled.

    Raises:
        ValueError: A tensor is not contiguous, or shapes and dtypes do not fit.
        NotImplementedError: A quant_mode.
    """
    op = "batch_matmul_transpose"
    if quant_mode is not None:
        raise NotImplementedError(f"{op}: the reference knows no quant_mode ({quant_mode!r})")
    for name, tensor in (("tensor_a", tensor_a), ("tensor_b", tensor_b), ("tensor_c", tensor_c)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is not contiguous (strides {tensor.stride()}); the op ignores "
                "strides and would give wrong numbers"
            )
    weight = tensor_b
    if tensor_b.dim() == 4:
        heads, columns, depth, inner = tensor_b.shape
        weight = tensor_b.transpose(1, 2).reshape(heads, depth, columns * inner)
    if not tensor_a.dtype == tensor_b.dtype == tensor_c.dtype:
        raise ValueError(f"{op}: takes one dtype")
    tokens, heads, depth = tensor_a.shape
    if weight.shape[:2] != (heads, depth) or tensor_c.shape != (tokens, heads, weight.shape[2]):
        raise ValueError(
            f"{op}: {tuple(tensor_a.shape)} x {tuple(weight.shape)} -> {tuple(tensor_c.shape)} "
            "do not fit"
        )
    tensor_c.copy_(product(tensor_a.transpose(0, 1), weight).transpose(0, 1))
