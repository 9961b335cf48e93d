"""What the adapter asks of SGLang, as plain records: these tests need neither SGLang nor an NPU.

The same adapter inside SGLang's own code: ``tests/hosts_sglang``.
"""

from __future__ import annotations

import enum
import sys
import types
from types import SimpleNamespace as Record

import pytest

import npu_backend


def context(**changes):
    """SGLang's ``runtime_context`` with its defaults, as far as the adapter reads it."""
    disabled = Record(backend="disabled", bs=None, max_bs=None)
    bags = {
        "disagg": {"disaggregation_mode": "null", "enable_pd_role_switch": False},
        "parallel": {
            "tp_size": 1,
            "attn_tp_size": 1,
            "attn_dp_size": 1,
            "attn_cp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "enable_attn_tp_input_scattered": False,
            "tp_group": None,
        },
        "model": {
            "kv_cache_dtype": "auto",
            "custom_weight_loader": None,
            "checkpoint_engine_wait_weights_before_ready": False,
            "weight_cache_mode": "off",
            "remote_instance_weight_loader_start_seed_via_transfer_engine": False,
        },
        "schedule": {
            "chunked_prefill_size": None,
            "max_prefill_tokens": 16384,
            "enable_dynamic_chunking": False,
            "enable_mixed_chunk": False,
            "max_running_requests": None,
            "page_size": 128,
        },
        "spec": {
            "speculative_algorithm": None,
            "speculative_num_draft_tokens": None,
            "max_speculative_num_draft_tokens": None,
            "speculative_eagle_topk": None,
        },
        "lora": {"enable_lora": False},
        "exec": {
            "features": Record(enable_memory_saver=False, enable_weights_cpu_backup=False),
            "graph": Record(cuda_graph_config=Record(decode=disabled, prefill=disabled)),
            "offload": Record(cpu_offload_gb=0, offload_group_size=-1),
            "moe": Record(elastic_ep_backend=None),
            "deterministic": Record(enable_deterministic_inference=False),
        },
    }
    if "elastic_ep_backend" in changes:
        changes["moe"] = Record(elastic_ep_backend=changes.pop("elastic_ep_backend"))
    for name, value in changes.items():
        (bag,) = [bag for bag in bags.values() if name in bag]
        bag[name] = value
    module = types.ModuleType("sglang.srt.runtime_context")
    for name, values in bags.items():
        setattr(module, f"get_{name}", lambda values=values: Record(**values))
    return module


class ForwardMode(enum.IntEnum):
    """SGLang's, by name; ``MODES`` maps names."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6
    PREBUILT = 7
    SPLIT_PREFILL = 8
    DLLM_EXTEND = 9


@pytest.fixture
def make_context():
    return context


@pytest.fixture(scope="session")
def backend():
    return npu_backend.load(third_party=False)


@pytest.fixture
def modules(monkeypatch):
    """Put modules of SGLang's names in place; those not given are absent."""

    def put(**given):
        for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.model_executor"):
            package = types.ModuleType(name)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, name, package)
        info = types.ModuleType("sglang.srt.model_executor.forward_batch_info")
        info.ForwardMode = ForwardMode
        monkeypatch.setitem(sys.modules, info.__name__, info)
        for name, module in given.items():
            monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)

    return put
