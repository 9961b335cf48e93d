"""The catalog's op schemas of the installed line are those that torch_npu registers, op by op."""

from __future__ import annotations

import pytest
import torch

from npu_backend.catalog import load_catalog
from npu_backend.testing.sim.settings import installed_line

LINES = load_catalog().schemas["lines"]
OPS = sorted({op for line in LINES.values() for op in line["ops"]})


@pytest.mark.npu
@pytest.mark.parametrize("op", OPS)
def test_the_catalog_has_what_torch_npu_registers(npu_sim, op):
    """Every op that any line has is looked for: an op that a line lacks must be absent, too."""
    space = op.partition("::")[0]
    texts = LINES[installed_line()]["ops"].get(op) or ()
    expected = sorted(str(torch._C.parse_schema(f"{space}::{text}")) for text in texts)
    assert sorted(map(str, torch._C._jit_get_schemas_for_operator(op))) == expected
