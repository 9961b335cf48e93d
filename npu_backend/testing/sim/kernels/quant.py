"""Reference kernels of the quantising ops and of the format cast."""

from __future__ import annotations

from typing import Any

import torch

from npu_backend.testing.sim import validators
from npu_backend.testing.sim.formats import copy_in_format, format_of
from npu_backend.testing.sim.kernels.base import (
    decode_scale,
    dtype_of,
    host,
    int8_matmul,
    optional_spec,
    spec,
    to_device,
    unsupported_unless,
    where,
)
from npu_backend.testing.sim.kernels.quantize import quantize_rows
from npu_backend.testing.sim.spec import FORMAT_NZ

__all__ = ["FAKES", "KERNELS"]

_BOUNDS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int32: (-(2**31), 2**31 - 1)}
# Exponent of the largest normal number of each dtype.
_EMAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def npu_dynamic_quant(
    x: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: Any = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 values, fp32 scales): one scale a token, the last dimension dropped."""
    op = "npu_dynamic_quant"
    unsupported_unless(group_index is None, op, "group_index")
    validators.npu_dynamic_quant(spec(x), smooth_scales=optional_spec(smooth_scales), **where())
    target = dtype_of(dst_type, torch.int8, op)
    unsupported_unless(target == torch.int8, op, f"dst_type {target}")
    unsupported_unless(quant_mode == "pertoken", op, f"quant_mode {quant_mode}")
    unsupported_unless(dst_type_max == 0.0, op, f"dst_type_max {dst_type_max}")
    values = host(x, op).float()
    if smooth_scales is not None:
        values = values * host(smooth_scales, op).float()
    quantized, scale = quantize_rows(values)
    return to_device(quantized, x), to_device(scale.squeeze(-1), x)


def npu_dynamic_mx_quant(
    x: torch.Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: Any = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 values, exponents as uint8): one power of two a block, blocks in pairs (..., n/2, 2)."""
    op = "npu_dynamic_mx_quant"
    validators.npu_dynamic_mx_quant(spec(x), axis=axis, block_size=block_size, **where())
    target = dtype_of(dst_type, torch.int8, op)
    unsupported_unless(target in _EMAX, op, f"dst_type {dst_type}")
    unsupported_unless(scale_alg in (0, None), op, f"scale_alg {scale_alg}")
    unsupported_unless(round_mode == "rint", op, f"round_mode {round_mode}")
    unsupported_unless(dst_type_max == 0.0 and max_low_bound == 0.0, op, "a bound of the dtype")
    values = host(x, op).float().movedim(axis, -1)
    length = values.shape[-1]
    blocks = -(-length // block_size)
    padded = torch.nn.functional.pad(values, (0, blocks * block_size - length))
    grouped = padded.reshape(*padded.shape[:-1], blocks, block_size)
    largest = grouped.abs().amax(-1, keepdim=True)
    # frexp gives [0.5, 1) times 2**e, so floor(log2(v)) is e - 1; an empty block scales by 2**-127.
    exponent = torch.frexp(largest).exponent - 1 - _EMAX[target]
    exponent = torch.where(largest == 0, torch.full_like(exponent, -127), exponent)
    exponent = exponent.clamp(-127, 127)
    bound = torch.finfo(target).max
    scaled = torch.ldexp(grouped, -exponent).clamp(-bound, bound)
    quantized = scaled.flatten(-2)[..., :length].to(target).movedim(-1, axis)
    codes = (exponent.squeeze(-1) + 127).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, blocks % 2))
    codes = codes.reshape(*codes.shape[:-1], -1, 2)
    place_of_axis = axis % x.dim()
    return to_device(quantized, x), to_device(codes.movedim(-2, place_of_axis), x)


