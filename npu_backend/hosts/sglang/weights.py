"""The tensors of one of SGLang's attention modules, by the planner's names and in its layouts.

SGLang keeps quantized weights as ``(in, out)``, scales in the model's dtype, static scales in four
parameters. Parameters are shown to the runtime as ``(out, in)`` only while it prepares and binds
(:meth:`HostWeights.turned`): the same objects and bytes, other strides; SGLang finds them as it
left them. Scales are converted once, some kilobytes a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen

from npu_backend.errors import PlanMismatchError
from npu_backend.hosts.sglang.translate import MODULES
from npu_backend.model.records import MlaLayer
from npu_backend.runtime import is_tombstone

__all__ = ["HostWeights"]

E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
_STORED_TURNED = ("w8a8-dynamic", "w8a8-static", "w8a8-static-symmetric", "mxfp8")
"""Quantizations whose weight SGLang keeps as ``(in, out)`` on NPU."""

_AFTER_AN_UPDATE = (
    "SGLang turns such weights when it has loaded them, and after an update once more",
    "SGLang replaces such parameters when it has loaded them, and cannot load into what it made",
)
"""What an update does to parameters of W8A8 and of MXFP8. Source: sglang.srt 0.5.23,
process_weights_after_loading in hardware_backend/npu/quantization/linear_method_npu.py; nothing
there restores them before an update."""

View = Callable[[torch.Tensor], torch.Tensor]


@frozen(eq=False)
class _Turn:
    """A parameter that is shown in another form of the same bytes.

    Args:
        there: From SGLang's form to the planner's.
        back: From the planner's form to SGLang's.
    """

    there: View
    back: View


def _transpose(data: torch.Tensor) -> torch.Tensor:
    return data.t()


def _pairs_of(shape: torch.Size) -> _Turn:
    """Return how paired MXFP8 scales ``(in / 64, out, 2)``, a turned view, are told as bytes."""
    groups, out, two = shape

    def there(data: torch.Tensor) -> torch.Tensor:
        return data.transpose(0, 1).reshape(-1).view(E8M0)

    def back(data: torch.Tensor) -> torch.Tensor:
        return data.view(torch.uint8).view(out, groups, two).transpose(0, 1)

    return _Turn(there, back)


def _flat_float(scale: torch.Tensor) -> torch.Tensor:
    return scale.detach().reshape(-1).to(torch.float32)


def _static(module: Any) -> torch.Tensor:
    """Return the four static scales as one flat float32 tensor; see ``static_scales``."""
    parts = (
        module.deq_scale.detach().reshape(-1).float(),
        module.quant_bias.detach().reshape(-1).to(torch.int32).view(torch.float32),
        module.input_scale.detach().reshape(-1)[:1].float(),
        module.input_offset.detach().reshape(-1)[:1].to(torch.int32).view(torch.float32),
    )
    return torch.cat(parts)


class HostWeights:
    """One attention's weights for :func:`npu_backend.runtime.bind`.

    Args:
        attention: SGLang's module.
        layer: Its record.

    Attributes:
        tensors: Weights and norms by the planner's names.
        converted: Scales that are copies, with how to make them again from SGLang's parameters.
        not_updated: Why SGLang cannot write new weights into these parameters, or None.
    """

    def __init__(self, attention: Any, layer: MlaLayer) -> None:
        self.layer = layer
        self.tensors: dict[str, torch.Tensor] = {}
        self.converted: dict[str, Callable[[], torch.Tensor]] = {}
        self.not_updated: str | None = None
        self._turns: dict[str, _Turn] = {}
        self._turned: set[str] = set()
        self._strides: dict[str, tuple[int, ...]] = {}
        for spec in layer.weight_names:
            if spec in ("w_kc", "w_vc"):
                self.tensors[spec] = getattr(attention, spec)
            elif spec.endswith(".scale"):
                self._scale(spec, getattr(attention, MODULES[spec.removesuffix(".scale")]))
            else:
                self._weight(spec, getattr(attention, MODULES[spec]))
        self.tensors["kv_a_layernorm"] = attention.kv_a_layernorm.weight
        if layer.q_lora_rank is not None:
            self.tensors["q_a_layernorm"] = attention.q_a_layernorm.weight
        self._strides = {n: self.tensors[n].stride() for n in ("w_kc", "w_vc")}

    def _weight(self, name: str, module: Any) -> None:
        weight = module.weight
        self.tensors[name] = weight
        if (kind := self.layer.quant_of(name)) in _STORED_TURNED:
            self._turns[name] = _Turn(_transpose, _transpose)
            self.not_updated = f"{name} is {kind}: {_AFTER_AN_UPDATE[kind == 'mxfp8']}"

    def _scale(self, name: str, module: Any) -> None:
        kind = self.layer.quant_of(name.removesuffix(".scale"))
        if kind == "mxfp8":
            scale = module.weight_scale_inv
            if scale.transpose(0, 1).is_contiguous():
                self.tensors[name] = scale
                self._turns[name] = _pairs_of(scale.shape)
                return
            raise PlanMismatchError(
                "paired MXFP8 scales are not laid out as SGLang leaves them",
                whom=f"{self.layer}, {name}",
                why=f"{tuple(scale.shape)} with strides {scale.stride()}",
                remedy="set NPU_BACKEND_SGLANG=0 for this model",
                code="quant.layout",
            )
        if kind == "w8a8-static":
            self._convert(name, lambda: _static(module))
            return
        held = "weight_scale" if hasattr(module, "weight_scale") else "weight_scale_inv"
        scale = getattr(module, held)
        if scale.dtype == torch.float32 and scale.dim() == 1 and kind != "fp8-block":
            self.tensors[name] = scale
        else:
            self._convert(name, lambda: _flat_float(getattr(module, held)))

    def _convert(self, name: str, make: Callable[[], torch.Tensor]) -> None:
        self.converted[name] = make
        self.tensors[name] = make()

    @contextmanager
    def turned(self) -> Generator[Mapping[str, torch.Tensor]]:
        """Show parameters in the planner's form inside; released ones stay as they are."""
        self._turn(there=True)
        try:
            yield self.tensors
        finally:
            self._turn(there=False)

    def settle(self) -> None:
        """See that every living parameter is in SGLang's form, also one that came back just now."""
        self._turn(there=False)

    def _turn(self, *, there: bool) -> None:
        for name, turn in self._turns.items():
            weight = self.tensors[name]
            if is_tombstone(weight) or (name in self._turned) == there:
                continue
            weight.data = turn.there(weight.data) if there else turn.back(weight.data)
            (self._turned.add if there else self._turned.discard)(name)

    def converted_again(self) -> None:
        """Write converted scales anew, into the same memory, after SGLang wrote its own."""
        with torch.no_grad():
            for name, make in self.converted.items():
                if not is_tombstone(self.tensors[name]):
                    self.tensors[name].copy_(make())

    def as_loaded(self) -> None:
        """Give ``w_kc`` and ``w_vc`` the strides back that SGLang left them with.

        SGLang's own preprocess frees ``w_kc`` after ``w_kc.contiguous()``, which is a copy only
        while the strides are those of a turned tensor.
        """
        for name, stride in self._strides.items():
            weight = self.tensors[name]
            if is_tombstone(weight) or weight.stride() == stride:
                continue
            data = torch.empty_strided(
                weight.shape, stride, dtype=weight.dtype, device=weight.device
            )
            data.copy_(weight.data)
            weight.data = data
