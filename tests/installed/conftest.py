"""Really installed distributions: wheels in fresh environments, without the network.

A fresh environment gets its dependencies from the running one, as links to exactly the
distributions that it needs: neither npu-backend itself nor anything else leaks into it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def _closure(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the named distributions and all that they require, as far as they are installed."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = str(canonicalize_name(waiting.pop()))
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # needed on another Python or system only; a real lack shows when it runs
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def _link(names: Iterable[str], folder: Path) -> None:
    for distribution in _closure(names).values():
        tops = {Path(str(f)).parts[0] for f in distribution.files or ()}
        for top in sorted(tops - {"..", "__pycache__"}):
            target = Path(str(distribution.locate_file(top)))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


class Venv:
    """A fresh environment."""

    def __init__(self, folder: Path, needs: Iterable[str]) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        links = folder / "links"
        links.mkdir()
        _link(needs, links)
        (site / "links.pth").write_text(f"{links}\n")

    @property
    def environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NPU_BACKEND_"))}
        # Coverage of this run is none of the environment's.
        kept = {k: v for k, v in kept.items() if not k.startswith("COVERAGE")}
        if cache := os.environ.get("NPU_BACKEND_SIM_CACHE"):
            kept["NPU_BACKEND_SIM_CACHE"] = cache
        path = os.pathsep.join([str(self.bin), kept.get("PATH", "")])
        return {**kept, "PATH": path, "VIRTUAL_ENV": str(self.bin.parent)}

    def run(
        self, *args: str, code: int | None = 0, cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.bin / args[0]), *args[1:]],
            cwd=cwd or self.bin.parent,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert code is None or done.returncode == code, done.stdout[-6000:] + done.stderr[-6000:]
        return done

    def json(self, *args: str, code: int = 0, **environ: str) -> dict[str, Any]:
        return json.loads(self.run("npu-backend", *args, "--json", code=code, **environ).stdout)

    def pip(self, *args: str) -> None:
        """Run the running environment's pip on this one, offline."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *args]
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *wheels: Path) -> None:
        self.pip("install", "-q", "--no-index", "--no-deps", *map(str, wheels))

    def uninstall(self, *names: str) -> None:
        self.pip("uninstall", "-q", "-y", *names)


def build(source: Path, folder: Path) -> Path:
    """Build a wheel with the running environment's hatchling."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = set(folder.glob("*.whl")) - before
    return made


def make_wheel(
    folder: Path,
    name: str,
    files: Mapping[str, str],
    entry_points: Mapping[str, str],
    *,
    version: str = "1.0",
    group: str = "npu_backend.plugins",
) -> Path:
    """Write a pure wheel by hand: what a vendor might publish, faults included."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    told = "\n".join(f"{key} = {value}" for key, value in entry_points.items())
    texts = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{group}]\n{told}\n",
    }
    texts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"])
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        for path, text in texts.items():
            out.writestr(path, text)
    return wheel


@pytest.fixture(scope="session")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("hatchling", "pip"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed: wheels are built and installed with it")
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="session")
def core_wheel(wheel_folder: Path) -> Path:
    return build(ROOT, wheel_folder)


@pytest.fixture(scope="session")
def example_wheel(wheel_folder: Path) -> Path:
    return build(ROOT / "plugins" / "vendor-bmm-example", wheel_folder)


@pytest.fixture(scope="session")
def core_needs() -> list[str]:
    """What npu-backend requires without extras."""
    return [
        r.name
        for r in map(Requirement, metadata.requires("npu-backend") or ())
        if r.marker is None or r.marker.evaluate({"extra": ""})
    ]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory, core_wheel: Path, core_needs: list[str]) -> Venv:
    """npu-backend from its wheel in a fresh environment, without torch."""
    made = Venv(tmp_path_factory.mktemp("venv") / "v", core_needs)
    made.install(core_wheel)
    return made


MakeWheel = Callable[..., Path]
