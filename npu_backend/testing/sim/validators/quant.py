"""Limits of the quantising ops and of the format cast."""

from __future__ import annotations

from collections.abc import Sequence

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import FORMAT_ND, FORMAT_NZ, TensorSpec
from npu_backend.testing.sim.validators.base import Check

__all__ = [
    "E8M0",
    "castable",
    "npu_dynamic_mx_quant",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_quant_matmul",
    "npu_quantize",
]

E8M0 = "float8_e8m0fnu"
_HALVES = ("float16", "bfloat16")
_EIGHT_BIT = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")


def castable(
    tensor: TensorSpec, *, soc: str = "A3", cann: str | None = None, line: str | None = None
) -> bool:
    """Whether a tensor (..., K, N) can be cast to FRACTAL_NZ; the op returns others uncast."""
    op = "npu_format_cast"
    place = Place.of(soc, cann, line)
    if tensor.rank < 2:
        return False
    if tensor.dtype in _HALVES:
        n_multiple = place.value(op, "n_multiple_16bit")
    elif tensor.dtype in _EIGHT_BIT:
        n_multiple = place.value(op, "n_multiple_8bit")
    else:
        return False
    k, n = tensor.shape[-2:]
    return bool(k % place.value(op, "k_multiple") == 0 and n % n_multiple == 0)


