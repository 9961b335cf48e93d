"""Projections of a step in every quantization that is executed, for paths and for an indexer.

Float, dynamic and static W8A8, fp8 (one scale a channel) and MXFP8, through the facade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from attrs import frozen

from npu_backend.errors import NotExecutedError, PrepareError
from npu_backend.model.records import MlaLayer
from npu_backend.runtime.ops import Ops
from npu_backend.runtime.shapes import fixed_shape

__all__ = [
    "QUANTIZE_OPS",
    "StaticScales",
    "linear",
    "linear_ops",
    "not_executed",
    "quantize_input",
    "static_scales",
]

EXECUTED = ("none", "w8a8-dynamic", "w8a8-static", "fp8", "mxfp8")
QUANTIZE_OPS = {
    "w8a8-dynamic": "npu::npu_dynamic_quant",
    "fp8": "npu::npu_dynamic_quant",
    "mxfp8": "npu::npu_dynamic_mx_quant",
    "w8a8-static": "npu::npu_quantize",
}
"""The op that quantizes a projection's input."""
E8M0_NUMBER = 293
"""torch_npu's own number of float8_e8m0fnu, for scales that are given as bytes."""
MX_GROUPS = (1, 1, 32)
"""``group_sizes`` of an MXFP8 product: one scale a row, a channel and 32 inputs."""


def not_executed(
    what: str, layer: MlaLayer, strategy: str, why: str, remedy: str, code: str = "quant.mode"
) -> NotExecutedError:
    """Return the error for what is planned and schema-checked, but not executed yet."""
    return NotExecutedError(
        f"{what} is not executed yet",
        whom=f"{layer}, path, {strategy}",
        why=why,
        remedy=remedy,
        code=code,
    )


def quantize_input(
    kind: str, ops: Ops
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return ``(tokens, in) -> (values, scales)`` of a dynamic quantization.

    Scales are ``(tokens,)`` float32, of MXFP8 ``(tokens, in / 64, 2)`` uint8, the bytes of e8m0.
    """
    if kind == "w8a8-dynamic":
        return ops.npu_dynamic_quant
    e4m3 = torch.float8_e4m3fn
    if kind == "fp8":
        dynamic = ops.npu_dynamic_quant

        def fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return dynamic(x, dst_type=e4m3)

        return fp8
    mx = ops.npu_dynamic_mx_quant

    def mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mx(x, dst_type=e4m3)

    return mxfp8


@frozen
class StaticScales:
    """The four static scales of one projection, views of one flat tensor.

    Args:
        deq_scale: ``(out,)`` float32, of the integer product.
        quant_bias: ``(out,)`` int32, added to the integer product.
        input_scale: ``(1,)`` float32.
        input_offset: ``(1,)`` int32.
    """

    deq_scale: torch.Tensor
    quant_bias: torch.Tensor
    input_scale: torch.Tensor
    input_offset: torch.Tensor


def static_scales(packed: torch.Tensor) -> StaticScales:
    """Return the parts of ``NAME.scale`` of a static W8A8 projection: deq_scale, quant_bias,
    input_scale and input_offset one after the other, 32 bits each, in one flat float32 tensor."""
    rows = (packed.numel() - 2) // 2
    flat = packed.reshape(-1)
    return StaticScales(
        deq_scale=fixed_shape(flat[:rows]),
        quant_bias=fixed_shape(flat[rows : 2 * rows].view(torch.int32)),
        input_scale=flat[2 * rows : 2 * rows + 1],
        input_offset=flat[2 * rows + 1 :].view(torch.int32),
    )


def linear_ops(layer: MlaLayer, names: Iterable[str]) -> set[str]:
    """Return the ops that the projections of these names call."""
    kinds = {layer.quant_of(name) for name in names}
    found = {op for kind, op in QUANTIZE_OPS.items() if kind in kinds}
    return {*found, "npu::npu_quant_matmul"} if found else set()


def linear(
    name: str, layer: MlaLayer, weights: Mapping[str, torch.Tensor], ops: Ops, strategy: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``(tokens, in) -> (tokens, out)`` of a projection, in the layer's dtype.

    Args:
        name: The projection's loaded name.
        layer: The layer.
        weights: The projection's weight ``(out, in)`` and, where it is quantized, ``NAME.scale``.
        ops: The facade.
        strategy: For whom, in messages.

    Raises:
        PrepareError: The quantization is planned only.
    """
    kind, weight = layer.quant_of(name), weights[name]
    if kind == "none":

        def plain(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, weight)

        return plain
    if kind not in EXECUTED or layer.dtype != "bfloat16":
        raise not_executed(
            f"{name} in {kind} with activations of {layer.dtype}",
            layer,
            strategy,
            f"executed are {', '.join(EXECUTED)}, quantized ones with bfloat16",
            "run layers of the executed kinds; plan and schemas of the others can be looked at",
        )
    turned, dtype = fixed_shape(weight.t()), torch.bfloat16
    if kind == "mxfp8":
        if not weight.is_contiguous():
            raise PrepareError(
                f"{name} is not laid out as its scales are",
                whom=f"{layer}, path, {strategy}",
                why=(
                    "npu_quant_matmul takes an MXFP8 weight and its scales both row by row, or "
                    "both turned",
                    f"{name} is {tuple(weight.shape)} with strides {weight.stride()}",
                ),
                remedy="let the host store it as (out, in), row by row",
                code="quant.layout",
            )
        quantize = quantize_input(kind, ops)
        # (out, in / 32) in pairs along the inputs, seen as the op takes a weight (in, out).
        rows = weights[f"{name}.scale"].view(torch.uint8).reshape(weight.shape[0], -1, 2)
        paired = fixed_shape(rows.transpose(0, 1))

        def mx(x: torch.Tensor) -> torch.Tensor:
            values, by_token = quantize(x)
            return ops.npu_quant_matmul(
                values,
                turned,
                paired,
                pertoken_scale=by_token,
                output_dtype=dtype,
                scale_dtype=E8M0_NUMBER,
                pertoken_scale_dtype=E8M0_NUMBER,
                group_sizes=MX_GROUPS,
            )

        return mx
    if kind in ("w8a8-dynamic", "fp8"):
        quantize = quantize_input(kind, ops)
        scale = fixed_shape(weights[f"{name}.scale"].reshape(-1))

        def dynamic(x: torch.Tensor) -> torch.Tensor:
            values, by_token = quantize(x)
            return ops.npu_quant_matmul(
                values, turned, scale, pertoken_scale=by_token, output_dtype=dtype
            )

        return dynamic
    parts = static_scales(weights[f"{name}.scale"])

    def static(x: torch.Tensor) -> torch.Tensor:
        values = ops.npu_quantize(x, parts.input_scale, parts.input_offset, torch.qint8, -1)
        return ops.npu_quant_matmul(
            values, turned, parts.deq_scale, bias=parts.quant_bias, output_dtype=dtype
        )

    return static
