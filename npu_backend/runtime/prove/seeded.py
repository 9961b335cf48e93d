"""Full-size weights of one layer from a seed, as they are after load on attention-TP rank 0.

Every projection is uniform with deviation ``1 / sqrt(fan_in)``, so that activations stay of the
order of one. The same seed, layer id and shape give the same bits on every machine with the same
torch; nothing here is a trained model's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from attrs import field, frozen

from npu_backend.errors import NotExecutedError
from npu_backend.model.records import MlaLayer
from npu_backend.model.weights import MX_BLOCK, WeightSpec, loaded_weights

__all__ = ["EXECUTED_QUANTS", "LayerWeights", "check_executable", "seeded_weights"]

EXECUTED_QUANTS = ("none", "w8a8-dynamic", "w8a8-static", "fp8", "mxfp8")
"""Quantizations that can be seeded; the others are planned only."""

_UNIFORM_DEVIATION = 256 / 12**0.5
"""Deviation of the 256 equally likely values k + 1/2."""


@frozen(eq=False)
class LayerWeights:
    """The weights of one layer.

    Args:
        loaded: By loaded name, scales included: what a host holds after load.
        gammas: ``q_a_layernorm`` (where the layer has a compressed query), ``kv_a_layernorm``.
        channel_scales: Fp32 scales of each quantized projection, ``(out,)``, or ``(out, in / 32)``
            of MXFP8: ``weight * scale`` is the original weight.
    """

    loaded: dict[str, torch.Tensor] = field(repr=False)
    gammas: dict[str, torch.Tensor] = field(repr=False)
    channel_scales: dict[str, torch.Tensor] = field(factory=dict, repr=False)

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return loaded weights and gammas on a device, strides kept, each in its own storage."""
        given = {**self.loaded, **self.gammas}
        return {name: _moved(tensor, device) for name, tensor in given.items()}


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    # Strides are part of what is proven, and tensor.to() need not keep them.
    return _strided_copy(tensor, tensor.stride(), tensor.dtype, device)


