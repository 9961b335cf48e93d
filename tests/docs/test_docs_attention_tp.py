"""The figures of docs/attention-tp.md are what the commands in it print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from npu_backend.mlp.rules import RULES

PAGE = (Path(__file__).parents[2] / "docs" / "attention-tp.md").read_text("utf-8")
BLOCKS = re.findall(r"```console\n\$ npu-backend ([^\n]*)\n…\n(.*?)```", PAGE, re.S)


def test_the_page_has_its_commands():
    assert len(BLOCKS) == PAGE.count("```console") == 4
    for command, _ in BLOCKS:
        assert "tp=64,attn_tp=16" in command
        assert "ep=ascend_fuseep" in command


@pytest.mark.parametrize("command, told", BLOCKS, ids=[c[-40:] for c, _ in BLOCKS])
def test_each_command_prints_what_the_page_says(command, told):
    done = subprocess.run(
        [sys.executable, "-m", "npu_backend", *command.split()],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ},
    )
    assert done.stderr == ""
    assert done.stdout.rstrip().endswith("\n" + told.rstrip())


def test_the_page_s_figures_are_those_worked_out_by_hand():
    # Three matrices of hidden 7168, two bytes an element.
    for size, ranks in ((33792, 64), (33792, 16), (6144, 1), (6144, 16), (6144, 4)):
        assert size % ranks == 0
        assert f"{size // ranks} of {size}" in PAGE
        assert f"{3 * 7168 * (size // ranks) * 2} B" in PAGE


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_documented(rule):
    assert f"| `{rule}` | {RULES[rule]} |" in PAGE


def test_the_layout_and_its_records_are_public():
    import npu_backend
    from npu_backend import runtime

    for name in (
        "mlp_shard_layout AttnTpOptions MlpLayer MlpParallel MlpShardLayout MlpCommunication "
        "MlpPlan plan_mlp read_mlp_layers"
    ).split():
        assert name in npu_backend.__all__
        assert name in PAGE or name in ("MlpShardLayout", "MlpCommunication", "MlpPlan")
    for name in ("MlpGroups", "ShardedMlp", "assemble_mlp", "shard_mlp"):
        assert name in runtime.__all__
        assert name in PAGE
