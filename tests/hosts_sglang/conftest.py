"""SGLang as a host, on its own released code. Not collected where that release is not installed."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VERSION = "0.5.23"

sys.path.insert(0, str(HERE))


def _left_out() -> str | None:
    """Return why nothing here is collected, or None."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return f"SGLang {VERSION} is not installed"
    return None if found == VERSION else f"SGLang is {found}, these tests read {VERSION}"


LEFT_OUT = _left_out()
collect_ignore_glob = ["*"] if LEFT_OUT else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line that these tests did not run."""
    if LEFT_OUT:
        terminalreporter.write_line(f"tests/hosts_sglang left out: {LEFT_OUT}; see tox -e sglang")
