"""``npu-backend plan --host sglang`` predicts the line that the adapter logs, fingerprint too."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from sglang_world.model import Runner, build, config_of, published

from npu_backend.cli import main

FIELDS = (
    *("architectures", "model_type", "num_hidden_layers", "first_k_dense_replace", "hidden_size"),
    *("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("index_topk", "index_n_heads", "index_head_dim", "max_position_embeddings"),
    "num_nextn_predict_layers",
)

CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = [
    # name, config, SGLang's arguments, environment
    ("decode", {}, {"disaggregation_mode": "decode"}, {"SGLANG_NPU_USE_MLAPO": "1"}),
    ("dsa", {"dsa": True}, {"disaggregation_mode": "decode"}, {"SGLANG_NPU_USE_MLAPO": "1"}),
    ("absorb", {}, {}, {}),
    ("pairs", {"rope_scaling": None}, {}, {}),
    (
        "bounds",
        {"dsa": True},
        {
            "disaggregation_mode": "prefill",
            "chunked_prefill_size": 4096,
            "max_running_requests": 16,
            "page_size": 64,
        },
        {"SGLANG_NPU_USE_MLAPO": "1"},
    ),
    ("prefill", {}, {"disaggregation_mode": "prefill"}, {"SGLANG_NPU_USE_MLAPO": "1"}),
    (
        "restore",
        {"dsa": True},
        {"disaggregation_mode": "decode", "enable_pd_role_switch": True},
        {"SGLANG_NPU_USE_MLAPO": "1", "NPU_BACKEND_SGLANG_RESTORE": "1"},
    ),
    (
        "requests",
        {},
        {"enable_deterministic_inference": True},
        {"NPU_BACKEND_SGLANG_REQUESTS": "v_up=torch.bmm"},
    ),
]


def predicted(directory: Path, told: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command that rank 0 logged, with the model's directory."""
    (text,) = [line for line in told if "predicted by:" in line]
    command = shlex.split(text.partition("predicted by: ")[2])
    assert command[:3] == ["npu-backend", "plan", "MODEL"]
    capsys.readouterr()
    assert main(["plan", str(directory), *command[3:]]) == 0
    return capsys.readouterr().out.splitlines()[-1].removeprefix("SGLang logs: ")


def written(config: Any, directory: Path) -> Path:
    values = {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("name", "shape", "arguments", "environ"), CASES, ids=[c[0] for c in CASES]
)
def test_the_line_is_predicted_from_the_config(
    install: Any,
    told: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    shape: dict[str, Any],
    arguments: dict[str, Any],
    environ: dict[str, str],
) -> None:
    adapter = install(**environ)
    config = config_of(layers=2, **shape)
    with published(**arguments):
        runner = Runner(build(config))
        adapter.after_load(None, runner)
    assert adapter.sessions, told()
    (line,) = [text for text in told() if "applied: " in text]
    assert line.partition("applied: ")[2] == predicted(written(config, tmp_path), told(), capsys)


def test_an_mtp_layer_is_predicted_beside_its_model(
    install: Any, told: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = install(SGLANG_NPU_USE_MLAPO="1")
    config = config_of(layers=3, dsa=True, num_nextn_predict_layers=1)
    with published(disaggregation_mode="decode"):
        runner = Runner(build(config, is_nextn=True), draft=True)
        adapter.after_load(None, runner)
    (line,) = [text for text in told() if "applied: " in text]
    assert "layers 3: mlaprolog in decode,draft_extend,idle" in line
    assert line.partition("applied: ")[2] == predicted(written(config, tmp_path), told(), capsys)
