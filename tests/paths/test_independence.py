"""Paths, reference ops, the fp32 reference and the simulation share no helper, by their imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT, ROOT / "plugins")

GROUPS = {
    "paths": ["plugins/npu_backend_builtin/impl", "npu_backend/runtime/projections.py"],
    "reference ops": ["npu_backend/runtime/reference"],
    "fp32 reference": [
        f"npu_backend/runtime/prove/{name}.py"
        for name in ("mla_fp32", "attention", "writer", "kv", "seeded", "tolerance")
    ],
    "simulated kernels": ["npu_backend/testing/sim/kernels"],
}


def _files(places):
    for place in places:
        path = ROOT / place
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _module(path):
    base = ROOT / "plugins" if "plugins" in path.parts else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


MODULES = {name: {_module(f) for f in _files(places)} for name, places in GROUPS.items()}


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_imports_nothing_of_another(name):
    others = set().union(*(found for other, found in MODULES.items() if other != name))
    wrong = [
        (_module(path), module)
        for path in _files(GROUPS[name])
        for module in _imports(path)
        if module in others
    ]
    assert wrong == []


def test_the_groups_are_where_the_code_is():
    assert all(len(found) >= 6 for found in MODULES.values()), MODULES
    assert "npu_backend_builtin.impl.mlaprolog" in MODULES["paths"]
    assert "npu_backend.runtime.reference.prolog" in MODULES["reference ops"]
