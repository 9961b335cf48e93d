"""How long a plan takes: warm, by the number of layers, and cold beside ``import torch``.

Prints one figure a line; the last line of each part is the ratio that a budget is set on. Nothing
here is a test: timings depend on the machine, ratios of one run less so.

    python benchmarks/planning.py [--runs 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import npu_backend
from npu_backend import Deployment


def _median_ms(call: Callable[[], object], runs: int) -> float:
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def warm(runs: int) -> None:
    """A warm 78-layer plan with its fingerprint, and how it grows with the layers."""
    backend = npu_backend.load(third_party=False)
    deployment = Deployment(role="decode", soc="A3", cann="9.1.0")
    layers = npu_backend.read_model("glm-5.2", layers="0-77").layers
    sizes = (13, 26, 39, 78)
    medians = {
        n: _median_ms(lambda n=n: backend.plan(layers[:n], deployment).fingerprint, runs)
        for n in sizes
    }
    for n, figure in medians.items():
        print(f"warm plan, {n} layers: {figure:.2f} ms")
    print(f"warm plan, 78 layers (budget 10 ms): {medians[78]:.2f} ms")
    growth = medians[78] / medians[39]
    print(f"78 layers / 39 layers (linear: 2): {growth:.2f}")


def cold(runs: int) -> None:
    """``npu-backend plan`` against ``import torch``, in turn, each in a fresh process."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    plan = [sys.executable, "-m", "npu_backend", "plan", "glm-5.2", "--role", "decode", "--json"]
    torch = [sys.executable, "-c", "import torch"]
    ratios, plans, torches = [], [], []
    for index in range(runs + 1):
        figures = []
        for command in (plan, torch):
            start = time.perf_counter()
            subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
            figures.append(time.perf_counter() - start)
        if index:  # the first pair warms the file cache
            plans.append(figures[0])
            torches.append(figures[1])
            ratios.append(figures[0] / figures[1])
    print(f"cold plan: {statistics.median(plans):.3f} s")
    print(f"import torch: {statistics.median(torches):.3f} s")
    print(f"cold plan / import torch (budget 0.4): {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    warm(arguments.runs)
    cold(arguments.runs)
