"""``npu-backend doctor``: what this machine has and what that allows. Imports no torch."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import click

from npu_backend.api import load
from npu_backend.cli.device import c_compiler, device_nodes
from npu_backend.cli.output import print_json
from npu_backend.errors import DeploymentError
from npu_backend.plan import SCHEMA

__all__ = ["command"]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> int:
    """Tell what is installed, and what can be planned, run and proved with it."""
    backend = load()
    torch, torch_npu = _version("torch"), _version("torch-npu")
    line, line_note = None, None
    if torch_npu:
        try:
            line = backend.catalog.versions.line_of(torch_npu)
        except DeploymentError as err:
            line_note = err.what
    nodes, compiler = device_nodes(), c_compiler()
    allows = ["plan: needs nothing but this package"]
    if torch:
        allows.append(
            "run on the CPU reference: schemas of our own calls, routing, release, lifetimes"
        )
    else:
        allows.append("run: not possible; torch is not installed")
    if torch_npu and nodes:
        allows.append("run on the NPU")
    elif torch_npu and compiler:
        allows.append(
            "run on the simulated NPU: schemas, routing, limits, memory and lifetimes; no numerics "
            "and no speed of an NPU"
        )
    elif torch_npu:
        allows.append("run on the simulated NPU: not possible; no C compiler is found")
    else:
        allows.append("run on the simulated NPU: not possible; torch-npu is not installed")
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "npu_backend": _version("npu-backend"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch,
        "torch_npu": torch_npu,
        "line": line,
        "line_note": line_note,
        "npu_device_nodes": nodes,
        "c_compiler": compiler,
        "catalog": backend.catalog.version,
        "newest_cann": backend.catalog.versions.newest_cann,
        "plugins": [dict(p) for p in backend.plugins],
        "allows": allows,
    }
    if as_json:
        print_json(data)
    else:
        from npu_backend.cli.render import render_doctor

        render_doctor(data)
    return 0