def npu_format_cast(
    tensor: TensorSpec,
    acl_format: int,
    *,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_format_cast``; an uncastable tensor is no error, see ``castable``.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    check = Check("npu_format_cast", Place.of(soc, cann, line))
    check.one_of("acl_format", acl_format, (FORMAT_ND, FORMAT_NZ))


def npu_dynamic_quant(
    x: TensorSpec,
    *,
    smooth_scales: TensorSpec | None = None,
    dst_type: str = "int8",
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_dynamic_quant``: x (..., K) of a 16-bit dtype, scales (K,).

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    op = "npu_dynamic_quant"
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    check.dtype("x", x, place.value(op, "dtypes"))
    check.that(x.rank >= 2, f"x should be at least 2D, but is {x.rank}D")
    check.one_of("dst_type", dst_type, place.value(op, "dst_types"))
    if smooth_scales is not None:
        check.shape("smooth_scales", smooth_scales, x.shape[-1])
        check.that(
            smooth_scales.dtype == x.dtype, f"smooth_scales is {smooth_scales.dtype}, x {x.dtype}"
        )


def npu_dynamic_mx_quant(
    x: TensorSpec,
    *,
    axis: int = -1,
    block_size: int = 32,
    soc: str = "A5",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_dynamic_mx_quant``: A5 only.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    op = "npu_dynamic_mx_quant"
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    place.check_line(op)
    place.check_chip(op)
    check.dtype("x", x, place.value(op, "dtypes"))
    check.that(-x.rank <= axis < x.rank, f"axis {axis} is out of range for {x.rank} dimensions")
    most, step = place.value(op, "block_size_max"), place.value(op, "block_size_multiple")
    check.that(
        0 < block_size <= most and block_size % step == 0,
        f"block_size {block_size} must be a multiple of {step}, {step}..{most}",
    )


def _same_order(check: Check, name: str, tensor: TensorSpec, other: str, scale: TensorSpec) -> None:
    """A tensor and its MX scale are both transposed views, or neither is.

    The op looks at the strides: a view of (n, k) as (k, n) steps one row where k ends.
    """

    def turned(spec: TensorSpec) -> bool:
        return spec.stride[1] == spec.stride[0] * spec.shape[0]

    if (1, 1) in (tensor.shape[:2], scale.shape[:2]):
        return
    check.that(
        turned(tensor) == turned(scale),
        f"{name} and {other} must both be transposed or neither: strides {tensor.stride} and "
        f"{scale.stride}",
    )


def _mx_matmul(
    check: Check,
    x1: TensorSpec,
    x2: TensorSpec,
    scale: TensorSpec,
    pertoken_scale: TensorSpec | None,
    group_sizes: Sequence[int],
) -> None:
    place, op = check.place, check.op
    chips = place.value(op, "mx_soc")
    check.that(
        place.family in chips,
        f"e8m0 scales are not supported on {place.family}, only on {', '.join(chips)}",
    )
    if pertoken_scale is None:
        raise place.reject(op, "pertoken_scale is needed with an e8m0 scale")
    check.dtype("pertoken_scale", pertoken_scale, (E8M0,))
    for name, spec in (("x1", x1), ("x2", x2)):
        check.that(spec.dtype.startswith("float8_"), f"{name} is {spec.dtype}, must be fp8")
    check.rank("x2", x2, 2)
    only = list(place.value(op, "mx_group_sizes"))
    # Zeros leave it to the op to find the sizes from the shapes.
    check.that(
        not any(group_sizes) or list(group_sizes) == only,
        f"group_sizes = {list(group_sizes)} must be {only}",
    )
    m, (k, n) = x1.shape[-2], x2.shape
    pairs = -(-k // (2 * place.value(op, "mx_block")))
    check.shape("pertoken_scale", pertoken_scale, m, pairs, 2)
    check.shape("scale", scale, pairs, n, 2)
    if x1.rank == 2:
        _same_order(check, "x1", x1, "pertoken_scale", pertoken_scale)
    _same_order(check, "x2", x2, "scale", scale)


def npu_quant_matmul(
    x1: TensorSpec,
    x2: TensorSpec,
    scale: TensorSpec,
    *,
    pertoken_scale: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    output_dtype: str = "int8",
    group_sizes: Sequence[int] | None = None,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_quant_matmul``: x1 (..., M, K) and x2 (..., K, N).

    Args:
        x1: int8; on A5 also fp8.
        x2: As ``x1``; a transposed view is welcome.
        scale: (N,) or (1,); with e8m0 (ceil(K / 64), N, 2), transposed where ``x2`` is.
        pertoken_scale: fp32 (M,), with fp8 also (1,); with e8m0 (M, ceil(K / 64), 2).
        bias: (N,) or (batch, 1, N).
        output_dtype: Name of the result's dtype.
        group_sizes: [1, 1, 32] with e8m0 scales, or none; others are not looked at.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    op = "npu_quant_matmul"
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    check.that(x1.rank >= 2 and x2.rank >= 2, "x1 and x2 should be at least 2D")
    dtypes = place.value(op, "dtypes")
    check.dtype("x1", x1, dtypes)
    check.dtype("x2", x2, dtypes)
    fp8 = x1.dtype.startswith("float8_")
    check.that(
        fp8 == x2.dtype.startswith("float8_"), f"x1 is {x1.dtype} and x2 {x2.dtype}: not a pair"
    )
    k, n = x2.shape[-2:]
    check.that(x1.shape[-1] == k, f"the K of x1 and x2 differ: {x1.shape[-1]} and {k}")
    if fp8:
        outputs = place.value(op, "float_output_dtypes")
        check.one_of("output_dtype of an fp8 product", output_dtype, outputs)
    if bias is not None:
        check.that(bias.shape[-1:] == (n,), f"bias of shape {bias.shape} does not fit N = {n}")
        if fp8:
            check.dtype("bias of an fp8 product", bias, ("float32",))
    if scale.dtype == E8M0:
        _mx_matmul(check, x1, x2, scale, pertoken_scale, group_sizes or ())
        return
    check.that(
        scale.shape in ((1,), (n,), (1, n)), f"scale of shape {scale.shape} does not fit N = {n}"
    )
    if fp8:
        check.dtype("scale of an fp8 product", scale, ("float32", "int64"))
    if pertoken_scale is not None:
        m = x1.shape[-2]
        one = fp8 and pertoken_scale.shape == (1,)
        if not one:
            check.shape("pertoken_scale", pertoken_scale, m)
        check.dtype("pertoken_scale", pertoken_scale, ("float32",))
        check.that(
            not (one and m != 1 and bias is not None and scale.shape != (1,)),
            "a bias is not supported with one scale for x1 and one a channel for x2",
        )


def npu_quantize(
    x: TensorSpec,
    scales: TensorSpec,
    zero_points: TensorSpec | None = None,
    *,
    axis: int = 1,
    div_mode: bool = True,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_quantize``.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    check = Check("npu_quantize", Place.of(soc, cann, line))
    check.dtype("input", x, (*_HALVES, "float32"))
    low = -2 if not div_mode else -x.rank
    check.that(low <= axis < x.rank, f"axis {axis} is out of range for {x.rank} dimensions")
    if not div_mode and axis not in (-2, x.rank - 2):
        axis = -1  # multiplying, the op knows only the last two axes
    for name, spec in (("scales", scales), ("zero_points", zero_points)):
        if spec is not None:
            count = 1
            for size in spec.shape:
                count *= size
            check.that(
                count in (1, x.shape[axis]),
                f"{name} of shape {spec.shape} does not fit axis {axis} of {x.shape}",
            )
