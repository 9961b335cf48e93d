"""500 and more random lives of a layer: equal to a never-released twin, or a named error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sequences.py")


def _run(log, seed, count, device):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--seed", str(seed), "--count", str(count),
         "--device", device, "--log", str(log)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )  # fmt: skip
    last = log.read_text("utf-8").splitlines()[-1] if log.exists() else "none"
    assert done.returncode == 0, f"last sequence: {last}\n{done.stderr[-3000:]}"
    assert f"ok {count} sequences" in done.stdout
    return done.stdout


@pytest.mark.parametrize("seed", range(5))
def test_on_the_cpu(tmp_path, seed):
    out = _run(tmp_path / "lives.log", seed, 110, "cpu")
    # Not every sequence may end in a refusal at once, and some must.
    assert "WeightReleasedError" in out
    assert "PrepareError" in out


@pytest.mark.npu
def test_on_the_simulated_npu_no_byte_drifts(npu_device, tmp_path):
    _run(tmp_path / "lives.log", 77, 30, "sim")
