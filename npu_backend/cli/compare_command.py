"""``npu-backend compare``: what differs between two plans and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from npu_backend.cli.output import print_json
from npu_backend.compare import Comparison, compare_plans
from npu_backend.errors import NpuBackendError

__all__ = ["command"]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise NpuBackendError(
            "the plan cannot be read",
            whom=str(path),
            why=f"{type(err).__name__}: {err}",
            remedy="write plans with npu-backend plan MODEL --json",
        ) from err


@click.command(name="compare")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(a: Path, b: Path, as_json: bool) -> int:
    """Compare two plans written by plan --json.

    Exits 1 where a prefill and a decode plan cannot share a KV cache; other differences are told
    and are no failure.
    """
    comparison = compare_plans(_read(a), _read(b), names=(str(a), str(b)))
    if as_json:
        print_json(comparison.to_dict())
    else:
        from npu_backend.cli.render import render_comparison

        render_comparison(comparison, str(a), str(b))
    return _exit_code(comparison)


def _exit_code(comparison: Comparison) -> int:
    return 1 if comparison.pair and not comparison.kv_agree else 0
