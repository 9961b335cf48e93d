"""Reference kernels for the ops that the project calls.

Ops that torch_npu registers are overridden for the device. Ops of kernel libraries are defined with
that library's schemas, unless the library itself is there: sgl-kernel-npu's in ``torch.ops.npu``,
vllm-ascend's in ``torch.ops._C_ascend``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from npu_backend.testing.sim.alias import new_library
from npu_backend.testing.sim.kernels import base, bmm, mlapo, prolog, quant, rope, vllm_ascend
from npu_backend.testing.sim.limits import Place

if TYPE_CHECKING:
    from npu_backend.testing.sim.device import Simulation

__all__ = ["register"]

_MODULES: tuple[Any, ...] = (bmm, mlapo, prolog, quant, rope, vllm_ascend)
_NAMESPACES = ("npu", "_C_ascend")


def _collect(name: str) -> dict[str, Any]:
    return {key: value for m in _MODULES for key, value in getattr(m, name, {}).items()}


def _split(name: str) -> tuple[str, str]:
    """Return (namespace, name); a bare name is torch_npu's namespace."""
    space, _, bare = name.rpartition("::")
    return space or "npu", bare


def _has(name: str) -> bool:
    space, bare = _split(name)
    packet, _, overload = bare.partition(".")
    op = getattr(getattr(torch.ops, space), packet, None)
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
    fragments = {space: new_library(space, "FRAGMENT") for space in _NAMESPACES}
    for name, schema in _collect("DEFINED").items():
        if not _has(name):
            fragments[_split(name)[0]].define(schema)
    implementations = {space: new_library(space, "IMPL") for space in _NAMESPACES}
    served = tuple(name for name in kernels if _has(name))
    for name in served:
        space, bare = _split(name)
        implementations[space].impl(bare, kernels[name], "PrivateUse1")
        has_fake = torch._C._dispatch_has_kernel_for_dispatch_key(f"{space}::{bare}", "Meta")
        if name in fakes and not has_fake:
            implementations[space].impl(bare, fakes[name], "Meta")
    return [*fragments.values(), *implementations.values()], served
