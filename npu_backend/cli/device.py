"""Where ``run`` runs: a real NPU, the simulated one, or the CPU reference; and what that shows."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from attrs import frozen

from npu_backend.api import installed_torch_npu
from npu_backend.catalog import Catalog
from npu_backend.cli.output import print_warning
from npu_backend.deployment import Deployment, Soc
from npu_backend.errors import NpuBackendError
from npu_backend.testing.hardware import bring_up, device_nodes

__all__ = [
    "DEVICES",
    "Device",
    "c_compiler",
    "device_nodes",
    "open_device",
    "warn_of_other_versions",
]

DEVICES = ("auto", "cpu", "sim", "npu")

_SHOWS = {
    "npu": (
        "this device, with these versions: schemas, routing, limits, memory, lifetimes, numerics",
        "speed, and any other chip or version",
    ),
    "sim": (
        "op schemas of the installed torch_npu, routing, limits of the simulated chip and CANN, "
        "memory by torch_npu's own allocator, lifetimes",
        "numerics and speed of an NPU; streams, NZ layout, collectives and graph capture",
    ),
    "cpu": (
        "routing, preparation, release and lifetimes, on reference ops",
        "op schemas, the device's limits and allocator, numerics and speed of an NPU",
    ),
}


@frozen
class Device:
    """A device that is up.

    Args:
        kind: ``npu``, ``sim`` or ``cpu``.
        torch_device: What torch calls it.
        torch: Version of torch.
        torch_npu: Version of torch-npu, where it is used.
        soc: Chip, real or simulated; None on the CPU.
        cann: CANN of the device, real or simulated; None on the CPU.
        why: Why this one, where ``auto`` chose.
    """

    kind: str
    torch_device: str
    torch: str
    torch_npu: str | None = None
    soc: str | None = None
    cann: str | None = None
    why: str = ""

    @property
    def shows(self) -> str:
        """What a pass on it shows."""
        return _SHOWS[self.kind][0]

    @property
    def does_not_show(self) -> str:
        """What a pass on it does not show."""
        return _SHOWS[self.kind][1]

    @property
    def title(self) -> str:
        """The device in a few words."""
        name = {"npu": "NPU", "sim": "simulated NPU", "cpu": "CPU reference"}[self.kind]
        parts = [f"torch {self.torch}"]
        if self.torch_npu:
            parts.append(f"torch-npu {self.torch_npu}")
        if self.soc:
            parts.append(str(self.soc))
        if self.cann:
            parts.append(f"CANN {self.cann}")
        return f"{name} ({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "kind": self.kind,
            "torch": self.torch,
            "torch_npu": self.torch_npu,
            "soc": self.soc,
            "cann": self.cann,
            "why": self.why,
            "shows": self.shows,
            "does_not_show": self.does_not_show,
        }


def c_compiler() -> str | None:
    """Return the C compiler that would build the simulated NPU's stand-ins, or None."""
    candidates = (os.environ.get("CC"), "gcc", "cc")
    return next((c for c in candidates if c and shutil.which(c)), None)


def _no_torch() -> NpuBackendError:
    return NpuBackendError(
        "torch is not installed",
        whom="npu-backend run",
        why="run builds real layers and steps through them",
        remedy='install "npu-backend[sim]" to try it without hardware, or the torch of your host',
    )


def _torch() -> Any:
    """Import torch in the one way that also works with torch-npu and without CANN."""
    try:
        import npu_backend.runtime  # noqa: F401
    except ModuleNotFoundError as err:
        raise _no_torch() from err
    return sys.modules["torch"]


def _cpu(why: str = "") -> Device:
    return Device("cpu", "cpu", _torch().__version__, why=why)


def _sim(soc: Soc, cann: str | None, why: str = "") -> Device:
    from npu_backend.testing import sim

    running = sim.start(soc=soc.name or soc.family, cann=cann)
    _torch().npu.config.allow_internal_format = True  # as hosts do: lines up to 7.3 need it for NZ
    return Device(
        "sim",
        "npu:0",
        _torch().__version__,
        installed_torch_npu(),
        running.settings.soc,
        running.settings.cann,
        why,
    )


def _npu(why: str = "") -> Device:
    try:
        soc, cann = bring_up()
    except Exception as err:
        raise NpuBackendError(
            "the NPU does not come up",
            whom="npu-backend run --device npu",
            why=f"{type(err).__name__}: {err}",
            remedy="check torch-npu, CANN and the driver with npu-smi info, or use --device sim",
        ) from err
    return Device("npu", "npu:0", _torch().__version__, installed_torch_npu(), soc, cann, why)


def open_device(choice: str, *, soc: str, cann: str | None, catalog: Catalog) -> Device:
    """Bring up a device.

    ``auto`` takes a real NPU if there is one, else the simulated one if torch-npu is installed,
    else the CPU; what it had to leave aside is told.

    Args:
        choice: One of :data:`DEVICES`.
        soc: The chip to plan for, and to simulate.
        cann: The CANN release asked for, and to simulate; None: paired with torch-npu.
        catalog: Knows chips by name.

    Raises:
        NpuBackendError: The device that was asked for cannot be had.
    """
    chip = Soc.parse(soc, catalog)
    if choice == "npu":
        return _npu()
    if choice == "sim":
        return _sim(chip, cann)
    if choice == "cpu":
        return _cpu()
    torch_npu = installed_torch_npu()
    if torch_npu and device_nodes():
        return _npu("an NPU is there")
    if torch_npu is None:
        return _cpu(
            "there is no NPU, and torch-npu, which the simulated one needs, is not installed"
        )
    try:
        return _sim(chip, cann, "there is no NPU; torch-npu is installed")
    except NpuBackendError as err:
        # Never silently: the CPU shows less than the simulation does.
        print_warning(f"the simulated NPU does not come up, the CPU reference is used: {err}")
        return _cpu(f"the simulated NPU does not come up: {err.what}")


def warn_of_other_versions(device: Device, deployment: Deployment, cann: str | None) -> None:
    """Warn where what was asked for is not what runs (rule 9)."""
    versions = deployment.catalog.versions
    if device.torch_npu:
        installed = versions.line_of(device.torch_npu)
        if deployment.line != installed:
            print_warning(
                f"planned for TorchNPU line {deployment.line}, installed is {device.torch_npu} of "
                f"line {installed}: calls follow the installed line"
            )
    if device.cann and cann and versions.known_cann(device.cann) != versions.known_cann(cann):
        print_warning(f"planned for CANN {cann}, the device has {device.cann}")
    if device.kind == "npu" and device.soc:
        found = versions.soc(device.soc).family
        if found != deployment.soc.family:
            print_warning(f"planned for {deployment.soc}, the device is {device.soc} ({found})")
