"""Resolve an offer's ``impl`` and hold it to the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from attrs import define

from npu_backend.errors import PrepareError
from npu_backend.offers import Offer, PluginInfo
from npu_backend.runtime.weights import Prepared, Weights

__all__ = ["Strategy", "Unit", "resolve"]


class Strategy(Protocol):
    """What ``impl="module:object"`` must name: an object of this form, or a class of it that is
    called without arguments.

    It may have an attribute ``ops``: names of the ops it calls (``npu::npu_rms_norm``), or a
    function from :class:`Weights` to such names. They are checked when the layer is bound.
    """

    def prepare(self, weights: Weights) -> Mapping[str, torch.Tensor] | None:
        """Return the prepared tensors by name, or None where there are none."""

    def bind(self, prepared: Prepared, cache: Any) -> Callable[..., Any]:
        """Return the callable of a step: ``x -> y`` of a kernel, ``(hidden_states, positions,
        slot_mapping) -> PreprocessResult`` of a path."""


@define(eq=False)
class Unit:
    """One strategy of one layer: who offered it, for which site, and its implementation."""

    site: str | None
    offer: Offer
    plugin: PluginInfo
    strategy: Strategy
    weights: Weights

    @property
    def whom(self) -> str:
        """For whom, in messages."""
        place = "path" if self.site is None else f"batched matmul {self.site}"
        return f"{self.weights.layer}, {place}, {self.offer.strategy} of {self.plugin}"

    @property
    def reads(self) -> frozenset[str]:
        """Loaded weights that its steps read, with their scales."""
        names = self.offer.step_reads
        return names | {f"{name}.scale" for name in names}

    def ops(self) -> tuple[str, ...]:
        """Return the ops that the implementation says it calls."""
        named = getattr(self.strategy, "ops", ())
        found: Iterable[str] = named(self.weights) if callable(named) else named
        return tuple(found)

    def prepare(self) -> dict[str, torch.Tensor]:
        """Call ``prepare`` and check what it returned.

        Raises:
            PrepareError: It raised, or returned no mapping from names to tensors.
        """
        try:
            returned = self.strategy.prepare(self.weights)
        except PrepareError:
            raise
        except Exception as err:
            raise self._failed("prepare", err) from err
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            raise self._wrong("prepare", f"returned {type(returned).__name__}, not a mapping")
        for name, tensor in returned.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise self._wrong("prepare", f"returned {name!r}: {type(tensor).__name__}")
        return dict(returned)

    def bind(self, prepared: Prepared, cache: Any) -> Callable[..., Any]:
        """Call ``bind`` and check that it returned something to call.

        Raises:
            PrepareError: It raised, or returned nothing callable.
        """
        try:
            bound = self.strategy.bind(prepared, cache)
        except PrepareError:
            raise
        except Exception as err:
            raise self._failed("bind", err) from err
        if not callable(bound):
            raise self._wrong("bind", f"returned {type(bound).__name__}, which cannot be called")
        return bound

    def _failed(self, what: str, err: Exception) -> PrepareError:
        return PrepareError(
            f"{self.offer.impl}.{what} failed",
            whom=self.whom,
            why=f"{type(err).__name__}: {err}",
            remedy="report it to the plugin's author, or block the plugin with NPU_BACKEND_DISABLE",
        )

    def _wrong(self, what: str, why: str) -> PrepareError:
        return PrepareError(
            f"{self.offer.impl}.{what} does not keep the contract",
            whom=self.whom,
            why=why,
            remedy="report it to the plugin's author, or block the plugin with NPU_BACKEND_DISABLE",
            code="plugin.failed",
        )


def resolve(offer: Offer, plugin: PluginInfo) -> Strategy:
    """Import an offer's implementation; a class is instantiated.

    Raises:
        PrepareError: It cannot be imported, made, or lacks ``prepare`` or ``bind``.
    """
    whom = f"{offer.strategy} of {plugin}"
    module_name, _, path = offer.impl.partition(":")
    try:
        found: Any = import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
        if isinstance(found, type):
            found = found()
    except Exception as err:
        raise PrepareError(
            f"the implementation {offer.impl} cannot be had",
            whom=whom,
            why=f"{type(err).__name__}: {err}",
            remedy="install the plugin completely, or block it with NPU_BACKEND_DISABLE",
            code="plugin.failed",
        ) from err
    lacking = [n for n in ("prepare", "bind") if not callable(getattr(found, n, None))]
    if lacking:
        raise PrepareError(
            f"the implementation {offer.impl} has no {' and no '.join(lacking)}",
            whom=whom,
            why="an implementation has prepare(weights) and bind(prepared, cache)",
            remedy="report it to the plugin's author, or block the plugin with NPU_BACKEND_DISABLE",
            code="plugin.failed",
        )
    return cast("Strategy", found)
