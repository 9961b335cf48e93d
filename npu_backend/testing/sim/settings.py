"""What is simulated: chip, CANN version, memory, number of devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from attrs import field, frozen, validators

from npu_backend.catalog import load_catalog
from npu_backend.errors import NpuBackendError
from npu_backend.testing.sim.errors import SimStartError

__all__ = ["DEFAULT_MEMORY", "DEFAULT_SOC", "Settings", "installed_line", "installed_torch_npu"]

DEFAULT_SOC = "Ascend910_9391"
# One die of an A3 carries 64 GiB. Pages of the host are used only when they are written.
DEFAULT_MEMORY = 64 << 30

# A family known only by a prefix of its chips' names, with a chip that torch_npu knows.
_A_CHIP_OF = {"A5": "Ascend950PR_9599"}

ENV_SOC = "NPU_BACKEND_SIM_SOC"
ENV_CANN = "NPU_BACKEND_SIM_CANN"
ENV_MEMORY = "NPU_BACKEND_SIM_MEMORY"
ENV_DEVICES = "NPU_BACKEND_SIM_DEVICES"


def installed_torch_npu() -> str | None:
    """Return the version of the installed torch-npu package, or None; imports nothing."""
    try:
        return version("torch-npu")
    except PackageNotFoundError:
        return None


def installed_line() -> str:
    """Return the TorchNPU line of the installed package.

    Raises:
        SimStartError: torch-npu is not installed.
        DeploymentError: The package is not in the catalog's table.
    """
    package = installed_torch_npu()
    if package is None:
        raise SimStartError(
            "torch-npu is not installed",
            whom="the simulated NPU",
            why="its schemas, dispatcher and allocator are torch_npu's own",
            remedy='pip install "npu-backend[sim]", or torch-npu in the version to be tested',
        )
    return load_catalog().versions.line_of(package)


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError as err:
        raise SimStartError(
            f"{name}={text!r} is not a whole number",
            whom="the simulated NPU",
            why="memory is given in bytes, devices are counted",
            remedy=f"set {name} to a number, or unset it",
        ) from err


@frozen(kw_only=True)
class Settings:
    """The settings of a simulated NPU, fixed for a process once a device is up.

    Args:
        soc: Chip, as ``aclrtGetSocName`` reports it.
        cann: CANN version, as ``aclsysGetCANNVersion`` reports it.
        memory: Capacity of each device, in bytes.
        devices: Number of devices.
    """

    soc: str
    cann: str
    memory: int = field(validator=validators.ge(0))
    devices: int = field(validator=validators.and_(validators.ge(1), validators.le(16)))

    @classmethod
    def resolve(
        cls,
        soc: str | None = None,
        cann: str | None = None,
        memory: int | None = None,
        devices: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Fill in what is not given: from the environment, then from defaults.

        A family such as ``A3`` becomes the family's first chip. The default CANN version is the
        one paired with the installed torch-npu package.

        Raises:
            SimStartError: A value cannot be simulated, or torch-npu is needed and absent.
        """
        env = os.environ if environ is None else environ
        versions = load_catalog().versions
        try:
            record = versions.soc(soc or env.get(ENV_SOC) or DEFAULT_SOC)
            chosen = cann or env.get(ENV_CANN) or versions.paired_cann(installed_line())
            versions.known_cann(chosen)
        except SimStartError:
            raise
        except NpuBackendError as err:
            raise SimStartError(
                "the settings cannot be simulated",
                whom=f"soc={soc or env.get(ENV_SOC)}, cann={cann or env.get(ENV_CANN)}",
                why=(err.what, *err.why),
                remedy=err.remedy,
            ) from err
        if memory is None:
            memory = _number(env.get(ENV_MEMORY) or str(DEFAULT_MEMORY), ENV_MEMORY)
        if devices is None:
            devices = _number(env.get(ENV_DEVICES) or "1", ENV_DEVICES)
        try:
            return cls(
                soc=record.name
                or _A_CHIP_OF.get(record.family)
                or str(versions.socs[record.family]["names"][0]),
                cann=chosen,
                memory=memory,
                devices=devices,
            )
        except ValueError as err:
            raise SimStartError(
                "the settings cannot be simulated",
                whom=f"memory={memory}, devices={devices}",
                why=str(err.args[0]),
                remedy="give 0 bytes or more, and 1 to 16 devices",
            ) from err

    @property
    def family(self) -> str:
        """The chip's family, such as ``A3``."""
        return load_catalog().versions.soc(self.soc).family

    def environ(self) -> dict[str, str]:
        """Return the environment that gives a child process the same settings."""
        return {
            ENV_SOC: self.soc,
            ENV_CANN: self.cann,
            ENV_MEMORY: str(self.memory),
            ENV_DEVICES: str(self.devices),
        }
