"""Bring up the simulated NPU and import SGLang's NPU code on it."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from functools import cache

from attrs import frozen

from npu_backend.testing import sim

__all__ = ["NPU_MODULE", "PRE_MODULE", "VERSION", "World", "stand_in", "start"]

VERSION = "0.5.23"
NPU_MODULE = "sglang.srt.hardware_backend.npu.modules.deepseek_v2_attention_mla_npu"
PRE_MODULE = "sglang.srt.hardware_backend.npu.attention.mla_preprocess"

# torch asks these whether there is a triton, and would take the stand-in for one.
_BEFORE_STANDINS = (
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.debugging",
    "torch.utils.flop_counter",
    "transformers",
)


@frozen
class World:
    """SGLang's modules on a simulated NPU.

    Args:
        simulation: The simulated NPU.
        npu_mod: ``forward_*_npu`` and ``npu_mla_preprocess``.
        pre: ``NPUFusedMLAPreprocess``.
    """

    simulation: sim.Simulation
    npu_mod: types.ModuleType
    pre: types.ModuleType


def stand_in() -> None:
    """Put the stand-ins in the place of packages of kernels; with or without an NPU."""
    for name in _BEFORE_STANDINS:
        importlib.import_module(name)
    from sglang_world import standins

    standins.install()


@cache
def start() -> World:
    """Bring everything up, once for a process; chip and CANN come from the environment.

    Raises:
        RuntimeError: SGLang was imported before, without the stand-ins.
    """
    if "sglang" in sys.modules and not sim.current():
        raise RuntimeError("sglang is imported already, and looked for an NPU before there was one")
    simulation = sim.start()
    with warnings.catch_warnings():
        # Deprecations of SGLang's dependencies are not this project's.
        warnings.simplefilter("ignore")
        stand_in()
        pre = importlib.import_module(PRE_MODULE)
        npu_mod = importlib.import_module(NPU_MODULE)
    return World(simulation, npu_mod, pre)
