"""Write one environment's row of docs/matrix.md from its test report.

    python tools/matrix_row.py cann91 report.xml

The row names what is installed in the environment that runs this, and what pytest counted. Rows of
other environments stay as they are.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from npu_backend.catalog import load_catalog

TABLE = Path(__file__).parents[1] / "docs" / "matrix.md"
HEAD = """# The matrix of CANN versions

Each row is written by the run of one tox environment (`tox run -m cann`, `-m cann-old`): the
real torch_npu package of that line on the simulated NPU. A pass shows op schemas, routing, limits,
memory and lifetimes; not an NPU's numerics or speed.

| environment | torch | torch-npu | TorchNPU line | simulated CANN | passed | skipped | failed |
|---|---|---|---|---|---|---|---|
"""


def counts(report: Path) -> tuple[int, int, int]:
    """Return passed, skipped and failed tests of a JUnit report."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    total = skipped = failed = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        skipped += int(suite.get("skipped", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return total - skipped - failed, skipped, failed


def main(name: str, report: Path) -> None:
    """Replace or add the row of an environment; rows are sorted by environment."""
    versions = load_catalog().versions
    torch_npu = metadata.version("torch-npu")
    line = versions.line_of(torch_npu)
    row = [
        name,
        metadata.version("torch"),
        torch_npu,
        line,
        versions.paired_cann(line),
        *map(str, counts(report)),
    ]
    text = TABLE.read_text("utf-8") if TABLE.exists() else ""
    rows = {
        cells[0]: cells
        for each in text.splitlines()
        if each.startswith("| cann")
        for cells in [[cell.strip() for cell in each.strip("|").split("|")]]
    }
    rows[name] = row
    lines = [f"| {' | '.join(rows[key])} |" for key in sorted(rows)]
    TABLE.write_text(HEAD + "\n".join(lines) + "\n", "utf-8")
    print(lines[sorted(rows).index(name)])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
