"""SGLang's workers, each in a process of its own: alone, and with npu-backend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

WORLD = Path(__file__).parents[1]
ALONE, PLANNED = "none", "npu_backend"
"""What ``SGLANG_PLUGINS`` lets in. The plugin is installed in both."""

Results = Mapping[str, Mapping[str, Any]]


def _start(soc: str, plugins: str, folder: Path) -> subprocess.Popen[bytes]:
    ours = ("SGLANG_", "NPU_BACKEND_")
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) or name == "NPU_BACKEND_SIM_CACHE"
    }
    environ |= {"PYTHONPATH": str(WORLD), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-m", "sglang_world.worker", soc, plugins, str(folder / plugins)]
    with (folder / f"{plugins}.log").open("wb") as log:
        # Not in the checkout, whose packages would then come before the installed ones.
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Results, Results]]:
    """Return ``run(chip) -> (alone, planned)``: every case of the chip by its name."""
    done: dict[str, tuple[Results, Results]] = {}

    def both(soc: str) -> tuple[Results, Results]:
        if soc not in done:
            folder = tmp_path_factory.mktemp(soc)
            workers = {plugins: _start(soc, plugins, folder) for plugins in (ALONE, PLANNED)}
            for plugins, worker in workers.items():
                assert worker.wait(900) == 0, (folder / f"{plugins}.log").read_text()[-4000:]
            alone, planned = (torch.load(folder / p, weights_only=False) for p in workers)
            done[soc] = alone, planned
        return done[soc]

    return both


@pytest.fixture
def pair(run: Callable[[str], tuple[Results, Results]], case: Any) -> tuple[Any, Any]:
    """What a case left, alone and planned."""
    alone, planned = run(case.soc)
    for found in (alone[case.name], planned[case.name]):
        assert "failed" not in found, found["failed"]
    return alone[case.name], planned[case.name]