def _strided_copy(
    tensor: torch.Tensor,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return a copy in given strides that is nobody's view: a view would keep its base alive, and
    the base the storage."""
    out = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=device)
    return out.copy_(tensor)


def check_executable(layer: MlaLayer) -> None:
    """Check that a layer's weights and cache can be made.

    Raises:
        NotExecutedError: A quantization, a ``w_kc`` dtype or a cache dtype is planned only.
    """
    reasons = [
        f"{name} is {kind}, executed are {', '.join(EXECUTED_QUANTS)}"
        for name, kind in layer.quant
        if kind not in EXECUTED_QUANTS
    ]
    floats = ("bfloat16", "float16", "float32")
    if layer.bmm_dtype not in floats:
        reasons.append(f"w_kc and w_vc of {layer.bmm_dtype}, executed are {', '.join(floats)}")
    if layer.kv_layout.cache_mode not in ("PA_BSND", "PA_NZ"):
        reasons.append(f"cache mode {layer.kv_layout.cache_mode}, executed are PA_BSND and PA_NZ")
    if reasons:
        raise NotExecutedError(
            "the layer is planned, but not executed yet",
            whom=str(layer),
            why=reasons,
            remedy="plan it (npu-backend plan), or run layers of the executed kinds",
        )


def _generator(seed: int, layer: MlaLayer) -> torch.Generator:
    mixed = zlib.crc32(f"{seed}/{layer.layer_id}/{layer.is_nextn}".encode())
    return torch.Generator().manual_seed(mixed)


def _random_int8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return uniform int8; eight values from each 64-bit draw, which is what makes it fast."""
    count = 1
    for size in shape:
        count *= size
    words = torch.empty(-(-count // 8), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int8)[:count].view(shape)


def _uniform(
    shape: tuple[int, ...], fan_in: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return a float weight of deviation ``1 / sqrt(fan_in)``."""
    step = fan_in**-0.5 / _UNIFORM_DEVIATION
    # k + 1/2 has eight significant bits, so bf16 holds it exactly before it is scaled.
    return _random_int8(shape, generator).to(dtype).add_(0.5).mul_(step)


_FLOAT8_STEP = 3.5
"""Factor from int8 values to the range of e4m3: 128 * 3.5 is 448."""


def _float8(values: torch.Tensor) -> torch.Tensor:
    """Return int8 values spread over the range of e4m3, rounded to it."""
    return values.float().add_(0.5).mul_(_FLOAT8_STEP).to(torch.float8_e4m3fn)


def _mx_scales(
    rows: int, fan_in: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flat e8m0 scales of blocks of 32 inputs, and the same as fp32 ``(rows, blocks)``."""
    middle = fan_in**-0.5 / (_UNIFORM_DEVIATION * _FLOAT8_STEP)
    power = round(math.log2(middle))
    spread = torch.randint(-1, 2, (rows, fan_in // MX_BLOCK), generator=generator)
    coded = (spread + (power + 127)).to(torch.uint8).reshape(-1)
    # Old torch has no e8m0 dtype; its bytes stand for it.
    coded = coded.view(getattr(torch, "float8_e8m0fnu", torch.uint8))
    return coded, torch.exp2((spread + power).float())


def _packed_static(
    spec: WeightSpec, weight: torch.Tensor, scale: torch.Tensor, rows: int
) -> torch.Tensor:
    """Return the four static scales in one tensor, as the plan counts them: deq_scale (rows,) fp32,
    quant_bias (rows,) int32, input_scale (1,) fp32, input_offset (1,) int32, in this order."""
    packed = torch.empty(spec.shape, dtype=torch.float32)
    # Inputs are of the order of one, times a norm's gamma of at most 1.25: what is clipped is no
    # rounding, so the range holds 5.6 deviations of the widest channel (one value in 10**7).
    input_scale, offset = 14.0 / 255.0, -1
    packed[:rows] = scale * input_scale
    bias = -offset * weight.sum(-1, dtype=torch.int32)
    packed[rows : 2 * rows] = bias.view(torch.float32)
    packed[2 * rows] = input_scale
    packed[2 * rows + 1] = torch.tensor([offset], dtype=torch.int32).view(torch.float32)[0]
    return packed


def seeded_weights(layer: MlaLayer, attn_tp_size: int, *, seed: int = 0) -> LayerWeights:
    """Make the weights of a layer on the CPU.

    Args:
        layer: The layer.
        attn_tp_size: Attention-TP size; the weights are those of rank 0.
        seed: Mixed with the layer's id.

    Raises:
        NpuBackendError: The layer is not of the executed kinds.
    """
    check_executable(layer)
    generator = _generator(seed, layer)
    dtype = getattr(torch, layer.dtype)
    specs = {spec.name: spec for spec in loaded_weights(layer, attn_tp_size)}
    loaded: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        if name.endswith(".scale") or spec.origin == "derived":
            continue
        rows, fan_in = spec.shape
        kind = layer.quant_of(name)
        if kind == "none":
            loaded[name] = _uniform((rows, fan_in), fan_in, dtype, generator)
            continue
        # A copy, for what came out is a view of 64-bit words; (out, in) in the strides of a
        # contiguous (in, out), as hosts leave 8-bit weights for their matmul.
        values = _random_int8((rows, fan_in), generator)
        scale = f"{name}.scale"
        if kind == "mxfp8":
            # Rows and their scales lie alike: the product takes both turned, or neither.
            loaded[name] = _strided_copy(_float8(values), (fan_in, 1), torch.float8_e4m3fn)
            loaded[scale], scales[name] = _mx_scales(rows, fan_in, generator)
            continue
        if kind == "fp8":
            loaded[name] = _strided_copy(_float8(values), (1, rows), torch.float8_e4m3fn)
            deviation = _UNIFORM_DEVIATION * _FLOAT8_STEP
        else:
            loaded[name] = _strided_copy(values, (1, rows), torch.int8)
            deviation = _UNIFORM_DEVIATION
        spread = torch.rand(rows, generator=generator) + 0.5
        scales[name] = spread * (fan_in**-0.5 / deviation)
        if kind == "w8a8-static":
            loaded[scale] = _packed_static(specs[scale], loaded[name], scales[name], rows)
        else:
            # Its own storage: scales are released apart from what the reference keeps.
            loaded[scale] = scales[name].clone()
    loaded |= _absorbed(layer, attn_tp_size, loaded["kv_b_proj"], scales.get("kv_b_proj"))
    gammas = {"kv_a_layernorm": _gamma(layer.kv_lora_rank, dtype, generator)}
    if layer.q_lora_rank is not None:
        gammas["q_a_layernorm"] = _gamma(layer.q_lora_rank, dtype, generator)
    return LayerWeights(
        loaded={name: loaded[name] for name in specs}, gammas=gammas, channel_scales=scales
    )


def _gamma(width: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(width, generator=generator) * 0.5 + 0.75).to(dtype)


def _absorbed(
    layer: MlaLayer, attn_tp_size: int, kv_b: torch.Tensor, scale: torch.Tensor | None
) -> Mapping[str, torch.Tensor]:
    """Split kv_b_proj as a host's loader does, each part in its own storage.

    ``w_kc`` (heads, nope, latent): strided is ``(nope * latent, 1, nope)``.
    ``w_vc`` (heads, latent, v): strided is ``(v * latent, 1, latent)``.
    """
    dtype = getattr(torch, layer.bmm_dtype)
    if scale is not None:
        by = scale.reshape(len(scale), -1)
        kv_b = (kv_b.float() * by.repeat_interleave(kv_b.shape[1] // by.shape[1], -1)).to(dtype)
    heads, nope = layer.local_heads(attn_tp_size), layer.qk_nope_head_dim
    halves = kv_b.view(heads, nope + layer.v_head_dim, layer.kv_lora_rank)
    keys, values = halves[:, :nope], halves[:, nope:].transpose(1, 2)
    latent, v = layer.kv_lora_rank, layer.v_head_dim
    strides = {
        "w_kc": (nope * latent, latent, 1),
        "w_vc": (v * latent, v, 1),
    }
    if layer.w_kc_layout == "strided":
        strides["w_kc"] = (nope * latent, 1, nope)
    if layer.w_vc_layout == "strided":
        strides["w_vc"] = (v * latent, 1, latent)
    return {
        "w_kc": _strided_copy(keys, strides["w_kc"], dtype),
        "w_vc": _strided_copy(values, strides["w_vc"], dtype),
    }
