"""Where a suite runs: the CPU references, simulated NPUs, and a real one where there is one."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest
from attrs import evolve, frozen

from npu_backend.api import installed_torch_npu
from npu_backend.catalog import load_catalog
from npu_backend.deployment import Deployment
from npu_backend.testing.hardware import bring_up, device_nodes
from npu_backend.testing.sim.settings import DEFAULT_SOC, Settings

__all__ = ["DEVICES", "Place", "everywhere", "home_of", "opened", "others_of", "parameter"]

DEVICES = ("cpu", "sim", "npu")
"""Kinds of places; of these ``npu`` counts only where there is a real one."""


SIMULATED = ("A2", "A3", "A5")
"""Chip families that the simulated NPU brings up; offers on others are asked and not run."""


@frozen
class Place:
    """A device with the chip and CANN version that is planned for.

    Args:
        device: ``cpu``, ``sim`` or ``npu``.
        soc: Chip family.
        cann: CANN release.
    """

    device: str
    soc: str
    cann: str

    def __str__(self) -> str:
        return f"{self.device}-{self.soc}-{self.cann}"

    def deployment(self, **options: Any) -> Deployment:
        """Return the deployment at this place, of the installed torch-npu where there is one."""
        said = {"soc": self.soc, "cann": self.cann, "torch_npu": installed_torch_npu(), **options}
        return Deployment(**said)

    @property
    def torch_device(self) -> str:
        """What torch calls it."""
        return "cpu" if self.device == "cpu" else "npu:0"


def _own() -> tuple[str, str]:
    """Return family and CANN of this process's simulated NPU, or the newest without torch-npu."""
    versions = load_catalog().versions
    if find_spec("torch_npu") is None:
        return versions.soc(DEFAULT_SOC).family, versions.newest_cann
    settings = Settings.resolve()
    return settings.family, versions.known_cann(settings.cann)[0]


def everywhere() -> tuple[tuple[str, str], ...]:
    """Return (family, CANN) of every chip and release in the catalog; this process's own first,
    then its family, the newest release first."""
    versions = load_catalog().versions
    own = _own()
    families = sorted(versions.socs, key=lambda f: f != own[0])
    found = [(family, cann) for family in families for cann in reversed(versions.cann)]
    return (own, *(p for p in found if p != own)) if own in found else tuple(found)


def home_of(offered: Iterable[tuple[str, str]], devices: Iterable[str]) -> tuple[Place, ...]:
    """Return where the ordinary tests run: the first place where something is offered, on the CPU
    and on a simulated NPU, or on a real NPU in place of the latter."""
    first = next((p for p in offered if p[0] in SIMULATED), None)
    if first is None:
        return ()
    chosen = list(dict.fromkeys(devices))
    if "npu" in chosen and device_nodes():
        if "sim" in chosen:
            chosen.remove("sim")
    elif "npu" in chosen:
        chosen.remove("npu")
    if "sim" in chosen and find_spec("torch_npu") is None and "cpu" in chosen:
        chosen.remove("sim")
    return tuple(Place(device, *first) for device in chosen)


def others_of(offered: Iterable[tuple[str, str]]) -> tuple[Place, ...]:
    """Return the simulated NPUs on which stability is shown: every CANN release of the first family
    where something is offered, and the first release of each other family."""
    kept: list[tuple[str, str]] = []
    for family, cann in offered:
        if family not in SIMULATED:
            continue
        if not kept or family == kept[0][0] or all(family != f for f, _ in kept):
            kept.append((family, cann))
    return tuple(Place("sim", *place) for place in kept)


def parameter(place: Place, *values: Any, id: str) -> Any:
    """Return a pytest parameter that runs at a place, in a process of its own where needed."""
    marks = []
    if place.device == "sim":
        marks.append(pytest.mark.npu(soc=place.soc, cann=place.cann, isolated=bool(device_nodes())))
    return pytest.param(place, *values, id=id, marks=marks)


def opened(place: Place, request: pytest.FixtureRequest) -> Place:
    """Bring a place's device up; return the place as it is: a real NPU says what it is itself."""
    if place.device == "cpu":
        return place
    if place.device == "sim":
        request.getfixturevalue("npu_device")
        import torch

        npu: Any = torch.npu  # type: ignore[attr-defined]
        npu.config.allow_internal_format = True  # as hosts do: lines up to 7.3 need it for NZ
        return place
    soc, cann = bring_up()
    versions = load_catalog().versions
    return evolve(place, soc=versions.soc(soc).family, cann=versions.known_cann(cann)[0])
