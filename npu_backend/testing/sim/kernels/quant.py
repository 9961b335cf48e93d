"""Reference kernels of the quantising ops and of the format cast."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from npu_backend.testing.sim import validators
from npu_backend.testing.sim.formats import copy_in_format, format_of
from npu_backend.testing.sim.kernels.base import (
    decode_scale,
    dtype_of,
    host,
    optional_spec,
    place,
    spec,
    to_device,
    unsupported_unless,
    where,
)
from npu_backend.testing.sim.kernels.float8 import check_cast
from npu_backend.testing.sim.kernels.quantize import (
    EIGHT_BIT_FLOATS,
    exact_matmul,
    mx_restore,
    mx_rows,
    quantize_rows,
)
from npu_backend.testing.sim.spec import FORMAT_NZ, TensorSpec
from npu_backend.testing.sim.validators.quant import E8M0

__all__ = ["FAKES", "KERNELS"]

_BOUNDS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int32: (-(2**31), 2**31 - 1)}
# torch_npu's number of its e8m0; older torch has no dtype for it, and such scales are bytes.
_E8M0_NUMBER = 293


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def npu_dynamic_quant(
    x: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: Any = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 or fp8 values, fp32 scales): one scale a token, the last dimension dropped."""
    op = "npu_dynamic_quant"
    unsupported_unless(group_index is None, op, "group_index")
    target = dtype_of(dst_type, torch.int8, op)
    validators.npu_dynamic_quant(
        spec(x), smooth_scales=optional_spec(smooth_scales), dst_type=_name(target), **where()
    )
    unsupported_unless(quant_mode == "pertoken", op, f"quant_mode {quant_mode}")
    unsupported_unless(dst_type_max == 0.0, op, f"dst_type_max {dst_type_max}")
    values = host(x, op).float()
    if smooth_scales is not None:
        values = values * host(smooth_scales, op).float()
    quantized, scale = quantize_rows(values, target)
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
    """(fp8 values, e8m0 bytes as uint8): one power of two a block, blocks in pairs (..., n/2, 2).

    An odd number of blocks is filled up with a zero byte. torch_npu hands the bytes out as uint8 on
    every line; an op that wants e8m0 takes their view.
    """
    op = "npu_dynamic_mx_quant"
    validators.npu_dynamic_mx_quant(spec(x), axis=axis, block_size=block_size, **where())
    target = dtype_of(dst_type, torch.int8, op)
    unsupported_unless(target in EIGHT_BIT_FLOATS, op, f"dst_type {dst_type}")
    unsupported_unless(scale_alg in (0, None), op, f"scale_alg {scale_alg}")
    unsupported_unless(round_mode == "rint", op, f"round_mode {round_mode}")
    unsupported_unless(dst_type_max == 0.0 and max_low_bound == 0.0, op, "a bound of the dtype")
    values = host(x, op).float().movedim(axis, -1)
    quantized, codes = mx_rows(values, target, block_size)
    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    codes = codes.reshape(*codes.shape[:-1], -1, 2)
    place_of_axis = axis % x.dim()
    return (
        to_device(quantized.movedim(-1, axis), x),
        to_device(codes.movedim(-2, place_of_axis), x),
    )


def _as_e8m0(tensor: torch.Tensor | None, number: int | None, op: str) -> TensorSpec | None:
    """Describe a scale; one-byte scales that a dtype argument calls e8m0 are e8m0."""
    found = optional_spec(tensor)
    if number is None or found is None or tensor is None:
        return found
    unsupported_unless(number == _E8M0_NUMBER, op, f"a scale of dtype number {number}")
    if tensor.element_size() != 1:
        raise place().reject(op, f"a scale that is called e8m0 is {found.dtype}, must be a byte")
    return evolve(found, dtype=E8M0)


def _mx_product(
    x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, pertoken: torch.Tensor
) -> torch.Tensor:
    """(..., M, K) x (K, N) in fp32, with e8m0 scales (M, n, 2) and (n, N, 2)."""
    left = mx_restore(x1, pertoken.view(torch.uint8).flatten(1))
    weight = x2.t().contiguous()
    right = mx_restore(weight, scale.view(torch.uint8).transpose(0, 1).flatten(1))
    return left @ right.t()


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
    scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    **dtypes: int | None,
) -> torch.Tensor:
    """int8 or fp8 (..., M, K) x (..., K, N), scaled to ``output_dtype`` (int8 where it is None)."""
    op = "npu_quant_matmul"
    named = [name for name, value in dtypes.items() if value is not None]
    unsupported_unless(not named, op, f"the arguments {named}")
    unsupported_unless(y_scale is None, op, "y_scale")
    target = dtype_of(output_dtype, torch.int8, op)
    scale_spec = _as_e8m0(scale, scale_dtype, op)
    assert scale_spec is not None
    by_blocks = scale_spec.dtype == E8M0
    unsupported_unless(by_blocks or not any(group_sizes or ()), op, f"group_sizes {group_sizes}")
    validators.npu_quant_matmul(
        spec(x1),
        spec(x2),
        scale_spec,
        pertoken_scale=_as_e8m0(pertoken_scale, pertoken_scale_dtype, op),
        bias=optional_spec(bias),
        output_dtype=_name(target),
        group_sizes=group_sizes,
        **where(),
    )
    if by_blocks:
        assert pertoken_scale is not None
        product = _mx_product(host(x1, op), host(x2, op), host(scale, op), host(pertoken_scale, op))
        if bias is not None:
            product = product + host(bias, op)
        return to_device(product.to(target), x1)
    product = exact_matmul(host(x1, op), host(x2, op))
    # A bias of the accumulator's dtype is added before scaling; an fp8 product accumulates in fp32.
    early = torch.int32 if x1.dtype == torch.int8 else torch.float32
    if bias is not None and bias.dtype == early:
        product = product + host(bias, op)
    product = product * decode_scale(host(scale, op))
    if pertoken_scale is not None:
        product = product * host(pertoken_scale, op).float().unsqueeze(-1)
    if bias is not None and bias.dtype != early:
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
    target = dtype_of(dtype, x.dtype, op)
    check_cast(op, {x.dtype, target})
    return to_device(host(x, op).to(target), x)


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
