"""Brings up the simulated device: stand-ins first, then torch and torch_npu, then compute.

The order is the whole trick. The stand-in libraries are loaded globally under the SONAMEs that
torch_npu's libraries are linked against, so the loader resolves against them without any search
path; everything above them is the real torch_npu.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from attrs import define, field

from npu_backend.testing.sim.build import MAIN, Standins, build_standins
from npu_backend.testing.sim.elf import cann_symbols_missing
from npu_backend.testing.sim.errors import SimStartError
from npu_backend.testing.sim.settings import Settings, installed_torch_npu

__all__ = ["Simulation", "current", "start"]

_WHO = "the simulated NPU in this process"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@define
class Simulation:
    """A simulated NPU that is up. Its settings are fixed until the process ends.

    Attributes:
        settings: What is simulated.
        line: TorchNPU line of the installed package.
        standins: The libraries that stand in for CANN's.
        aten_ops: Number of aten ops that compute.
        npu_ops: Names of the ops that compute, ``npu::`` left out and ``_C_ascend::`` not.
    """

    settings: Settings
    line: str
    standins: Standins
    aten_ops: int = 0
    npu_ops: tuple[str, ...] = ()
    _main: Any = field(default=None, repr=False)
    # torch drops a library's kernels when its object dies.
    _libraries: list[Any] = field(factory=list, repr=False)

    def used_bytes(self, device: int = 0) -> int:
        """Return the bytes taken from a device's capacity: torch_npu's reserved blocks."""
        return int(self._main.npu_backend_sim_used(device))

    def refused_calls(self) -> int:
        """Return how many runtime calls were answered with "not simulated"."""
        return int(self._main.npu_backend_sim_refused())


_running: Simulation | None = None
_failed: SimStartError | None = None


def current() -> Simulation | None:
    """Return the simulation that is up in this process, or None."""
    return _running


def _foreign_libascendcl(own: Path) -> str | None:
    """Return the path of a loaded libascendcl that is not ours, or None."""
    try:
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Not Linux: nothing of CANN or torch_npu can be loaded there either.
        return None
    for found in re.findall(r"\s(/\S*libascendcl\.so\S*)", text):
        if Path(found).parent != own:
            return str(found)
    return None


def _torch_npu_libraries() -> list[Path]:
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        raise SimStartError(
            "torch-npu is not installed",
            whom=_WHO,
            why="its schemas, dispatcher and allocator are torch_npu's own",
            remedy='pip install "npu-backend[sim]", or torch-npu in the version to be tested',
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    return sorted([*folder.glob("_C*.so"), *folder.glob("lib/*.so")])


def _check_process(libraries: list[Path], standins: Standins) -> None:
    if "torch_npu" in sys.modules:
        raise SimStartError(
            "torch_npu is already imported",
            whom=_WHO,
            why="the stand-in libraries must be loaded before it",
            remedy="call npu_backend.testing.sim.start() before anything imports torch_npu; "
            f"with {_AUTOLOAD} unset, `import torch` imports it as well",
        )
    foreign = _foreign_libascendcl(standins.folder.resolve())
    if foreign:
        raise SimStartError(
            "another libascendcl is already loaded",
            whom=_WHO,
            why=f"{foreign} would answer instead of the stand-in, or beside it",
            remedy="start the simulation in a process that has not loaded CANN's libraries",
        )
    home = os.environ.get("ASCEND_HOME_PATH")
    if home and not Path(home).exists():
        raise SimStartError(
            "ASCEND_HOME_PATH names a folder that does not exist",
            whom=_WHO,
            why=f"torch_npu refuses to be imported with ASCEND_HOME_PATH={home}",
            remedy="unset ASCEND_HOME_PATH",
        )
    try:
        missing = cann_symbols_missing(standins.main, libraries)
    except (OSError, ValueError) as err:
        raise SimStartError(
            "the symbols of torch_npu's libraries cannot be read",
            whom=_WHO,
            why=str(err),
            remedy="reinstall torch-npu",
        ) from err
    if missing:
        raise SimStartError(
            "torch_npu needs CANN symbols that the stand-ins do not define",
            whom=f"torch-npu {installed_torch_npu()}",
            why=missing,
            remedy="add them to the stand-ins' C sources: with behaviour, or as refused",
        )


def _load(standins: Standins, settings: Settings) -> Any:
    main = ctypes.CDLL(str(standins.main), mode=ctypes.RTLD_GLOBAL)
    for path in standins.others:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    main.npu_backend_sim_configure.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_int,
    )
    main.npu_backend_sim_used.argtypes = (ctypes.c_int,)
    main.npu_backend_sim_used.restype = ctypes.c_uint64
    main.npu_backend_sim_refused.restype = ctypes.c_uint64
    code = main.npu_backend_sim_configure(
        settings.soc.encode(), settings.cann.encode(), settings.memory, settings.devices
    )
    if code:
        raise SimStartError(
            f"the stand-ins refuse the settings (error {code})",
            whom=str(settings),
            why="a name is longer than 63 characters, or there are more devices than 16",
            remedy="give other settings",
        )
    return main


def _import_torch_npu() -> Any:
    # Children inherit this: their plain `import torch` must not look for a device.
    os.environ[_AUTOLOAD] = "0"
    # Launch on the calling thread, so that what is not simulated raises where it was called.
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
    said = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.ExitStack() as after,
        contextlib.redirect_stdout(said),
    ):
        # torch_npu warns about files of a CANN installation, and prints to standard output.
        after.callback(_repeat, said)
        warnings.simplefilter("ignore")
        torch = importlib.import_module("torch")
        try:
            importlib.import_module("torch_npu")
        except Exception as err:
            raise SimStartError(
                "torch_npu cannot be imported on the stand-ins",
                whom=f"torch-npu {installed_torch_npu()}, torch {torch.__version__}",
                why=f"{type(err).__name__}: {err}",
                remedy="install a torch that this torch-npu was built for; "
                "if a symbol is named, the stand-ins lack it",
            ) from err
    return torch


def _repeat(said: io.StringIO) -> None:
    """Print what torch_npu said while it was imported, but for what is so because nothing of CANN
    is there."""
    for line in said.getvalue().splitlines():
        if "ASCEND_HOME_PATH" not in line:
            print(line, file=sys.stderr)


def _bring_up(torch: Any, settings: Settings) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in reversed(range(settings.devices)):
            try:
                torch.npu.set_device(index)
                # The first allocation makes the runtime's one-time settings; it is freed at once.
                torch.empty(1, device=f"npu:{index}")
            except RuntimeError as err:
                raise SimStartError(
                    f"device {index} does not come up on the stand-ins",
                    whom=f"{settings}, torch-npu {installed_torch_npu()}",
                    why=str(err).partition("\n")[0],
                    remedy="if a function is named, the stand-ins lack it for this chip; "
                    "take another chip or torch-npu package",
                ) from err
        torch.npu.empty_cache()
        for index in range(settings.devices):
            torch.npu.reset_peak_memory_stats(index)


def start(
    soc: str | None = None,
    cann: str | None = None,
    memory: int | None = None,
    devices: int | None = None,
    *,
    standins: Path | None = None,
) -> Simulation:
    """Bring up a simulated NPU in this process; again with equal settings it does nothing.

    Must run before torch_npu is imported. What is not given comes from ``NPU_BACKEND_SIM_SOC``,
    ``NPU_BACKEND_SIM_CANN``, ``NPU_BACKEND_SIM_MEMORY`` and ``NPU_BACKEND_SIM_DEVICES``, then from
    defaults: an A3 die with 64 GiB, and the CANN version paired with the installed torch-npu.

    A pass on it shows schemas, routing, limits, memory and lifetimes; not numerics or speed.

    Args:
        soc: Chip name such as ``Ascend910_9391``, or a family such as ``A3``.
        cann: CANN version such as ``9.1.0``.
        memory: Capacity of each device in bytes.
        devices: Number of devices.
        standins: Folder of stand-in libraries built elsewhere, instead of building them.

    Raises:
        SimBuildError: The stand-in libraries cannot be built.
        SimStartError: The device cannot be brought up in this process.
    """
    global _failed, _running
    if _running is not None:
        given = {"soc": soc, "cann": cann, "memory": memory, "devices": devices}
        same: dict[str, Any] = {
            k: getattr(_running.settings, k) if v is None else v for k, v in given.items()
        }
        wanted = Settings.resolve(**same)
        if wanted != _running.settings:
            raise SimStartError(
                "a simulated NPU with other settings is already up",
                whom=_WHO,
                why=[f"up: {_running.settings}", f"asked for: {wanted}"],
                remedy="use another process (pytest: @pytest.mark.npu(cann=..., soc=...) does)",
            )
        return _running
    if _failed is not None:
        # Libraries and half-imported modules cannot be taken back.
        raise _failed
    libraries = _torch_npu_libraries()
    settings = Settings.resolve(soc, cann, memory, devices)
    built = Standins(standins) if standins is not None else build_standins()
    if not built.main.exists():
        raise SimStartError(
            "the folder holds no stand-in libraries",
            whom=_WHO,
            why=f"{built.folder} has no {MAIN}",
            remedy="give the folder that npu_backend.testing.sim.build_standins() returned",
        )
    _check_process(libraries, built)
    from npu_backend.testing.sim.settings import installed_line

    simulation = Simulation(settings, installed_line(), built)
    try:
        simulation._main = _load(built, settings)
        torch = _import_torch_npu()
        _bring_up(torch, settings)
        from npu_backend.testing.sim import aten, kernels

        with warnings.catch_warnings():
            # Each registration over torch_npu's own kernel is announced; replacing is the point.
            warnings.simplefilter("ignore")
            library, simulation.aten_ops = aten.register()
            libraries_of_ops, simulation.npu_ops = kernels.register(simulation)
        simulation._libraries += [library, *libraries_of_ops]
    except SimStartError as err:
        _failed = err
        raise
    _running = simulation
    return simulation
