"""A model of SGLang's own attention modules on the simulated NPU, as its loader leaves them.

Everything around attention is left out: no embeddings, no MLPs. Weights are random and small.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch

__all__ = ["DIMS", "YARN", "Runner", "attentions", "build", "config_of", "published"]

DIMS = {
    "hidden_size": 7168,
    "num_attention_heads": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""DeepSeek-V3's sizes, which the fused ops were made for, with 8 heads."""
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""DeepSeek-V3's: SGLang rotates with ``npu_interleave_rope``, which leaves halves."""
_DSA = {"index_topk": 2048, "index_n_heads": 8, "index_head_dim": 128}


def config_of(*, dsa: bool = False, layers: int = 2, **changes: Any) -> Any:
    """Return a config as ``config.json`` would have it."""
    config = import_module("transformers").PretrainedConfig()
    values = {
        **DIMS,
        "architectures": ["DeepseekV32ForCausalLM" if dsa else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v32" if dsa else "deepseek_v3",
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": dict(YARN),
        **(_DSA if dsa else {}),
        **changes,
    }
    for name, value in values.items():
        setattr(config, name, value)
    return config


@contextmanager
def published(**arguments: Any) -> Iterator[Any]:
    """Publish SGLang's context with these server arguments, as one rank of one."""
    context = import_module("sglang.srt.runtime_context")
    names = ("tp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "attn_dcp_rank")
    ranks = dict.fromkeys(names, 0)
    with ExitStack() as stack:
        stack.enter_context(context.get_context().override_server_args(**arguments))
        stack.enter_context(context.get_parallel().override(**ranks))
        yield context


def build(
    config: Any,
    *,
    quant_config: Any = None,
    is_nextn: bool = False,
    device: str = "npu",
    seed: int = 0,
) -> torch.nn.Module:
    """Return a model of ``config``'s attention layers, loaded and post-processed by SGLang."""
    deepseek = import_module("sglang.srt.models.deepseek_v2")
    count = 1 if is_nextn else config.num_hidden_layers
    generator = torch.Generator().manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            layers = [
                deepseek.DeepseekV2AttentionMLA(
                    config=config,
                    hidden_size=config.hidden_size,
                    num_heads=config.num_attention_heads,
                    qk_nope_head_dim=config.qk_nope_head_dim,
                    qk_rope_head_dim=config.qk_rope_head_dim,
                    v_head_dim=config.v_head_dim,
                    q_lora_rank=config.q_lora_rank,
                    kv_lora_rank=config.kv_lora_rank,
                    rope_theta=config.rope_theta,
                    rope_scaling=dict(config.rope_scaling) if config.rope_scaling else None,
                    max_position_embeddings=config.max_position_embeddings,
                    quant_config=quant_config,
                    layer_id=layer_id,
                    prefix=f"model.layers.{layer_id}.self_attn",
                    is_nextn=is_nextn,
                )
                for layer_id in range(count)
            ]
    finally:
        torch.set_default_dtype(before)
    model = _Model(config, layers, is_nextn=is_nextn)
    model.fill(generator)
    model.post_load_weights(is_nextn=is_nextn)
    return model


class _Model(torch.nn.Module):
    """What SGLang's loader needs of a model: ``model.layers[i].self_attn`` and the config."""

    def __init__(self, config: Any, attentions: list[Any], *, is_nextn: bool) -> None:
        super().__init__()
        self.config, self.quant_config = config, None
        inner = torch.nn.Module()
        layers = [torch.nn.Module() for _ in attentions]
        for layer, attention in zip(layers, attentions, strict=True):
            layer.self_attn = attention
        if is_nextn:
            inner.decoder = layers[0]
        else:
            inner.layers = torch.nn.ModuleList(layers)
            inner.start_layer, inner.end_layer = 0, len(layers)
        self.model = inner
        loader = import_module("sglang.srt.models.deepseek_common.deepseek_weight_loader")
        mixin = loader.DeepseekV2WeightLoaderMixin
        self.post_load_weights = types.MethodType(mixin.post_load_weights, self)

    def fill(self, generator: torch.Generator) -> None:
        """Write random values into every parameter; norms stay near one."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                value = torch.randn(parameter.shape, generator=generator) * 0.02
                value = value + 1 if "norm" in name and name.endswith("weight") else value
                parameter.copy_(value.to(parameter.dtype))

    def load_weights(self, named: Any) -> None:
        """Write weights by name, and make ``w_kc`` and ``w_vc`` anew, as SGLang's models do."""
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, value in named:
                own[name].copy_(value)
        self.post_load_weights(is_nextn=hasattr(self.model, "decoder"))


class Runner:
    """The attributes of SGLang's ``ModelRunner`` that the adapter asks for."""

    def __init__(
        self, model: Any, *, draft: bool = False, kv: torch.dtype = torch.bfloat16
    ) -> None:
        self.model = model
        self.is_draft_worker = draft
        self.startup_weight_load: Any = None
        self.draft_attention_backend = None
        self.dtype = torch.bfloat16
        self.kv_cache_dtype = kv
        self.model_config = types.SimpleNamespace(hf_config=model.config, model_path="model")
        self.token_to_kv_pool: Any = None

    def pool(self, *, rows: int = 256, page: int = 128, dtype: Any = None, **more: Any) -> Any:
        """Make SGLang's NPU pool for this model, where its configurator would."""
        config = self.model.config
        dsa = import_module("sglang.srt.configs.model_config").is_deepseek_dsa(config)
        layers = attentions(self.model)
        pools = import_module("sglang.srt.hardware_backend.npu.memory_pool_npu")
        self.token_to_kv_pool = pools.NPUMLATokenToKVPool(
            size=rows,
            page_size=page,
            dtype=dtype or self.kv_cache_dtype,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            layer_num=len(layers),
            device="npu",
            enable_memory_saver=False,
            index_head_dim=config.index_head_dim if dsa else None,
            start_layer=0,
            end_layer=len(layers) - 1,
            **more,
        )
        return self.token_to_kv_pool


def attentions(model: Any) -> Mapping[int, Any]:
    """Return the attention modules by layer id."""
    inner = model.model
    layers = [inner.decoder] if hasattr(inner, "decoder") else list(inner.layers)
    return {layer.self_attn.layer_id: layer.self_attn for layer in layers}
