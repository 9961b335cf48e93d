"""Runs tests in another process and brings their reports back.

A simulated NPU's settings are fixed for a process, so tests with other settings run in a child.
Tests with equal settings share one child. The child writes each report as it is made; a child that
dies costs the test it died in, and the rest of its group runs in a new one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["REPORT_OPTION", "run_group", "write_report"]

REPORT_OPTION = "--npu-sim-report"
_TAKING_A_VALUE = ("-p", "-W", "-o", "--override-ini")
_PLUGIN = "npu_backend.testing.plugin"


def write_report(config: pytest.Config, path: str, report: pytest.TestReport) -> None:
    """Append a report to the file that the parent reads; called in the child."""
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    with Path(path).open("a", encoding="utf-8") as out:
        out.write(json.dumps(data) + "\n")


def _read_reports(config: pytest.Config, path: Path) -> dict[str, list[pytest.TestReport]]:
    reports: dict[str, list[pytest.TestReport]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        if isinstance(report.longrepr, list):
            # A skip's (path, line, reason); JSON knows no tuples, pytest insists on one.
            report.longrepr = tuple(report.longrepr)
        reports.setdefault(report.nodeid, []).append(report)
    return reports


def _forwarded(config: pytest.Config) -> list[str]:
    """Return the options that decide how tests are found and loaded."""
    given = [str(argument) for argument in config.invocation_params.args]
    out: list[str] = []
    for index, argument in enumerate(given):
        if argument in _TAKING_A_VALUE:
            out += given[index : index + 2]
        elif argument.startswith((*_TAKING_A_VALUE, "--import-mode", "--strict")):
            out.append(argument)
    plugin = config.pluginmanager.get_plugin(_PLUGIN)
    if plugin is not None and _PLUGIN not in out and f"-p{_PLUGIN}" not in out:
        # Known under its module's name, so it came from a conftest or -p, not from an entry point.
        out += ["-p", _PLUGIN]
    return out


def _argument(item: pytest.Item) -> str:
    """Return what names an item on a command line, also where it lies outside the root folder."""
    return f"{item.path}::{item.nodeid.partition('::')[2]}"


def _run_child(
    config: pytest.Config, nodeids: Sequence[str], environ: Mapping[str, str]
) -> tuple[dict[str, list[pytest.TestReport]], str]:
    """Run node ids in a child; return its reports and, if it did not end well, its last words."""
    with tempfile.TemporaryDirectory(prefix="npu-backend-") as folder:
        path = Path(folder) / "reports.jsonl"
        path.touch()
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(config.rootpath)]
        command += ["-c", str(config.inipath)] if config.inipath else []
        command += [*_forwarded(config), "-p", "no:cacheprovider", REPORT_OPTION, str(path)]
        done = subprocess.run(
            [*command, *nodeids],
            cwd=config.rootpath,
            env={**os.environ, **environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        reports = _read_reports(config, path)
    if done.returncode in (0, 1):
        return reports, ""
    if done.returncode < 0:
        how = f"was ended by {signal.Signals(-done.returncode).name}"
    else:
        how = f"ended with exit code {done.returncode}"
    tail = "\n".join((done.stdout + "\n" + done.stderr).splitlines()[-60:])
    return reports, f"the test's process {how}\n{tail}"


def _is_complete(reports: Sequence[pytest.TestReport]) -> bool:
    return any(report.when == "teardown" for report in reports)


def _failure(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when="call",
    )


def run_group(
    items: Sequence[pytest.Item], environ: Mapping[str, str], title: str
) -> dict[str, list[pytest.TestReport]]:
    """Run items with equal settings in a child process.

    Args:
        items: The items, at least one.
        environ: The environment variables that give the settings.
        title: The settings in words, added to each report.

    Returns:
        The reports of every item by node id.
    """
    config = items[0].config
    out: dict[str, list[pytest.TestReport]] = {}
    waiting = list(items)
    while waiting:
        reports, last_words = _run_child(config, [_argument(item) for item in waiting], environ)
        unfinished: list[pytest.Item] = []
        for item in waiting:
            found = reports.get(item.nodeid, [])
            if _is_complete(found):
                out[item.nodeid] = found
            else:
                unfinished.append(item)
        if not unfinished:
            break
        reason = last_words or "the test's process made no report of it"
        # A child that ran nothing (it could not collect) would do the same again.
        lost = unfinished[:1] if reports else unfinished
        for item in lost:
            partial = [r for r in reports.get(item.nodeid, []) if r.when != "call"]
            out[item.nodeid] = [*partial, _failure(item, f"{title}\n{reason}")]
        waiting = unfinished[len(lost) :]
    for found in out.values():
        for report in found:
            report.sections.append(("simulated NPU, in a process of its own", title))
    return out


def plain(value: Any) -> str:
    """Return settings in words."""
    names = ("soc", "cann", "memory", "devices")
    return ", ".join(f"{name}={getattr(value, name)}" for name in names)
