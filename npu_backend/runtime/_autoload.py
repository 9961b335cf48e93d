"""Import torch without the device backend that cannot come up.

With torch-npu installed and no CANN, plain ``import torch`` raises: the device backend is loaded
automatically and finds no driver. Whatever of this project imports torch imports this first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["ensure_torch"]

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_DEVICE_FILES = "davinci[0-9]*"


def device_present(root: Path = Path("/dev")) -> bool:
    """Whether the driver offers an NPU to this process."""
    return any(root.glob(_DEVICE_FILES))


def ensure_torch() -> None:
    """Import torch; where no device is up, without loading device backends.

    A switch that the user set, a torch that is imported already (the simulated NPU does so before
    it starts) and a machine with a device are left as they are. The environment is as before
    afterwards: child processes decide for themselves.
    """
    if "torch" in sys.modules or _SWITCH in os.environ or device_present():
        __import__("torch")
        return
    os.environ[_SWITCH] = "0"
    try:
        __import__("torch")
    finally:
        del os.environ[_SWITCH]
