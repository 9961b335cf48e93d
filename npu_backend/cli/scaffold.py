"""Write a plugin's distribution from templates: package data, filled with the standard library."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import sys
import tempfile
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from string import Template

from attrs import frozen
from packaging.utils import InvalidName, canonicalize_name

from npu_backend.errors import NpuBackendError
from npu_backend.registry import CORE_DISTRIBUTION, ENTRY_POINT_GROUP, PLUGIN_API

__all__ = ["KINDS", "Scaffold", "write_plugin"]

_WHAT = {
    "bmm": "a kernel for one of the batched matmuls",
    "path": "a preprocess path",
    "release": "a policy on which weights may go",
}
_RUNS = {
    "bmm": "\n`kernel.py` is what runs; it is imported when a layer is bound.",
    "path": "\n`path.py` is what runs; it is imported when a layer is bound.",
    "release": "",
}
KINDS = tuple(_WHAT)
"""Kinds of plugins that can be started: one a hook."""


@frozen
class Scaffold:
    """What was written.

    Args:
        folder: The distribution's folder.
        dist: Its canonical name.
        package: Its import package.
        name: Its entry point's name, which also begins its reason codes.
        kind: One of :data:`KINDS`.
        written: Files, relative to the folder, sorted.
    """

    folder: Path
    dist: str
    package: str
    name: str
    kind: str
    written: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "folder": str(self.folder),
            "dist": self.dist,
            "package": self.package,
            "name": self.name,
            "kind": self.kind,
            "api": PLUGIN_API,
            "files": list(self.written),
        }


def _refused(name: str, why: str, remedy: str) -> NpuBackendError:
    return NpuBackendError(
        f"no plugin is made with the name {name!r}",
        whom="npu-backend new-plugin",
        why=why,
        remedy=remedy,
    )


def _dist(name: str) -> str:
    """Return the canonical name, or refuse one that makes no distribution and package."""
    try:
        dist = str(canonicalize_name(name, validate=True))
    except InvalidName:
        raise _refused(
            name,
            "a distribution's name is letters, digits, '.', '-' and '_', and begins and ends with "
            "a letter or a digit",
            "give a name such as acme-npu",
        ) from None
    package = dist.replace("-", "_")
    if not package.isidentifier() or keyword.iskeyword(package):
        raise _refused(
            name, f"its package would be {package!r}, which cannot be imported", "give another name"
        )
    taken = {"npu_backend", "npu_backend_builtin", *sys.stdlib_module_names}
    if dist == CORE_DISTRIBUTION or package in taken:
        raise _refused(
            name,
            f"its package would be {package!r}, which there is already",
            "give a name of your own, such as acme-npu",
        )
    return dist


def write_plugin(name: str, *, kind: str = "bmm", directory: Path | None = None) -> Scaffold:
    """Write a distribution whose tests pass at once.

    Args:
        name: Name of the distribution; its package and entry point are called after it.
        kind: One of :data:`KINDS`.
        directory: Where to make its folder; default: here.

    Raises:
        NpuBackendError: The name makes no package, the folder is there and not empty, or it cannot
            be written. Nothing is left behind.
    """
    dist = _dist(name)
    package = dist.replace("-", "_")
    target = (directory or Path.cwd()) / dist
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NpuBackendError(
            f"{target} is there already",
            whom=f"npu-backend new-plugin {name}",
            why="it is not an empty folder, and nothing is overwritten",
            remedy="give another name or --directory, or remove it",
        )
    values = {
        "dist": dist,
        "package": package,
        "name": package,
        "strategy": package,
        "what": _WHAT[kind],
        "runs": _RUNS[kind],
        "version": metadata.version(CORE_DISTRIBUTION),
        "group": ENTRY_POINT_GROUP,
        "api": str(PLUGIN_API),
    }
    texts = {path: Template(text).substitute(values) for path, text in _templates(kind, package)}
    try:
        _write(target, texts)
    except OSError as err:
        raise NpuBackendError(
            f"{target} cannot be written",
            whom=f"npu-backend new-plugin {name}",
            why=f"{type(err).__name__}: {err}",
            remedy="give a --directory that can be written",
        ) from err
    return Scaffold(target, dist, package, package, kind, tuple(sorted(texts)))


def _templates(kind: str, package: str) -> list[tuple[str, str]]:
    root = files("npu_backend.cli") / "templates"
    found = []
    for folder in ("common", kind):
        for entry in (root / folder).iterdir():
            name = re.sub(r"\.tmpl$", "", entry.name)
            if folder == "common":
                path = name
            elif name.startswith("test_"):
                path = f"tests/{name}"
            else:
                path = f"src/{package}/{name}"
            found.append((path, entry.read_text(encoding="utf-8")))
    found.append((f"src/{package}/py.typed", ""))
    return found


def _write(target: Path, texts: dict[str, str]) -> None:
    """Write beside the target and move: all of it, or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        made.chmod(0o777 & ~_umask())
        for path, text in texts.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")
        made.replace(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
