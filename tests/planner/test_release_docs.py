"""docs/release.md says of a prefill worker what its commands say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from npu_backend.cli import main

TEXT = (Path(__file__).parents[2] / "docs" / "release.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([\w.-]+) \| `(--role prefill[^`]*)` \| (.*) \|$", TEXT, re.M)


def test_the_table_is_there():
    assert len(ROWS) == 5


@pytest.mark.parametrize(("model", "options", "told"), ROWS)
def test_what_a_prefill_worker_frees(capsys, model, options, told):
    assert main(["plan", model, *options.split(), "--cann", "9.2.0", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    freed = {}
    for layer in plan["layers"]:
        for row in layer["weights"]:
            if row["action"] == "release":
                freed[row["name"]] = freed.get(row["name"], 0) + row["bytes"]
    found = ", ".join(f"{name} {size} bytes" for name, size in freed.items()) or "nothing"
    assert found == told


def test_a_dense_prefill_worker_holds_1_9_gib_of_dead_w_kc_and_w_vc(capsys):
    """facts: DeepSeek-V3 at attention TP 1; 62 layers of 2 x 16 MiB."""
    args = ["plan", "deepseek-v3", "--role", "prefill", "--host", "sglang", "--phases", "extend"]
    assert main([*args, "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["totals"]["bytes"]["release"]
    assert total == 62 * 2 * 16 * 2**20
    assert round(total / 2**30, 1) == 1.9


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v3.2", "glm-5.2", "kimi-k2"])
def test_role_null_frees_nothing_that_a_phase_reads(capsys, model):
    assert main(["plan", model, "--role", "null", "--json"]) == 0
    for layer in json.loads(capsys.readouterr().out)["layers"]:
        for row in layer["weights"]:
            assert row["action"] == "keep" or not row["readers"], row
