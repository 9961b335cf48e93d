"""What ``npu_mla_prolog_v3`` takes in each (weight, KV cache, query) quantization.

Source: aclnnMlaPrologV3WeightNz of the ops-transformer documentation, and the tiling checks of that
op: an argument that a mode does not name must not be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import TensorSpec
from npu_backend.testing.sim.validators.base import Check

__all__ = ["HIFLOAT8", "Dims", "Modes", "check_arguments"]

_OP = "npu_mla_prolog_v3"
# torch_npu's number of its hifloat8, which torch has no dtype for.
HIFLOAT8 = 290


@frozen
class Dims:
    """Sizes of one call, as its tensors give them.

    Args:
        tokens: Rows, batch and length multiplied.
        hidden: Width of ``token_x``.
        q_lora: q_lora_rank.
        heads: Local heads.
        nope: qk_nope_head_dim.
        kv_lora: kv_lora_rank.
        rope: qk_rope_head_dim.
    """

    tokens: int
    hidden: int
    q_lora: int
    heads: int
    nope: int
    kv_lora: int
    rope: int


@frozen
class Modes:
    """weight_quant_mode, kv_cache_quant_mode and query_quant_mode of one call."""

    weight: int
    kv: int
    query: int

    def __str__(self) -> str:
        return f"weight_quant_mode {self.weight}, kv_cache_quant_mode {self.kv}"

    @property
    def all_quantized(self) -> bool:
        """Whether token_x and the down projections are quantized, too."""
        return self.weight >= 2

    @property
    def packed(self) -> bool:
        """Whether latent, rotated key and scales share one row of the cache."""
        return self.kv == 3

    def eight_bit(self, place: Place) -> list[str]:
        """Return the dtypes of what the weight mode quantizes."""
        dtypes: list[str] = place.value(_OP, "quantized_dtypes")[str(self.weight)]
        return dtypes

    def kv_dtypes(self, place: Place) -> Sequence[str]:
        """Return the dtypes of ``kv_cache``."""
        if self.kv == 0:
            return place.value(_OP, "dtypes")  # type: ignore[no-any-return]
        return ("int8",) if self.kv == 2 else self.eight_bit(place)

    def kr_dtypes(self, place: Place) -> Sequence[str]:
        """Return the dtypes of ``kr_cache``, where it is used at all."""
        return ("int8",) if self.kv == 2 else place.value(_OP, "dtypes")

    def scales(self, dims: Dims, place: Place) -> dict[str, tuple[tuple[int, ...], Sequence[str]]]:
        """Return (shape, dtypes) of each argument that must be given."""
        fp32 = ("float32",)
        columns, latent = dims.heads * (dims.nope + dims.rope), dims.kv_lora + dims.rope
        found: dict[str, tuple[tuple[int, ...], Sequence[str]]] = {}
        if self.weight == 3:
            block = place.value(_OP, "mx_block")
            e8m0 = place.value(_OP, "mx_scale_dtypes")
            hidden, q_lora = dims.hidden // block, dims.q_lora // block
            found["dequant_scale_x"] = (dims.tokens, hidden), e8m0
            found["dequant_scale_w_dq"] = (dims.q_lora, hidden), e8m0
            found["dequant_scale_w_uq_qr"] = (columns, q_lora), e8m0
            found["dequant_scale_w_dkv_kr"] = (latent, hidden), e8m0
        elif self.weight:
            found["dequant_scale_w_uq_qr"] = (1, columns), fp32
            if self.all_quantized:
                found["dequant_scale_x"] = (dims.tokens, 1), fp32
                found["dequant_scale_w_dq"] = (1, dims.q_lora), fp32
                found["dequant_scale_w_dkv_kr"] = (1, latent), fp32
        if self.kv in (1, 2):
            found["quant_scale_ckv"] = (1,) if self.kv == 1 else (1, dims.kv_lora), fp32
        if self.kv == 2:
            found["quant_scale_ckr"] = (1, dims.rope), fp32
        if self.packed and self.weight in place.value(_OP, "clip_alpha_weight_modes"):
            found["k_nope_clip_alpha"] = (1,), fp32
        return found

    def optional(
        self, dims: Dims, place: Place
    ) -> dict[str, tuple[tuple[int, ...], Sequence[str]]]:
        """Return (shape, dtypes) of each argument that may be given."""
        if self.weight in place.value(_OP, "smooth_weight_modes"):
            return {"smooth_scales_cq": ((1, dims.q_lora), ("float32",))}
        return {}


def check_arguments(
    check: Check,
    modes: Modes,
    dims: Dims,
    given: Mapping[str, TensorSpec | None],
    named: Mapping[str, Any],
) -> None:
    """Check the optional tensors of a call against its modes: presence, shape, dtype.

    Args:
        check: Where a refusal goes.
        modes: The call's modes.
        dims: The call's sizes.
        given: The optional tensors by name.
        named: The ``*_dtype`` arguments by name, for hifloat8.
    """
    needed, optional = modes.scales(dims, check.place), modes.optional(dims, check.place)
    for name in needed:
        check.that(given.get(name) is not None, f"{name} is needed in {modes}")
    for name, spec in given.items():
        if spec is None:
            continue
        allowed = needed.get(name) or optional.get(name)
        if allowed is None:
            raise check.place.reject(check.op, f"{name} must not be given in {modes}")
        shape, dtypes = allowed
        check.shape(name, spec, *shape)
        check.dtype(f"{name} in {modes}", spec, dtypes)
    if modes.weight == 5:
        wanted = ["token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype"]
        if modes.kv in (1, 3):
            wanted.append("kv_cache_dtype")
        for name in wanted:
            check.that(
                named.get(name) == HIFLOAT8,
                f"{name} must be torch_npu.hifloat8 ({HIFLOAT8}) in {modes}, "
                f"but is {named.get(name)}",
            )
