"""What plugin authors test with: a simulated NPU, fixtures, conformance suites.

Importing it imports no torch; a suite is loaded when it is first named.

* :class:`BmmKernelConformance`, :class:`PreprocessPathConformance` and
  :class:`ReleasePolicyConformance`: pytest classes that a plugin's tests subclass.
* :mod:`npu_backend.testing.sim` brings up a simulated NPU in a process.
* :mod:`npu_backend.testing.plugin` is the pytest plugin with ``npu_sim`` and ``npu_device``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_backend.testing.conformance.bmm import BmmKernelConformance
    from npu_backend.testing.conformance.path import PreprocessPathConformance
    from npu_backend.testing.conformance.release import ReleasePolicyConformance

__all__ = ["BmmKernelConformance", "PreprocessPathConformance", "ReleasePolicyConformance"]

_HOME = {
    "BmmKernelConformance": "bmm",
    "PreprocessPathConformance": "path",
    "ReleasePolicyConformance": "release",
}


def __getattr__(name: str) -> Any:
    try:
        module = import_module(f"npu_backend.testing.conformance.{_HOME[name]}")
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
