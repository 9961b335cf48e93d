"""Reference kernels for the ``npu::`` ops that the project calls.

Ops that torch_npu registers are overridden for the device; ops of sgl-kernel-npu are defined with
that library's schemas, unless the library itself is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from npu_backend.testing.sim.alias import new_library
from npu_backend.testing.sim.kernels import base, bmm, mlapo, prolog, quant, rope
from npu_backend.testing.sim.limits import Place

if TYPE_CHECKING:
    from npu_backend.testing.sim.device import Simulation

__all__ = ["register"]

_MODULES: tuple[Any, ...] = (bmm, mlapo, prolog, quant, rope)


def _collect(name: str) -> dict[str, Any]:
    return {key: value for m in _MODULES for key, value in getattr(m, name, {}).items()}


def _has(name: str) -> bool:
    packet, _, overload = name.partition(".")
    op = getattr(torch.ops.npu, packet, None)
    return op is not None and (overload or "default") in op.overloads()


def register(simulation: Simulation) -> tuple[list[Any], tuple[str, ...]]:
    """Register the kernels for the ops that the installed line has.

    Returns:
        The libraries, which must stay alive, and the names of the ops that compute.
    """
    settings = simulation.settings
    base.set_place(Place(settings.family, settings.cann, simulation.line))
    kernels: dict[str, Callable[..., Any]] = _collect("KERNELS")
    fakes: dict[str, Callable[..., Any]] = _collect("FAKES")
    fragment = new_library("npu", "FRAGMENT")
    for name, schema in _collect("DEFINED").items():
        if not _has(name):
            fragment.define(schema)
    implementations = new_library("npu", "IMPL")
    served = tuple(name for name in kernels if _has(name))
    for name in served:
        implementations.impl(name, kernels[name], "PrivateUse1")
        has_fake = torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")
        if name in fakes and not has_fake:
            implementations.impl(name, fakes[name], "Meta")
    return [fragment, implementations], served
