"""Limits of the batched matmuls."""

from __future__ import annotations

from collections.abc import Sequence

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import TensorSpec
from npu_backend.testing.sim.validators.base import Check

__all__ = ["batch_matmul_transpose", "npu_transpose_batchmatmul"]

_IDENTITY = (0, 1, 2)
_SWAP_FRONT = (1, 0, 2)
_SWAP_BACK = (0, 2, 1)


def npu_transpose_batchmatmul(
    x1: TensorSpec,
    x2: TensorSpec,
    *,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    bias: TensorSpec | None = None,
    scale: TensorSpec | None = None,
    batch_split_factor: int = 1,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_transpose_batchmatmul`` without memory.

    Args:
        x1: (B, M, K), or (M, B, K) with ``perm_x1=(1, 0, 2)``; strides are free.
        x2: (B, K, N), or (B, N, K) with ``perm_x2=(0, 2, 1)``.
        perm_x1: ``(0, 1, 2)`` (default) or ``(1, 0, 2)``.
        perm_x2: ``(0, 1, 2)`` (default), from CANN 9.1 also ``(0, 2, 1)``.
        perm_y: ``(1, 0, 2)``, the default.
        bias: Must be None.
        scale: Scale of the output, or None.
        batch_split_factor: Split of the batch in the output.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    op = "npu_transpose_batchmatmul"
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    place.check_line(op)
    place.check_chip(op)
    p1, p2 = tuple(perm_x1 or _IDENTITY), tuple(perm_x2 or _IDENTITY)
    check.one_of("perm_x1", p1, (_IDENTITY, _SWAP_FRONT))
    transposed_ok = place.value(op, "transposed_weight") and p1 == _SWAP_FRONT
    check.one_of("perm_x2", p2, (_IDENTITY, _SWAP_BACK) if transposed_ok else (_IDENTITY,))
    check.one_of("perm_y", tuple(perm_y or _SWAP_FRONT), (_SWAP_FRONT,))
    check.that(bias is None, "the bias is not supported")
    check.rank("x1", x1, 3)
    check.rank("x2", x2, 3)
    dtypes = place.value(op, "dtypes")
    check.dtype("x1", x1, dtypes)
    check.dtype("x2", x2, dtypes)
    check.that(x1.dtype == x2.dtype, f"x1 is {x1.dtype} and x2 is {x2.dtype}: one dtype is needed")
    m, b, k = (x1.shape[p1[i]] for i in (1, 0, 2))
    b2, k2, n = (x2.shape[p2[i]] for i in range(3))
    check.that(b == b2, f"the batches of x1 and x2 differ: {b} and {b2}")
    check.that(k == k2, f"the K of x1 and x2 differ: {k} and {k2}")
    check.nd(x1=x1)
    if x2.is_nz:
        check.that(
            place.value(op, "nz_weight_line"), "an internal-format weight is not supported here"
        )
    if place.unlimited(op):
        return
    if x2.is_nz:
        check.that(place.value(op, "nz_weight"), "a FRACTAL_NZ weight is not supported here")
    check.below("B", b, place.value(op, "b_below"))
    check.below("N", n, place.value(op, "n_below"))
    if p1 == _SWAP_FRONT:
        # The lifted limit assumes an ND weight, no scale and an unsplit batch.
        plain = not x2.is_nz and scale is None and batch_split_factor == 1
        bound = place.value(op, "bk_below" if plain else "bk_below_nz")
        check.below("B*K", b * k, bound)
    else:
        check.below("K", k, place.value(op, "k_below"))
    multiple = place.value(op, "kn_multiple_nz" if x2.is_nz else "kn_multiple")
    check.multiple("K", k, multiple)
    check.multiple("N", n, multiple)
    # M, the token count, has no limit.
    del m


def batch_matmul_transpose(
    tensor_a: TensorSpec,
    tensor_b: TensorSpec,
    tensor_c: TensorSpec,
    *,
    format_mode: str | None = None,
    quant_mode: str | None = None,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
    op: str = "batch_matmul_transpose",
) -> None:
    """Check a call of sgl-kernel-npu's ``batch_matmul_transpose`` without memory.

    Args:
        tensor_a: (M, B, K), contiguous.
        tensor_b: (B, K, N) contiguous, or (B, N/16, K, 16) with ``format_mode="NZ"``.
        tensor_c: (M, B, N), contiguous, written by the op.
        format_mode: ``ND`` (default) or ``NZ``.
        quant_mode: Ignored by the limits.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.
        op: Name of the figures and for the messages.

    Raises:
        OpRejectedError: The op would refuse the call, or read a non-contiguous tensor wrongly.
    """
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    place.check_chip(op)
    check.rank("tensor_a", tensor_a, 3)
    check.rank("tensor_b", tensor_b, 3, 4)
    check.one_of("format_mode", format_mode or "ND", ("ND", "NZ"))
    m, b, k = tensor_a.shape
    m_max = place.value(op, "m_max")
    check.that(1 <= m <= m_max, f"batchIdx is out of range: M = {m}, must be 1..{m_max}")
    dtypes = place.value(op, "dtypes")
    for name, spec in (("tensor_a", tensor_a), ("tensor_b", tensor_b), ("tensor_c", tensor_c)):
        check.dtype(name, spec, dtypes)
        check.that(
            spec.dtype == tensor_a.dtype, f"{name} is {spec.dtype}, tensor_a is {tensor_a.dtype}"
        )
        check.that(
            spec.is_contiguous,
            f"{name} is not contiguous (strides {spec.stride}): the op takes raw pointers and "
            "would compute wrong numbers without an error",
        )
    if tensor_b.rank == 4:
        multiple = place.value(op, "kn_multiple_nz")
        n = tensor_b.shape[1] * tensor_b.shape[3]
        check.shape("tensor_b", tensor_b, b, n // 16, k, 16)
        check.multiple("K", k, multiple)
        check.multiple("N", n, multiple)
    else:
        check.that(not tensor_b.is_nz, "a FRACTAL_NZ weight must be given as (B, N/16, K, 16)")
        n = tensor_b.shape[2]
        check.shape("tensor_b", tensor_b, b, k, n)
    check.shape("tensor_c", tensor_c, m, b, n)
