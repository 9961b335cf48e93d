"""Write the op schemas of the installed torch_npu into the catalog, under its TorchNPU line.

    python tools/regenerate_schemas.py          # rewrites npu_backend/catalog/data/schemas.json
    python tools/regenerate_schemas.py --check  # exits 1 and tells what differs

torch_npu is loaded on the simulated NPU, so no CANN and no device are needed. A text of the catalog
that parses to the installed schema is kept as it is: torch prints defaults in another form than
they were declared in.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

CATALOG = Path(__file__).parents[1] / "npu_backend" / "catalog" / "data" / "schemas.json"


def installed_schemas(op: str) -> list[Any]:
    """Return the schemas registered under ``npu::NAME``."""
    import torch

    return list(torch._C._jit_get_schemas_for_operator(op))


def regenerate(ops: dict[str, list[str] | None]) -> dict[str, list[str] | None]:
    """Return a line's ops as the installed package has them, for the names that are given."""
    import torch

    found: dict[str, list[str] | None] = {}
    for op, texts in ops.items():
        space = op.partition("::")[0]
        known = {torch._C.parse_schema(f"{space}::{text}"): text for text in texts or ()}
        installed = installed_schemas(op)
        # Sorted: the order of registration differs from process to process.
        found[op] = (
            sorted(known.get(s, str(s).removeprefix(f"{space}::")) for s in installed) or None
        )
    return found


def main() -> int:
    """Compare or rewrite; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check

    from npu_backend.testing import sim

    simulation = sim.start()
    data = json.loads(CATALOG.read_text("utf-8"))
    row = data["lines"][simulation.line]
    # An op that any line has is looked for in every line.
    names = dict.fromkeys(op for line in data["lines"].values() for op in line["ops"])
    before = {op: row["ops"].get(op) for op in names}
    after = regenerate(before)
    changed = [op for op in names if before[op] != after[op]]
    for op in changed:
        print(f"{simulation.line} {op}\n  catalog:   {before[op]}\n  installed: {after[op]}")
    if not changed:
        print(f"line {simulation.line}: {len(names)} ops, as the catalog has them")
    elif not check:
        row["ops"] = after
        CATALOG.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
