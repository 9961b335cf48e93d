"""What an implementation is given: tensors by name, and the context to prepare them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from npu_backend.deployment import Deployment
from npu_backend.model.records import MlaLayer
from npu_backend.offers import Offer

if TYPE_CHECKING:
    from npu_backend.runtime.ops import Ops

__all__ = ["Prepared", "Weights"]


class _Context(Mapping[str, torch.Tensor]):
    """A mapping from name to tensor that also knows for whom.

    Attributes:
        layer: The layer's description.
        deployment: What it was planned for.
        offer: The offer that is being prepared or bound.
        site: ``q_absorb`` or ``v_up``; None for a path.
        ops: The facade through which every op is called.
        device: Where the weights are.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        layer: MlaLayer,
        deployment: Deployment,
        offer: Offer,
        site: str | None,
        ops: Ops,
        device: torch.device,
    ) -> None:
        self._tensors = dict(tensors)
        self.layer = layer
        self.deployment = deployment
        self.offer = offer
        self.site = site
        self.ops = ops
        self.device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            have = ", ".join(self._tensors) or "nothing"
            raise KeyError(self._missing(name, have)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def local_heads(self) -> int:
        """Heads on this rank."""
        return self.layer.local_heads(self.deployment.attn_tp_size)

    def _missing(self, name: str, have: str) -> str:
        raise NotImplementedError


class Weights(_Context):
    """The loaded weights that an offer declares, by name, for ``prepare(weights)``.

    Holds what the offer names in ``reads``, ``reads_once``, ``copies`` or ``aliases``, each with
    its scale, and whatever the host gave beside the planned weights (the norms). What an offer does
    not declare it does not see: releases rest on the declarations.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], **context: Any) -> None:
        super().__init__(tensors, **context)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def relayout(self, name: str, data: torch.Tensor) -> torch.Tensor:
        """Replace a parameter's memory by the same values in another layout or format, in place.

        For a weight that the device takes only so, and that others may read so too. The parameter
        keeps its name, shape, dtype, bytes and readers: neither a copy nor a release. Taken back
        where preparing the layer fails.

        Args:
            name: The loaded weight.
            data: Of its shape and dtype.

        Returns:
            The parameter.

        Raises:
            ValueError: Another shape or dtype.
        """
        weight = self[name]
        if data.shape != weight.shape or data.dtype != weight.dtype:
            raise ValueError(
                f"{name} is {tuple(weight.shape)} {weight.dtype}; it cannot become "
                f"{tuple(data.shape)} {data.dtype}"
            )
        self._before.append((weight, weight.data))
        weight.data = data
        return weight

    def take_back(self) -> None:
        """Undo every :meth:`relayout`, the last one first."""
        while self._before:
            weight, data = self._before.pop()
            weight.data = data

    def settle(self) -> None:
        """Let go of what :meth:`relayout` replaced."""
        self._before.clear()

    def _missing(self, name: str, have: str) -> str:
        if name in self.layer.weight_names:
            return (
                f"the offer of {self.offer.strategy} does not declare {name} in reads, reads_once, "
                f"copies or aliases (it sees {have})"
            )
        return f"{name} was not given (given: {have})"


class Prepared(_Context):
    """What ``prepare`` returned, for ``bind(prepared, cache)``.

    Attributes:
        weights: Those loaded weights that the offer reads at every step or that its prepared names
            share, with their scales, and what the host gave beside the planned weights.
        q_absorb: ``(tokens, heads, qk_nope_head_dim) -> (tokens, heads, kv_lora_rank)``, bound, for
            paths that use that site; None for others.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        weights: Mapping[str, torch.Tensor],
        q_absorb: Callable[[torch.Tensor], torch.Tensor] | None,
        **context: Any,
    ) -> None:
        super().__init__(tensors, **context)
        self.weights = dict(weights)
        self.q_absorb = q_absorb

    def _missing(self, name: str, have: str) -> str:
        return f"{self.offer.strategy} prepared no {name} (prepared: {have})"
