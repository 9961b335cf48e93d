"""What every test shares. Plain ``import torch`` must work with torch-npu installed and no CANN."""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec

import pytest
from hypothesis import settings

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header() -> str:
    """Which torch and torch-npu these tests run on, and what the installed line is paired with."""
    from npu_backend.catalog import load_catalog

    try:
        torch, torch_npu = metadata.version("torch"), metadata.version("torch-npu")
    except metadata.PackageNotFoundError as absent:
        return f"{absent}: tests that need it are skipped"
    versions = load_catalog().versions
    line = versions.line_of(torch_npu)
    return (
        f"torch {torch}, torch_npu {torch_npu}, TorchNPU line {line}, "
        f"simulated CANN {versions.paired_cann(line)}"
    )


@pytest.fixture(autouse=True)
def _needed_line(request: pytest.FixtureRequest) -> None:
    """Skip a test marked ``needs_line("26.0")`` where the installed torch-npu is older."""
    marker = request.node.get_closest_marker("needs_line")
    if marker is not None and find_spec("torch_npu") is not None:
        from npu_backend.catalog import load_catalog
        from npu_backend.testing.sim.settings import installed_line

        order, line = load_catalog().versions.line_order, installed_line()
        if order(line) < order(marker.args[0]):
            pytest.skip(f"torch-npu of line {line} is older than line {marker.args[0]}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_line(line): skip on older TorchNPU lines")
