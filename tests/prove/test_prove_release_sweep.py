"""Full-size layers of the measured configurations: the allocator says what the plan says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from npu_backend.testing.release_sweep import CONFIGURATIONS, Measured, report

AT_16 = [n for n, asked in enumerate(CONFIGURATIONS) if asked.attn_tp_size == 16]


@pytest.mark.npu
@pytest.mark.parametrize("number", AT_16, ids=lambda n: CONFIGURATIONS[n].model)
def test_the_allocator_agrees_to_the_byte(number):
    command = [sys.executable, "-m", "npu_backend.testing.release_sweep", "--json"]
    done = subprocess.run(
        [*command, "--configuration", str(number), "--layers", "3"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = Measured(**json.loads(done.stdout.splitlines()[-1]))
    assert found.freed > 0
    assert found.agrees, found
    assert found.resident < found.theirs_resident


def test_a_byte_is_a_difference():
    equal = {"planned": 10, "freed": 10, "resident_planned": 5, "resident": 5, "dead": 0}
    more = {"layers": 1, "statistic": "", "theirs_freed": 4, "theirs_resident": 8}
    assert Measured(**equal, **more, tokens_gained=0).agrees
    for name in equal:
        changed = {**equal, name: equal[name] + 1}
        assert not Measured(**changed, **more, tokens_gained=0).agrees
    row = report({CONFIGURATIONS[0]: Measured(**equal, **more, tokens_gained=7)}).splitlines()[-1]
    assert "| 2.50 | 0.62 | 0 | 7 |" in row
