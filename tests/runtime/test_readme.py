"""The host's block of the README runs as it stands, on a small layer and the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import npu_backend
from npu_backend import Indexer, MlaLayer
from npu_backend.runtime.prove.seeded import seeded_weights

README = Path(__file__).parents[2] / "README.md"


def test_the_hosts_block_of_the_readme_runs(monkeypatch, capsys):
    (block,) = re.findall(r"## In a host\n\n```python\n(.*?)```", README.read_text("utf-8"), re.S)
    layer = MlaLayer(
        layer_id=0, hidden_size=64, num_heads=16, q_lora_rank=48, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, indexer=Indexer("own"),
    )  # fmt: skip
    made = seeded_weights(layer, 16).to(torch.device("cpu"))
    asked: list[str] = []

    def parameter_of(name: str) -> torch.Tensor:
        asked.append(name)
        return made[name]

    names: dict[str, Any] = {
        "parameter_of": parameter_of,
        "hidden_states": torch.randn(3, 64).to(torch.bfloat16),
        "positions": torch.arange(3),
        "slot_mapping": torch.arange(3),
        "attn_output": torch.randn(3, 1, 32).to(torch.bfloat16),
    }
    monkeypatch.setattr(npu_backend, "read_model", lambda _model: [layer])
    exec(compile(block.replace('"npu:0"', '"cpu"'), str(README), "exec"), names)
    assert {"q_a_layernorm", "kv_a_layernorm", "w_kc"} <= set(asked)
    assert names["q"].q_nope.shape == (3, 1, 32)
    assert names["out"].shape == (3, 1, 24)
    # What the comment at release() says: the ledger is that of the bound layer's own plan.
    assert names["ledger"].agrees
    assert "layer 0" in capsys.readouterr().out
