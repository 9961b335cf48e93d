"""Compare the schemas of installed ops with the catalog's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from npu_backend.catalog import Catalog
from npu_backend.errors import SchemaMismatchError

__all__ = ["catalog_schemas", "check_schemas", "installed_schemas"]


def catalog_schemas(catalog: Catalog, op: str, line: str, library: str) -> tuple[str, ...] | None:
    """Return the schemas that the catalog holds for an op, or None where it knows no such op.

    An empty tuple: the op exists, its schema is not recorded.
    """
    found = catalog.schemas_of(line).get(op)
    if found:
        return tuple(found)
    supplied = catalog.schemas["libraries"].get(library, {"ops": {}})["ops"]
    return tuple(supplied[op]) if op in supplied else None


def installed_schemas(op: str) -> tuple[Any, ...]:
    """Return the schemas that the process has registered under ``namespace::name``."""
    return tuple(torch._C._jit_get_schemas_for_operator(op))


def check_schemas(
    names: Iterable[str], *, catalog: Catalog, line: str, library: str, whom: str
) -> None:
    """Check that each op is registered with the schema that the catalog holds for the line.

    Overloads that only the installed package has do no harm and are not looked at. An op that the
    catalog does not know, such as a vendor's own, need only be there.

    Raises:
        SchemaMismatchError: An op is absent, or one of its overloads differs.
    """
    for op in names:
        space = op.partition("::")[0]
        expected = catalog_schemas(catalog, op, line, library)
        installed = installed_schemas(op)
        told = "; ".join(str(s) for s in installed) or "absent"
        if not installed:
            raise _mismatch(op, "is planned and not installed", expected, told, line, whom)
        for text in expected or ():
            wanted = torch._C.parse_schema(f"{space}::{text}")
            if wanted not in installed:
                raise _mismatch(op, "has another schema", (text,), told, line, whom)


def _mismatch(
    op: str, what: str, expected: tuple[str, ...] | None, installed: str, line: str, whom: str
) -> SchemaMismatchError:
    catalogued = "; ".join(expected) if expected else "not recorded"
    return SchemaMismatchError(
        f"{op} {what} (TorchNPU line {line})",
        whom=whom,
        why=(f"catalog, line {line}: {catalogued}", f"installed: {installed}"),
        remedy="install the packages that the plan was made for, plan with --torch-npu and "
        "--kernels as installed, or correct the catalog with --catalog FILE",
        code="op.missing" if installed == "absent" else "library.version",
    )
