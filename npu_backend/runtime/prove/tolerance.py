"""How far a 16-bit or int8 layer may be from the fp32 reference, and how far it is.

The error of a step is ``|out - reference| / |reference|`` over all its values (Frobenius norms).

A value rounded to a format of p significand bits is off by up to 2**-p relative, and by about
``0.42 * 2**-p`` in the root mean square (uniform inside the binade, averaged over mantissas). The
layer rounds about eight times in a row (down, norm, up, absorbed query, RoPE, cache, attention,
v_up), independently, so errors add in squares:

    bf16: p = 8:   sqrt(8) * 0.42 * 2**-8  = 4.6e-3      bound 1e-2
    fp16: p = 11:  sqrt(8) * 0.42 * 2**-11 = 5.8e-4      bound 2e-3
    fp32: p = 24, but sums of some thousand products: about sqrt(K) * 2**-24 = 5e-6      bound 2e-5

Int8 activations add the rounding of a row to 255 steps: with one scale a row its largest value is
about four deviations, so a step is 4/127 of a deviation and the error 4 / 127 / sqrt(12) = 9e-3;
a static scale over seven deviations gives 14 / 255 / sqrt(12) = 1.6e-2. Two such quantizations
(input and compressed query), of which the second acts on the scores as well, and bf16: about
2.5e-2; bound 4e-2. Weights
add none, for the reference multiplies with the dequantized ones.

Fp8 activations (e4m3, p = 4) are off by 0.42 * 2**-4 = 2.6e-2 whatever the scale; two of them and
their effect on the scores as above: about 6e-2; bound 1e-1. MXFP8 has the same rounding, and clips
the largest of 32 values by up to an eighth where its block's scale is too small for it.

A quantized cache adds its own rounding, of values of deviation one: int8 with a factor for
magnitudes up to 8: 8 / 127 / sqrt(12) = 1.8e-2; with one scale for 128 latents, whose largest is
about 2.8 deviations: 2.8 / 127 / sqrt(12) = 6e-3; e4m3: 2.6e-2. It acts on keys and values, and
with ``int8`` and ``fp8`` the query is rounded too. Bounds, added in squares: 4e-2, 2e-2, 6e-2.
"""

from __future__ import annotations

import math

import torch

from npu_backend.model.records import MlaLayer

__all__ = ["relative_error", "tolerance_of", "worst_token"]

_BOUNDS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}
_INT8_BOUND = 4e-2
_FP8_BOUND = 1e-1
_CACHE_BOUNDS = {
    "int8": 4e-2,
    "int8_channel": 4e-2,
    "int8_packed": 2e-2,
    "fp8": 6e-2,
    "fp8_packed": 6e-2,
}
_QUANTIZED = ("fused_qkv_a_proj", "q_proj", "kv_a_proj_with_mqa", "q_b_proj")


def tolerance_of(layer: MlaLayer) -> float:
    """Return the bound on the relative error of a layer's outputs."""
    kinds = {layer.quant_of(name) for name in _QUANTIZED} - {"none"}
    bound = _BOUNDS[layer.dtype]
    if kinds:
        bound = _FP8_BOUND if kinds & {"fp8", "mxfp8"} else _INT8_BOUND
    return math.hypot(bound, _CACHE_BOUNDS.get(layer.kv_layout.dtype, 0.0))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error; infinite where a value is not finite or shapes differ."""
    if found.shape != expected.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    difference = (found.double() - expected.double()).norm()
    size = expected.double().norm()
    return float(difference / size) if float(size) else float(difference)


def worst_token(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of one row."""
    rows = zip(found, expected, strict=False)
    return max((relative_error(a, b) for a, b in rows), default=0.0)
