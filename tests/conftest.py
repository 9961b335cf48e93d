"""What every test shares. Plain ``import torch`` must work with torch-npu installed and no CANN."""

from __future__ import annotations

import os
from importlib import metadata

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
