"""How the command line speaks: results on stdout, warnings and errors on stderr."""

from __future__ import annotations

import json
from typing import Any

import click

from npu_backend.errors import NpuBackendError

__all__ = ["print_error", "print_json", "print_warning"]


def print_json(data: Any) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(data, indent=1, ensure_ascii=True))


def print_warning(text: str) -> None:
    """Print a warning on stderr, also under ``--json``."""
    click.echo(f"warning: {text}", err=True)


def print_error(err: NpuBackendError, *, as_json: bool) -> None:
    """Print an error's four parts on stderr; under ``--json`` also one object on stdout."""
    click.echo(f"error: {err}", err=True)
    if as_json:
        print_json({"error": err.to_dict()})
