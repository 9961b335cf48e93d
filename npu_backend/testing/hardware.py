"""A real NPU: whether there is one, and bringing it up. Importing this imports no torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

__all__ = ["bring_up", "device_nodes"]


def device_nodes() -> list[str]:
    """Return the device files of NPUs that the driver offers to this process."""
    return sorted(str(p) for p in Path("/dev").glob("davinci[0-9]*"))


def bring_up() -> tuple[str, str]:
    """Bring up the first NPU of this process; return its chip and its CANN version.

    Raises whatever torch, torch_npu or the driver raise.
    """
    torch = import_module("torch")
    torch_npu = import_module("torch_npu")
    torch.npu.set_device(0)
    torch.npu.config.allow_internal_format = True  # as hosts do: lines up to 7.3 need it for NZ
    soc = str(torch.npu.get_device_name(0))
    cann = str(torch_npu.npu.utils.get_cann_version()).split(":")[-1].strip()
    return soc, cann
