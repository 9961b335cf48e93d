"""Helpers of the simulated NPU's own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python() -> Run:
    """Run Python code in a process of its own; extra keywords are environment variables."""

    def run(code: str, **environ: str | None) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        for name, value in environ.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture
def npu_device(npu_device):
    """The plugin's fixture, with internal formats allowed as hosts allow them.

    Lines up to 7.3 quietly make ND tensors of NZ ones unless a host says so.
    """
    import torch

    torch.npu.config.allow_internal_format = True
    return npu_device


@pytest.fixture
def torch_npu_installed() -> None:
    if find_spec("torch_npu") is None:
        pytest.skip("torch-npu is not installed: the simulated NPU runs the real one")
