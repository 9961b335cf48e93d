"""The static description of one MLP that is not routed: a dense one, or shared experts."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import ge, gt, in_, instance_of, optional

from npu_backend.errors import ModelError
from npu_backend.model.weights import DTYPE_BYTES

__all__ = ["MLP_KINDS", "MLP_PROJECTIONS", "MlpLayer"]

MLP_KINDS = ("dense", "shared_experts")

MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Weights of a gated MLP: ``down(act(gate(x)) * up(x))``. Shapes, with H the hidden and I the
intermediate size: gate and up ``(I, H)``, down ``(H, I)``."""


def _dtype(_record: Any, _attribute: Attribute[Any], value: Any) -> None:
    parts = value.split("+") if isinstance(value, str) else [value]
    if any(part not in DTYPE_BYTES for part in parts):
        raise ModelError(
            f"{value!r:.80} is not a dtype of weights",
            whom="an MLP",
            why="the dtypes are " + ", ".join(DTYPE_BYTES),
            remedy="name one of them; several, joined by +, where the three weights differ",
        )


@frozen(kw_only=True, cache_hash=True)
class MlpLayer:
    """Static description of one dense MLP, or of the shared experts of one MoE layer. No tensors.

    Args:
        layer_id: The decoder layer's id, numbered as attentions are.
        kind: ``dense`` or ``shared_experts``. Shared experts are one MLP of their joint width.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside, over all ranks; of shared experts the expert's width times
            their number.
        dtype: Dtype of the weights; joined by ``+`` where gate, up and down differ.
        is_nextn: In an MTP layer.
        prefix: Name of the module in the checkpoint.
        weight_bytes: Bytes of the three weights over all ranks, where the checkpoint's headers say
            so; default: from the sizes and the dtype.
    """

    layer_id: int = field(validator=[instance_of(int), ge(0)])
    kind: str = field(validator=in_(MLP_KINDS))
    hidden_size: int = field(validator=[instance_of(int), gt(0)])
    intermediate_size: int = field(validator=[instance_of(int), gt(0)])
    dtype: str = field(default="bfloat16", validator=_dtype)
    is_nextn: bool = False
    prefix: str = ""
    weight_bytes: int | None = field(default=None, validator=optional([instance_of(int), ge(0)]))

    def __attrs_post_init__(self) -> None:
        if self.weight_bytes is None and "+" in self.dtype:
            raise ModelError(
                "the bytes of the MLP are not known",
                whom=str(self),
                why=f"its weights are of several dtypes: {self.dtype}",
                remedy="give weight_bytes, the bytes of all three weights over all ranks",
            )

    @property
    def elements(self) -> int:
        """Elements of gate, up and down over all ranks: 3 x hidden x intermediate."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def bytes(self) -> int:
        """Bytes of gate, up and down over all ranks, without scales and biases."""
        if self.weight_bytes is not None:
            return self.weight_bytes
        return self.elements * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        kind = "shared experts" if self.kind == "shared_experts" else "dense MLP"
        return f"layer {self.layer_id}{' (MTP)' if self.is_nextn else ''}, {kind}"
