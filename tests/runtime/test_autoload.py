"""Importing the runtime imports torch, also where torch-npu is installed and no driver is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_backend.runtime import _autoload

SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def _python(code, **env):
    kept = {k: v for k, v in os.environ.items() if k != SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**kept, **env},
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_runtime_imports_without_the_switch_and_leaves_the_environment_alone():
    code = f"import os, npu_backend.runtime, torch; print({SWITCH!r} in os.environ)"
    assert _python(code) == "False"


def test_a_switch_that_the_user_set_stays():
    code = f"import os, npu_backend.runtime; print(os.environ[{SWITCH!r}])"
    assert _python(code, **{SWITCH: "0"}) == "0"


@pytest.mark.parametrize("device", [True, False])
def test_with_a_device_backends_load_as_torch_does_it(device, monkeypatch, tmp_path):
    if device:
        (tmp_path / "davinci0").touch()
    seen = []
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(_autoload, "device_present", lambda: device)
    monkeypatch.setattr("builtins.__import__", lambda name: seen.append(os.environ.get(SWITCH)))
    _autoload.ensure_torch()
    monkeypatch.undo()
    assert seen == [None if device else "0"]
    assert SWITCH not in os.environ or os.environ[SWITCH]


def test_a_device_is_seen_by_its_file(tmp_path: Path):
    assert not _autoload.device_present(tmp_path)
    (tmp_path / "davinci_manager").touch()
    assert not _autoload.device_present(tmp_path)
    (tmp_path / "davinci3").touch()
    assert _autoload.device_present(tmp_path)
