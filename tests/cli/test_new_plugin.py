"""``new-plugin``: what it writes, and what it refuses. That the tests of what it writes pass is
shown on really installed distributions, in tests/installed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from npu_backend.cli.scaffold import KINDS, write_plugin
from npu_backend.errors import NpuBackendError


def new_plugin(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "npu_backend", "new-plugin", *args],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_every_placeholder_is_filled_and_every_module_parses(tmp_path, kind):
    made = write_plugin("Acme_NPU", kind=kind, directory=tmp_path)
    assert (made.folder, made.dist, made.package) == (tmp_path / "acme-npu", "acme-npu", "acme_npu")
    found = {str(p.relative_to(made.folder)) for p in made.folder.rglob("*") if p.is_file()}
    assert found == set(made.written)
    assert {"pyproject.toml", "tox.ini", "README.md", "tests/test_conformance.py"} <= found
    for path in made.written:
        text = (made.folder / path).read_text("utf-8")
        assert "$" not in text
        if path.endswith(".py"):
            ast.parse(text)
    project = (made.folder / "pyproject.toml").read_text()
    assert '[project.entry-points."npu_backend.plugins"]\nacme_npu = "acme_npu"' in project
    assert f'"npu-backend>={metadata.version("npu-backend")}"' in project
    assert "plugin API" in project


def test_a_generated_selection_imports_no_torch(tmp_path):
    for kind in KINDS:
        write_plugin(f"acme-{kind}", kind=kind, directory=tmp_path)
    code = "import acme_bmm, acme_path, acme_release, sys; sys.exit('torch' in sys.modules)"
    path = os.pathsep.join(str(tmp_path / f"acme-{kind}" / "src") for kind in KINDS)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize(
    "name, why",
    [
        ("npu-backend", "which there is already"),
        ("json", "which there is already"),
        ("acme npu", "a distribution's name is letters"),
        ("-acme", "a distribution's name is letters"),
        ("1acme", "cannot be imported"),
        ("class", "cannot be imported"),
        ("", "a distribution's name is letters"),
    ],
)
def test_a_name_that_makes_no_package_is_refused(tmp_path, name, why):
    with pytest.raises(NpuBackendError) as caught:
        write_plugin(name, directory=tmp_path)
    assert why in caught.value.why[0]
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "acme-npu").mkdir()
    (tmp_path / "acme-npu" / "mine").write_text("mine")
    with pytest.raises(NpuBackendError, match="is there already"):
        write_plugin("acme-npu", directory=tmp_path)
    assert [p.name for p in (tmp_path / "acme-npu").iterdir()] == ["mine"]


def test_an_empty_folder_is_taken_and_a_missing_one_made(tmp_path):
    (tmp_path / "acme-npu").mkdir()
    assert write_plugin("acme-npu", directory=tmp_path).folder.is_dir()
    assert write_plugin("acme-npu", directory=tmp_path / "a" / "b").folder.is_dir()


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    import npu_backend.cli.scaffold as scaffold

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scaffold.Path, "write_text", full)
    with pytest.raises(NpuBackendError, match="cannot be written") as caught:
        write_plugin("acme-npu", directory=tmp_path)
    assert "No space left" in caught.value.why[0]
    assert list(tmp_path.iterdir()) == []


def test_the_command_tells_what_it_made_and_what_comes_next(tmp_path):
    done = new_plugin("acme-npu", "--directory", str(tmp_path))
    assert "src/acme_npu/kernel.py" in done.stdout
    assert f"pip install -e {tmp_path / 'acme-npu'}" in done.stdout
    again = new_plugin("acme-npu", "--directory", str(tmp_path), "--json", code=2)
    assert "is there already" in json.loads(again.stdout)["error"]["what"]
    made = json.loads(
        new_plugin("acme-path", "--kind", "path", "--directory", str(tmp_path), "--json").stdout
    )
    assert (made["kind"], made["api"]) == ("path", 1)
