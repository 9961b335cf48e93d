"""Reference kernels of the batched matmuls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_backend.testing.sim import validators
from npu_backend.testing.sim.kernels.base import (
    host,
    optional_spec,
    spec,
    to_device,
    unsupported_unless,
    where,
)

__all__ = ["DEFINED", "FAKES", "KERNELS", "multiply_into"]


def npu_transpose_batchmatmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """(B, M, K) x (B, K, N) -> (M, B, N), each operand permuted first; fp32 accumulation."""
    op = "npu_transpose_batchmatmul"
    split = 1 if batch_split_factor is None else batch_split_factor
    validators.npu_transpose_batchmatmul(
        spec(x1),
        spec(x2),
        perm_x1=perm_x1,
        perm_x2=perm_x2,
        perm_y=perm_y,
        bias=optional_spec(bias),
        scale=optional_spec(scale),
        batch_split_factor=split,
        **where(),
    )
    unsupported_unless(scale is None, op, "an output scale")
    unsupported_unless(split == 1, op, f"batch_split_factor {split}")
    a = host(x1, op).permute(tuple(perm_x1 or (0, 1, 2)))
    b = host(x2, op).permute(tuple(perm_x2 or (0, 1, 2)))
    product = torch.bmm(a.float(), b.float()).transpose(0, 1)
    return to_device(product.to(x1.dtype), x1)


def batch_matmul_transpose(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """(M, B, K) x (B, K, N) -> tensor_c (M, B, N); fp32 accumulation."""
    op = "batch_matmul_transpose"
    validators.batch_matmul_transpose(
        spec(tensor_a),
        spec(tensor_b),
        spec(tensor_c),
        format_mode=format_mode,
        quant_mode=quant_mode,
        **where(),
    )
    unsupported_unless(quant_mode is None, op, f"quant_mode {quant_mode}")
    multiply_into(op, tensor_a, tensor_b, tensor_c)


def multiply_into(
    op: str, tensor_a: torch.Tensor, tensor_b: torch.Tensor, tensor_c: torch.Tensor
) -> None:
    """Write (M, B, K) x (B, K, N), or (B, N / 16, K, 16), into (M, B, N)."""
    a, b = host(tensor_a, op).transpose(0, 1), host(tensor_b, op)
    if b.dim() == 4:
        b = b.permute(0, 2, 1, 3).reshape(b.shape[0], b.shape[2], -1)
    product = torch.bmm(a.float(), b.float()).transpose(0, 1)
    host(tensor_c, op).copy_(product.to(tensor_c.dtype))


def _batch_matmul_transpose_fake(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """Writes into tensor_c and returns nothing."""


KERNELS = {
    "npu_transpose_batchmatmul": npu_transpose_batchmatmul,
    "batch_matmul_transpose": batch_matmul_transpose,
}
DEFINED = {
    "batch_matmul_transpose": (
        "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor(a!) tensor_c, "
        "str? format_mode=None, str? quant_mode=None) -> ()"
    ),
}
FAKES = {"batch_matmul_transpose": _batch_matmul_transpose_fake}
