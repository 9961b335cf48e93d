"""What of SGLang is hooked, and with which signatures it is known.

Read from the 0.5.23 wheel. A version that is not here was not read, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ATTENTION",
    "FUNCTIONS",
    "HOOKED",
    "KNOWN",
    "NPU_MODULE",
    "PREPROCESS",
    "RUNNER",
    "SCHEDULER_UPDATER",
    "SWITCH",
    "UPDATER",
]

NPU_MODULE = "sglang.srt.hardware_backend.npu.modules.deepseek_v2_attention_mla_npu"
PREPROCESS = "sglang.srt.hardware_backend.npu.attention.mla_preprocess.NPUFusedMLAPreprocess"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
SCHEDULER_UPDATER = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
)
SWITCH = "sglang.srt.disaggregation.role_switch.handle_pd_role_switch"

ATTENTION = "DeepseekV2AttentionMLA"
"""Class, by name, whose forward goes through the five functions; models subclass it."""

_PREPARE = (
    *("m", "positions", "hidden_states", "forward_batch"),
    *("zero_allocator", "input_on_attn_tp_slices"),
)
_CORE = ("m", "q_pe", "k_pe", "q_nope_out", "k_nope")

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    f"{NPU_MODULE}.npu_mla_preprocess": (
        *("m", "hidden_states", "positions", "forward_batch", "zero_allocator"),
    ),
    f"{NPU_MODULE}.forward_mla_prepare_npu": _PREPARE,
    f"{NPU_MODULE}.forward_dsa_prepare_npu": (*_PREPARE, "prev_topk_indices"),
    f"{NPU_MODULE}.forward_mla_core_npu": (
        *_CORE,
        *("forward_batch", "zero_allocator", "positions", "topk_indices", "gate"),
    ),
    f"{NPU_MODULE}.forward_dsa_core_npu": (
        *(*_CORE, "topk_indices", "forward_batch", "zero_allocator", "positions"),
        *("mla_preprocess_used", "gate"),
    ),
}
"""The five functions that are routed, with their parameters in 0.5.23."""

_LIFE: Mapping[str, tuple[str, ...]] = {
    f"{RUNNER}.configure_kv_cache_dtype": ("self",),
    f"{RUNNER}.alloc_memory_pool": ("self", "memory_pool_config", "draft_parallel_layout"),
    f"{UPDATER}.begin_weight_update": ("self",),
    f"{UPDATER}.end_weight_update": ("self", "run_post_load"),
    f"{UPDATER}.update_weights_from_disk": (
        *("self", "model_path", "load_format", "weight_name_filter", "recapture_cuda_graph"),
    ),
    f"{UPDATER}.load_weights_from_distributed": ("self", "named_tensors"),
    f"{UPDATER}.update_weights_from_tensor": ("self", "named_tensors", "load_format"),
    f"{UPDATER}.update_weights_from_ipc": ("self", "recv_req"),
    f"{SCHEDULER_UPDATER}.resume_memory_occupation": ("self", "recv_req"),
    SWITCH: ("scheduler", "recv_req"),
}

HOOKED: Mapping[str, tuple[str, ...]] = {**FUNCTIONS, **_LIFE}
"""Everything that is hooked, with its parameters in 0.5.23."""

KNOWN: Mapping[str, Mapping[str, tuple[str, ...]]] = {"0.5.23": HOOKED}
"""Signatures by SGLang version."""
