"""Limits of the quantising ops and of the format cast."""

from __future__ import annotations

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import FORMAT_ND, FORMAT_NZ, TensorSpec
from npu_backend.testing.sim.validators.base import Check

__all__ = [
    "castable",
    "npu_dynamic_mx_quant",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_quant_matmul",
    "npu_quantize",
]

E8M0_NUMBER = 293
"""torch_npu's own number of float8_e8m0fnu."""
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
    place = Place.of(soc, cann, line)
    check = Check("npu_dynamic_quant", place)
    if dst_type != "int8":
        check.one_of(
            "chip for an fp8 dst_type", place.family, place.value("npu_quant_matmul", "fp8_soc")
        )
    check.dtype("x", x, _HALVES)
    check.that(x.rank >= 2, f"x should be at least 2D, but is {x.rank}D")
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
    check.that(place.family == "A5", f"not supported on {place.family}, only on A5")
    check.dtype("x", x, _HALVES)
    check.that(-x.rank <= axis < x.rank, f"axis {axis} is out of range for {x.rank} dimensions")
    check.that(
        0 < block_size <= 1024 and block_size % 32 == 0,
        f"block_size {block_size} must be a multiple of 32, 32..1024",
    )


def npu_quant_matmul(
    x1: TensorSpec,
    x2: TensorSpec,
    scale: TensorSpec,
    *,
    pertoken_scale: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    group_sizes: tuple[int, ...] = (),
    scale_dtypes: tuple[int | None, int | None] = (None, None),
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_quant_matmul``: x1 (..., M, K) and x2 (..., K, N), both 8-bit.

    Args:
        x1: int8, or e4m3 on chips that have it.
        x2: Of the same dtype.
        scale: (1,) or (N,); MX: (K / 64, N, 2), one byte each.
        pertoken_scale: (M,) float32; MX: (M, K / 64, 2), one byte each.
        bias: (..., N).
        group_sizes: MX: (1, 1, 32); else empty.
        scale_dtypes: torch_npu's numbers of the two scales' dtypes; MX: 293 both.
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
    check.dtype("x1", x1, ("int8", "float8_e4m3fn"))
    check.dtype("x2", x2, (x1.dtype,))
    if x1.dtype != "int8":
        check.one_of("chip for fp8 inputs", place.family, place.value(op, "fp8_soc"))
    k, n = x2.shape[-2:]
    check.that(x1.shape[-1] == k, f"the K of x1 and x2 differ: {x1.shape[-1]} and {k}")
    if scale_dtypes != (None, None):
        check.that(x1.dtype != "int8", "e8m0 scales go with fp8 inputs")
        check.one_of("scale dtypes", scale_dtypes, ((E8M0_NUMBER, E8M0_NUMBER),))
        check.one_of("group_sizes", group_sizes, ((1, 1, 32),))
        check.multiple("K", k, 64)
        check.that(pertoken_scale is not None, "an MX product needs a pertoken_scale")
        check.shape("scale", scale, k // 64, n, 2)
        assert pertoken_scale is not None
        check.shape("pertoken_scale", pertoken_scale, x1.shape[-2], k // 64, 2)
        return
    check.that(not group_sizes, f"group_sizes {group_sizes} need scales by group")
    check.that(
        scale.shape in ((1,), (n,), (1, n)), f"scale of shape {scale.shape} does not fit N = {n}"
    )
    if pertoken_scale is not None:
        check.shape("pertoken_scale", pertoken_scale, x1.shape[-2])
        check.dtype("pertoken_scale", pertoken_scale, ("float32",))
    if bias is not None:
        check.that(bias.shape[-1:] == (n,), f"bias of shape {bias.shape} does not fit N = {n}")


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
