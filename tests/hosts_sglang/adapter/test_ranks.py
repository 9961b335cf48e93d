"""Two processes over gloo, each with SGLang's attention on its own simulated NPU: what the ranks
of a TP group do where one of them is not as the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("rank_process.py")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    store = tmp_path_factory.mktemp("gloo") / "store"
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in (0, 1)
    ]
    try:
        done = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, done, strict=True):
        assert process.returncode == 0, err[-4000:]
    told = [json.loads(out.splitlines()[-1]) for out, _ in done]
    return {name: [told[0][name], told[1][name]] for name in told[0]}


def untouched(found: Found) -> None:
    for rank in found:
        assert not rank["applied"]
        assert not rank["routed"]
        assert not rank["refused"]
        assert rank["released"] == []
        assert rank["strides"] == [[65536, 1, 128]] * 2, "as SGLang's loader leaves them"


def test_ranks_that_agree_apply_one_plan(ranks: dict[str, Found]) -> None:
    prints = set()
    for number, found in enumerate(ranks["agree"]):
        assert found["error"] is None
        assert found["applied"]
        assert found["released"] == ["w_kc"]
        (line,) = [text for text in found["lines"] if "fingerprint" in text]
        assert line.startswith(f"npu-backend: rank {number}, applied: 2 layers")
        prints.add(line.rpartition(" ")[2])
    assert len(prints) == 1


def test_another_environment_stops_both_with_the_difference_shown(ranks: dict[str, Found]) -> None:
    for found in ranks["differ"]:
        assert found["error"]["type"] == "PlanMismatchError"
        text = found["error"]["text"]
        assert "the ranks do not hold the same plan" in text
        assert 'strategy: "mlaprolog" against "absorb"' in text
        assert "rank 0: " in text
        assert "rank 1: " in text
        assert "nothing was changed or freed" in text
    untouched(ranks["differ"])


@pytest.mark.parametrize(
    ("name", "why"),
    [("unread", "moon: no such promise"), ("unbound", "RuntimeError: no memory to prepare with")],
)
def test_where_one_rank_cannot_all_stand_aside_and_one_says_why(
    ranks: dict[str, Found], name: str, why: str
) -> None:
    untouched(ranks[name])
    assert [found["error"] for found in ranks[name]] == [None, None]
    told = [[t for t in found["lines"] if "not installed" in t] for found in ranks[name]]
    assert [len(lines) for lines in told] == [1, 0], "rank 0 tells it, once"
    assert f"rank 1: {why}" in told[0][0]


def test_a_tensor_that_lives_on_one_rank_only_stops_both_before_anything_is_freed(
    ranks: dict[str, Found],
) -> None:
    for found in ranks["alias"]:
        assert found["error"]["type"] == "PlanMismatchError"
        assert "layer 1" in found["error"]["text"]
        assert "w_kc" in found["error"]["text"]
        assert "nothing was freed" in found["error"]["text"]
        assert found["released"] == []


def test_a_rank_that_fails_while_weights_go_joins_as_failed_and_stops_all(
    ranks: dict[str, Found],
) -> None:
    for found in ranks["unreleased"]:
        assert found["error"]["type"] == "PlanMismatchError"
        assert "rank 1 failed before the plan could be compared" in found["error"]["text"]
        assert "rank 1: FAILED" in found["error"]["text"]
        assert "rank 1 failed: the device was lost" in found["error"]["text"]
        assert "SGLang cannot go on alone" in found["error"]["text"]


def test_a_rank_without_npu_backend_is_named_instead_of_waited_for(
    ranks: dict[str, Found],
) -> None:
    here, absent = ranks["absent"]
    assert absent["error"] is None
    assert here["error"]["type"] == "PlanMismatchError"
    assert "not all ranks came" in here["error"]["text"]
    assert "1" in here["error"]["text"]
    assert here["released"] == []