def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: Any = None,
    group_sizes: Any = None,
    y_scale: torch.Tensor | None = None,
    **dtypes: int | None,
) -> torch.Tensor:
    """int8 (..., M, K) x (..., K, N), scaled to ``output_dtype`` (int8 where it is None)."""
    op = "npu_quant_matmul"
    named = [name for name, value in dtypes.items() if value is not None]
    unsupported_unless(not named, op, f"the arguments {named}")
    unsupported_unless(not group_sizes and y_scale is None, op, "group_sizes or y_scale")
    unsupported_unless(x1.dtype == x2.dtype == torch.int8, op, f"{x1.dtype} times {x2.dtype}")
    validators.npu_quant_matmul(
        spec(x1),
        spec(x2),
        spec(scale),
        pertoken_scale=optional_spec(pertoken_scale),
        bias=optional_spec(bias),
        **where(),
    )
    target = dtype_of(output_dtype, torch.int8, op)
    product = int8_matmul(host(x1, op), host(x2, op))
    if bias is not None and bias.dtype == torch.int32:
        product = product + host(bias, op)
    product = product * decode_scale(host(scale, op))
    if pertoken_scale is not None:
        product = product * host(pertoken_scale, op).float().unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        product = product + host(bias, op).float()
    if target in _BOUNDS:
        if offset is not None:
            product = product + host(offset, op).float()
        product = product.round().clamp(*_BOUNDS[target])
    return to_device(product.to(target), x1)


def npu_quantize(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: Any,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """round(x / scales + zero_points), or round(x * scales + zero_points), saturated."""
    op = "npu_quantize"
    validators.npu_quantize(
        spec(x), spec(scales), optional_spec(zero_points), axis=axis, div_mode=div_mode, **where()
    )
    target = dtype_of(dtype, torch.int8, op)
    unsupported_unless(target in _BOUNDS, op, f"dtype {dtype}")
    if not div_mode and axis not in (-2, x.dim() - 2):
        axis = -1
    shape = [1] * x.dim()
    shape[axis] = -1

    def along_axis(tensor: torch.Tensor) -> torch.Tensor:
        return host(tensor, op).float().reshape(shape)

    factor = along_axis(scales)
    result = host(x, op).float()
    result = result / factor if div_mode else result * factor
    if zero_points is not None:
        result = result + along_axis(zero_points)
    return to_device(result.round().clamp(*_BOUNDS[target]).to(target), x)


def npu_dtype_cast(x: torch.Tensor, dtype: Any) -> torch.Tensor:
    """The cast behind ``Tensor.to`` on lines up to 26.1."""
    op = "npu_dtype_cast"
    return to_device(host(x, op).to(dtype_of(dtype, x.dtype, op)), x)


def npu_format_cast(
    x: torch.Tensor,
    acl_format: int,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """A copy in the format, bytes in row order; the input itself where nothing is to be cast."""
    op = "npu_format_cast"
    unsupported_unless(customize_dtype is None, op, "customize_dtype")
    unsupported_unless(input_dtype is None, op, "input_dtype")
    described = spec(x)
    validators.npu_format_cast(described, acl_format, **where())
    if described.format == acl_format:
        return x
    if acl_format == FORMAT_NZ and not validators.castable(described, **where()):
        return x
    return copy_in_format(x, acl_format)


def npu_format_cast_like(
    x: torch.Tensor,
    dst: torch.Tensor,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """``npu_format_cast`` to the format of another tensor."""
    return npu_format_cast(x, format_of(dst), customize_dtype, input_dtype)


def _format_cast_fake(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(x)


KERNELS = {
    "npu_dtype_cast": npu_dtype_cast,
    "_npu_dtype_cast": npu_dtype_cast,
    "npu_dtype_cast_backward": npu_dtype_cast,
    "_npu_dtype_cast_backward": npu_dtype_cast,
    "npu_dynamic_quant": npu_dynamic_quant,
    "npu_dynamic_mx_quant": npu_dynamic_mx_quant,
    "npu_quant_matmul": npu_quant_matmul,
    "npu_quantize": npu_quantize,
    "npu_format_cast": npu_format_cast,
    "npu_format_cast.Tensor": npu_format_cast_like,
    "_npu_format_cast": npu_format_cast,
}
# torch_npu has no fake kernel for the outer op, which torch.compile meets first.
FAKES = {"npu_format_cast": _format_cast_fake, "npu_format_cast.Tensor": _format_cast_fake}
