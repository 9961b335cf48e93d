"""A pytest plugin: fixtures and a marker for tests on a simulated NPU.

* ``npu_sim``: the simulation of this process, up.
* ``npu_device``: ``torch.device("npu", 0)`` on it.
* ``@pytest.mark.npu(soc=..., cann=..., memory=..., devices=...)``: the settings that a test needs.
  Where they are not the process's own, or with ``isolated=True``, the test runs in a child process.

The process's own settings come from ``NPU_BACKEND_SIM_SOC``, ``_CANN``, ``_MEMORY`` and
``_DEVICES``. Tests are skipped only where torch-npu is not installed. Loading the plugin imports
neither torch nor anything of the simulation.
"""

from __future__ import annotations

from collections.abc import Generator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from npu_backend.testing.sim import Settings, Simulation

__all__ = ["npu_device", "npu_sim"]

_REPORT_OPTION = "--npu-sim-report"
_ARGUMENTS = ("soc", "cann", "memory", "devices")
_ABSENT = "torch-npu is not installed: the simulated NPU runs the real one on stand-ins for CANN"

_settings_key: pytest.StashKey[Settings] = pytest.StashKey()
_reports_key: pytest.StashKey[dict[str, list[pytest.TestReport]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("npu-backend")
    group.addoption(
        _REPORT_OPTION,
        metavar="FILE",
        help="internal: where a test process of its own writes its reports",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "npu(soc=None, cann=None, memory=None, devices=None, isolated=False): run on a simulated "
        "NPU with these settings, in a process of its own where they differ from this process's.",
    )


def _has_torch_npu() -> bool:
    return find_spec("torch_npu") is not None


def _arguments(item: pytest.Item) -> dict[str, Any] | None:
    """Return the merged arguments of a test's ``npu`` markers, or None without one."""
    markers = list(item.iter_markers("npu"))
    if not markers:
        return None
    merged: dict[str, Any] = {}
    for marker in reversed(markers):  # the nearest one last, so that it wins
        unknown = sorted(set(marker.kwargs) - {*_ARGUMENTS, "isolated"})
        if marker.args or unknown:
            raise pytest.UsageError(
                f"{item.nodeid}: the npu marker takes the keywords "
                f"{', '.join(_ARGUMENTS)} and isolated; got {marker.args or unknown}"
            )
        merged.update(marker.kwargs)
    return merged


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Resolve each marked test's settings once, so that a wrong marker fails the collection."""
    marked = [(item, found) for item in items if (found := _arguments(item)) is not None]
    if not marked or not _has_torch_npu():
        return
    from npu_backend.testing.sim import Settings, SimStartError

    for item, found in marked:
        try:
            settings = Settings.resolve(**{k: v for k, v in found.items() if k != "isolated"})
        except SimStartError as err:
            raise pytest.UsageError(f"{item.nodeid}: {err}") from err
        item.stash[_settings_key] = settings


def _needs_own_process(item: pytest.Item) -> bool:
    settings = item.stash.get(_settings_key, None)
    if settings is None or item.config.getoption(_REPORT_OPTION):
        return False
    if (_arguments(item) or {}).get("isolated"):
        return True
    from npu_backend.testing import sim

    running = sim.current()
    return settings != (running.settings if running else sim.Settings.resolve())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with settings of its own, and its kin, in a child process."""
    if not _needs_own_process(item):
        return None
    from npu_backend.testing.isolation import plain, run_group

    known = item.session.stash.setdefault(_reports_key, {})
    if item.nodeid not in known:
        settings = item.stash[_settings_key]
        kin = [
            other
            for other in item.session.items
            if other.nodeid not in known
            and other.stash.get(_settings_key, None) == settings
            and _needs_own_process(other)
        ]
        known.update(run_group(kin, settings.environ(), plain(settings)))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in known[item.nodeid]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The item before left set up what this item would have shared; the next may not share it.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not _has_torch_npu() and item.get_closest_marker("npu") is not None:
        pytest.skip(_ABSENT)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a child process: hand each report to the parent."""
    if _child is not None:
        from npu_backend.testing.isolation import write_report

        write_report(*_child, report)


_child: tuple[pytest.Config, str] | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    global _child
    path = session.config.getoption(_REPORT_OPTION)
    _child = (session.config, str(path)) if path else None


@pytest.fixture
def npu_sim(request: pytest.FixtureRequest) -> Simulation:
    """The simulated NPU of this process, up; skips where torch-npu is not installed."""
    if not _has_torch_npu():
        pytest.skip(_ABSENT)
    from npu_backend.testing import sim

    running = sim.current()
    if running is not None:
        return running
    found = _arguments(request.node) or {}
    return sim.start(**{key: value for key, value in found.items() if key != "isolated"})


@pytest.fixture
def npu_device(npu_sim: Simulation) -> Generator[torch.device, None, None]:
    """``torch.device("npu", 0)``; unused blocks go back to the device after the test."""
    import torch

    yield torch.device("npu", 0)
    torch.get_device_module("npu").empty_cache()
