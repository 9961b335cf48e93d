"""The references are the catalog's ops, and nobody's helpers but their own."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import npu_backend
from npu_backend.runtime import reference

PACKAGE = Path(reference.__file__).parent
ROOT = Path(npu_backend.__file__).parent

ALLOWED = {
    "__future__",
    "collections.abc",
    "typing",
    "torch",
    "npu_backend.catalog",
    "npu_backend.model.weights",
}
"""formats.py asks the model's own rule (nz_castable); all else is arithmetic of its own."""


def imports_of(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively"
            names.add(node.module or "")
    return names


def schemas_of(op: str) -> list[str]:
    """Return the schemas of an op without an overload's name, of the newest line or of
    sgl-kernel-npu; an op may be registered twice."""
    data = json.loads((ROOT / "catalog" / "data" / "schemas.json").read_text())
    newest = list(data["lines"].values())[-1]["ops"]
    found = newest.get(op) or data["libraries"]["sgl-kernel-npu"]["ops"][op]
    return [schema for schema in found if "." not in schema.partition("(")[0]]


def arguments_of(schema: str) -> list[tuple[str, bool, bool]]:
    """Return (name, keyword only, has default) of each argument."""
    inside = re.search(r"\((.*)\) -> ", schema).group(1)
    out, keyword_only = [], False
    for part in re.split(r",\s*", inside):
        if part == "*":
            keyword_only = True
            continue
        name = part.split(" ")[-1].split("=")[0]
        out.append((name, keyword_only, "=" in part))
    return out


@pytest.mark.parametrize("op", sorted(reference.REFERENCES))
def test_a_reference_has_the_parameters_of_its_op(op):
    parameters = inspect.signature(reference.REFERENCES[op]).parameters.values()
    mine = [(p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty) for p in parameters]
    assert mine in [arguments_of(schema) for schema in schemas_of(op)]


@pytest.mark.parametrize("op", sorted(reference.REFERENCES))
def test_a_reference_has_the_defaults_of_its_op(op):
    schema = schemas_of(op)[0]
    for p in inspect.signature(reference.REFERENCES[op]).parameters.values():
        if p.default is p.empty:
            continue
        told = re.search(rf" {p.name}=([^,)]+)", schema).group(1).strip("\"'")
        if isinstance(p.default, float):
            assert float(told) == p.default
        else:
            assert told == str(p.default)


@pytest.mark.parametrize("file", sorted(p.name for p in PACKAGE.glob("*.py")))
def test_references_import_nothing_of_the_paths_or_of_the_proofs(file):
    foreign = {
        name
        for name in imports_of(PACKAGE / file)
        if name not in ALLOWED and not name.startswith("npu_backend.runtime.reference")
    }
    assert not foreign


def test_the_fp32_layer_reference_imports_torch_alone():
    prove = ROOT / "runtime" / "prove"
    for file in ("mla_fp32.py", "attention.py"):
        foreign = {n for n in imports_of(prove / file) if not n.startswith(("torch", "__future__"))}
        assert foreign <= {"attrs", "collections.abc", "typing", "math"}, file


def test_the_paths_import_nothing_of_the_references_but_through_the_facade():
    paths = ROOT.parent / "plugins" / "npu_backend_builtin"
    for file in paths.rglob("*.py"):
        for name in imports_of(file):
            assert not name.startswith("npu_backend.runtime.reference"), file
            assert not name.startswith("npu_backend.runtime.prove"), file
