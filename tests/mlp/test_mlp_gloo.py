"""Four processes over gloo: the sharded MLPs give the unsharded output in every legal layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("gloo_rank.py")
REDUCE, GATHER = "all-reduce", "all-gather + reduce-scatter"

LEGAL = {
    ("dense", "tp", 4, REDUCE),
    ("dense", "attn_tp", 1, "none"),
    ("dense", "attn_tp", 2, REDUCE),
    ("dense", "attn_tp", 4, REDUCE),
    ("shared_experts", "tp", 4, REDUCE),
    ("shared_experts", "replicated", 1, "none"),
    ("shared_experts", "attn_tp", 2, GATHER),
    ("shared_experts", "attn_tp", 4, GATHER),
    ("shared_experts", "shared_experts_tp", 2, GATHER),
    ("shared_experts", "shared_experts_tp", 4, GATHER),
}
"""Every layout that four ranks can have, by the truth tables."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(4)
    ]
    try:
        done = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, done, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def test_every_legal_layout_is_run_and_no_other(ranks):
    for found in ranks:
        assert {tuple(row[:4]) for row in found["errors"]} == LEGAL
        assert found["impossible"] > 0


@pytest.mark.parametrize("legal", sorted(LEGAL), ids=str)
def test_the_sharded_output_is_the_unsharded_one(ranks, legal):
    errors = [row[4] for found in ranks for row in found["errors"] if tuple(row[:4]) == legal]
    assert len(errors) == 4
    assert max(errors) <= 1e-5


def test_no_rows_on_any_rank_give_no_rows(ranks):
    assert all(row[5] == [0, 32] for found in ranks for row in found["errors"])


@pytest.mark.parametrize("name", [f"dense {REDUCE}", f"shared_experts {GATHER}"])
def test_unequal_rows_are_refused_on_every_rank_with_each_rank_s_number(ranks, name):
    for found in ranks:
        error = found["told"][name]
        assert error["what"] == "the ranks of the group bring different numbers of rows"
        assert error["why"][0] == f"{name.partition(' ')[2]} needs equal numbers of rows on " + (
            "every rank"
        )
        assert error["why"][1:] == [f"TP rank {r}: {6 if r == 2 else 5} rows" for r in range(4)]
        assert error["remedy"]
        assert found["told"][f"{name} after"] <= 1e-5


@pytest.mark.parametrize("name", [f"dense {REDUCE}", f"shared_experts {GATHER}"])
def test_rows_that_one_rank_cannot_use_stop_all_of_them(ranks, name):
    for rank, found in enumerate(ranks):
        error = found["told"][f"{name} broken"]
        if rank == 1:
            assert "torch.float64" in error["why"][0]
        else:
            assert "TP rank 1: unusable rows" in error["why"]


def test_a_group_that_is_not_the_layout_s_is_refused(ranks):
    for rank, found in enumerate(ranks):
        told = found["told"]
        assert f"it has 4 ranks, this one is {rank}" in told["wrong group"]["why"][0]
        assert told["wrong rank"]["what"] == "the TP group is not the parallel layout's"
        assert "global ranks of the TP group: 3, 2, 1, 0" in told["turned"]["why"]
        assert told["same object"] is True
    # Ranks 1 to 3 are not rank 0 of a TP group 0, 1.
    assert [found["told"]["wrong size"] is None for found in ranks] == [True, False, False, False]


def test_tp_groups_of_pipeline_stages_are_built_from_their_global_ranks(ranks):
    assert max(found["told"]["stages"] for found in ranks) <= 1e-5
