"""References of the quantizing ops: int8, fp8 (e4m3) and MXFP8; the int4 and fp4 forms are not
there.

Source: the ops' descriptions in the op-plugin documentation, and ops-nn's of aclnnDynamicMxQuant
and of MX matrix products, which give the paired layout of e8m0 scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_backend.runtime.reference.numerics import (
    MX_BLOCK,
    as_scale,
    int8_product,
    mx_product,
    mx_quantized,
    product,
    row_quantized,
    saturated,
)

__all__ = [
    "dtype_of_number",
    "npu_dynamic_mx_quant",
    "npu_dynamic_quant",
    "npu_quant_matmul",
    "npu_quantize",
]

E8M0_NUMBER = 293
"""torch_npu's own number of float8_e8m0fnu, for scales that are carried as bytes."""
_NUMBERS = {
    0: torch.uint8,
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    12: torch.int8,
    13: torch.uint8,
    14: torch.int32,
    15: torch.bfloat16,
    24: torch.float8_e4m3fn,
}
"""torch's ScalarType numbers, which the newer lines take; 12 to 14 are the quantized names."""
_QUANTIZED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def dtype_of_number(op: str, value: int | torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """Return the dtype that an argument means: a ScalarType number, or a dtype (older lines)."""
    if value is None:
        return default
    if isinstance(value, torch.dtype):
        return _QUANTIZED.get(value, value)
    if value not in _NUMBERS:
        raise NotImplementedError(f"{op}: the reference knows no dtype number {value}")
    return _NUMBERS[value]


def npu_dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | torch.dtype | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row by its own largest magnitude; rounds half to even.

    Args:
        input: ``(..., K)``, float.
        smooth_scales: ``(K,)``, multiplied in first.
        group_index: Not modelled.
        dst_type: int8 (the default) or float8_e4m3fn; others are not modelled.
        quant_mode: ``pertoken``; others are not modelled.
        dst_type_max: 0; others are not modelled.

    Returns:
        Values ``(..., K)`` and fp32 scales ``(...)``: ``max(abs(row)) / 127``, of e4m3 ``/ 448``.

    Raises:
        NotImplementedError: As said at the arguments.
    """
    op = "npu_dynamic_quant"
    if group_index is not None:
        raise NotImplementedError(f"{op}: the reference knows no group_index")
    if quant_mode != "pertoken":
        raise NotImplementedError(f"{op}: the reference knows no quant_mode {quant_mode}")
    if dst_type_max != 0.0:
        raise NotImplementedError(f"{op}: the reference knows no dst_type_max")
    target = dtype_of_number(op, dst_type, torch.int8)
    if target not in (torch.int8, torch.float8_e4m3fn):
        raise NotImplementedError(f"{op}: the reference knows no dst_type {target}")
    values = input.float()
    if smooth_scales is not None:
        values = values * smooth_scales.float()
    quantized, scale = row_quantized(values, target)
    return quantized, scale.squeeze(-1)


def npu_dynamic_mx_quant(
    input: torch.Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int | torch.dtype = 296,
    block_size: int = MX_BLOCK,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to MXFP8: one power of two for each 32 values along the last dimension.

    Args:
        input: ``(..., K)``, float; K a multiple of 64.
        axis: The last; others are not modelled.
        round_mode: ``rint``; others are not modelled.
        dst_type: float8_e4m3fn; others, fp4 (the default) among them, are not modelled.
        block_size: 32.
        scale_alg: 0 (OCP's rule); others are not modelled.
        dst_type_max: 0; others are not modelled.
        max_low_bound: 0; others are not modelled.

    Returns:
        e4m3 ``(..., K)``, and e8m0 scales in pairs ``(..., K / 64, 2)``, as uint8.

    Raises:
        ValueError: K is not a multiple of 64.
        NotImplementedError: As said at the arguments.
    """
    op = "npu_dynamic_mx_quant"
    known = {
        "axis": (axis, (-1, input.dim() - 1)),
        "round_mode": (round_mode, ("rint",)),
        "block_size": (block_size, (MX_BLOCK,)),
        "scale_alg": (scale_alg, (0, None)),
        "dst_type_max": (dst_type_max, (0.0,)),
        "max_low_bound": (max_low_bound, (0.0,)),
        "dst_type": (dst_type, (24, torch.float8_e4m3fn)),
    }
    for name, (value, values) in known.items():
        if value not in values:
            raise NotImplementedError(f"{op}: the reference knows no {name} {value}")
    if input.shape[-1] % (2 * MX_BLOCK):
        raise ValueError(f"{op}: {input.shape[-1]} values a row make no pairs of {MX_BLOCK}")
    quantized, scales = mx_quantized(input)
    return quantized, scales.view(torch.uint8).reshape(*scales.shape[:-1], -1, 2)


def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | torch.dtype | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply 8-bit matrices and dequantize: int8 exactly, fp8 in fp32, one rounding.

    Args:
        x1: ``(..., M, K)`` int8, or ``(M, K)`` e4m3.
        x2: ``(..., K, N)`` of the same dtype.
        scale: ``(1,)`` or ``(N,)``: fp32, bf16, or int64 with fp32 bits. MX: ``(K / 64, N, 2)``,
            one byte each.
        offset: ``(1,)`` or ``(N,)``, only for an int8 result.
        pertoken_scale: ``(M,)`` fp32. MX: ``(M, K / 64, 2)``, one byte each.
        bias: ``(N,)``; int32 is added before the scales, float after them.
        output_dtype: int8 where it is not given.
        x1_dtype: Not modelled.
        x2_dtype: Not modelled.
        pertoken_scale_dtype: MX: torch_npu's number of float8_e8m0fnu, 293.
        scale_dtype: Likewise.
        group_sizes: MX: ``[1, 1, 32]``; others are not modelled.
        y_scale: Not modelled.

    Returns:
        ``(..., M, N)`` of ``output_dtype``.

    Raises:
        ValueError: Inputs are not 8-bit or do not multiply.
        NotImplementedError: As said at the arguments.
    """
    op = "npu_quant_matmul"
    absent = {
        "x1_dtype": x1_dtype,
        "x2_dtype": x2_dtype,
        "y_scale": y_scale,
    }
    for name, value in absent.items():
        if value is not None:
            raise NotImplementedError(f"{op}: the reference knows no {name}")
    if x1.dtype != x2.dtype or x1.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"{op}: the reference multiplies int8 or e4m3, not {x1.dtype}, {x2.dtype}")
    if x1.shape[-1] != x2.shape[-2]:
        raise ValueError(f"{op}: {tuple(x1.shape)} does not multiply with {tuple(x2.shape)}")
    target = dtype_of_number(op, output_dtype, torch.int8)
    if scale_dtype is not None or pertoken_scale_dtype is not None:
        if (scale_dtype, pertoken_scale_dtype) != (E8M0_NUMBER, E8M0_NUMBER):
            raise ValueError(f"{op}: MX needs both scales in e8m0, number {E8M0_NUMBER}")
        if list(group_sizes or ()) != [1, 1, MX_BLOCK] or bias is not None or offset is not None:
            raise NotImplementedError(
                f"{op}: of MX the reference knows group_sizes [1, 1, 32] only"
            )
        if pertoken_scale is None:
            raise ValueError(f"{op}: MX needs a pertoken_scale")
        by_channel = scale.transpose(0, 1).reshape(x2.shape[-1], -1)
        return mx_product(x1, pertoken_scale.reshape(x1.shape[0], -1), x2, by_channel).to(target)
    if group_sizes:
        raise NotImplementedError(f"{op}: the reference knows no group_sizes without MX scales")
    result = int8_product(x1, x2) if x1.dtype == torch.int8 else product(x1, x2)
    whole = bias is not None and bias.dtype == torch.int32
    if bias is not None and whole:
        result = result + bias
    result = result.float() * as_scale(scale)
    if pertoken_scale is not None:
        result = result * pertoken_scale.float().unsqueeze(-1)
    if bias is not None and not whole:
        result = result + bias.float()
    if target.is_floating_point:
        return result.to(target)
    if offset is not None:
        result = result + offset.float()
    return saturated(result, target)


def npu_quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int | torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """Return ``round(input / scales + zero_points)``, saturated; fp32 inside.

    Args:
        input: Any rank, float.
        scales: ``(1,)``, or one value for each index of ``axis``.
        zero_points: As ``scales``, or None.
        dtype: int8, uint8 or int32, as number or dtype (also the quantized names).
        axis: Which dimension scales run along; without ``div_mode`` the second last or, for every
            other value, the last.
        div_mode: Divide by the scales; else multiply with them.

    Raises:
        ValueError: The scales do not fit the axis.
        NotImplementedError: Another dtype.
    """
    op = "npu_quantize"
    target = dtype_of_number(op, dtype, torch.int8)
    if target.is_floating_point:
        raise NotImplementedError(f"{op}: the reference knows no dtype {target}")
    if not div_mode and axis not in (-2, input.dim() - 2):
        axis = -1

    def along(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() not in (1, input.shape[axis]):
            raise ValueError(
                f"{op}: {tensor.numel()} values for the {input.shape[axis]} indices of axis {axis}"
            )
        shape = [1] * input.dim()
        shape[axis] = -1
        return tensor.float().reshape(shape)

    values = input.float()
    values = values / along(scales) if div_mode else values * along(scales)
    if zero_points is not None:
        values = values + along(zero_points)
    return saturated(values, target)
