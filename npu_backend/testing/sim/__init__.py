"""A simulated NPU: the real torch_npu on stand-ins for CANN's libraries.

``start()`` brings it up. Importing this package imports neither torch nor torch_npu.

What a pass on it shows: op schemas, routing, limits of each op at the simulated chip and CANN
version, memory and lifetimes. What it does not show: the device's numerics and speed. Streams are
synchronous, an NZ cast is a copy, collectives and graph capture are refused.
"""

from npu_backend.testing.sim.build import Standins, build_standins
from npu_backend.testing.sim.device import Simulation, current, start
from npu_backend.testing.sim.errors import (
    NotSimulatedError,
    OpRejectedError,
    SimBuildError,
    SimError,
    SimStartError,
    StorageReleasedError,
)
from npu_backend.testing.sim.settings import Settings
from npu_backend.testing.sim.spec import TensorSpec

__all__ = [
    "NotSimulatedError",
    "OpRejectedError",
    "Settings",
    "SimBuildError",
    "SimError",
    "SimStartError",
    "Simulation",
    "Standins",
    "StorageReleasedError",
    "TensorSpec",
    "build_standins",
    "current",
    "start",
]
