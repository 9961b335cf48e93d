"""The tutorial's blocks, run in order in a fresh environment."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from .conftest import ROOT, Venv

TUTORIAL = (ROOT / "docs" / "tutorial-plugin.md").read_text("utf-8")
_BLOCK = re.compile(
    r"(?:^`(?P<file>[^`\n]+)`:\n\n)?^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```", re.M | re.S
)


def blocks() -> list[tuple[str | None, str, str]]:
    return [(m["file"], m["kind"].strip(), m["text"]) for m in _BLOCK.finditer(TUTORIAL)]


@pytest.fixture
def newcomer(tmp_path, core_wheel, core_needs):
    """npu-backend, pip and pytest; nothing that needs torch. pip builds without the network."""
    venv = Venv(tmp_path / "v", [*core_needs, "pip", "pytest", "hatchling"])
    venv.install(core_wheel)
    offline = "install --no-index --no-deps --no-build-isolation --disable-pip-version-check"
    scripts = {
        "pip": f'case "$1" in install) shift; set -- {offline} "$@";; esac\n'
        f'exec "{venv.python}" -m pip "$@"',
        "pytest": f'exec "{venv.python}" -m pytest "$@"',
    }
    for name, text in scripts.items():
        script = venv.bin / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    return venv


def test_every_block_of_the_tutorial_does_what_the_page_says(newcomer, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    environ = {
        **newcomer.environ,
        "COLUMNS": "200",
    }
    said, ran = "", 0
    for file, kind, text in blocks():
        if file is not None:
            path = work / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif kind.startswith("sh"):
            done = subprocess.run(
                ["sh", "-e", "-c", text], cwd=work, env=environ, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            said = done.stdout + done.stderr
            assert done.returncode == (2 if kind == "sh fails" else 0), f"{text}\n{said}"
            ran += 1
        else:
            assert kind == "text", kind
            for line in text.splitlines():
                assert line in said, f"{line!r} is not in:\n{said}"
    assert ran >= 8
    assert os.path.isdir(work / "no-bmm-on-a2")


def test_the_tutorial_forbids_torch_bmm_on_a2_with_a_hook_of_the_public_names():
    (plugin,) = [text for file, _, text in blocks() if file and file.endswith("__init__.py")]
    assert 'Forbid(strategy="torch.bmm"' in plugin
    assert '"A2"' in plugin
    assert len(plugin.splitlines()) <= 15
