"""One worker of SGLang around its real attention modules.

Everything between SGLang's configuration and an attention's output is SGLang's own: ``ServerArgs``
resolved and published, process groups of one rank (gloo), ``DeepseekV2ForCausalLM`` from a small
``config.json`` with its own quantized linears, ``DeepseekV2AttentionMLA`` and ``Indexer``, its
weight processing, ``NPUMLATokenToKVPool``, ``AscendAttnBackend`` and ``ForwardBatch``. Sizes are
the smallest that the ops take. What is not SGLang's:

* weights are random, made per parameter's name and shape, so that two processes have the same;
* the runner is a ``ModelRunner`` without its constructor: only what the adapter, the pools and the
  backend ask of it is there, and its pools are of a few pages, not of what memory allows;
* the attention ops compute in :mod:`sglang_world.attention`.
"""

from __future__ import annotations

import json
import os
import tempfile
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from sglang_world import attention
from sglang_world.start import start

__all__ = ["Model", "Step", "Worker", "hidden_of", "load", "prepare", "published"]

PAGE, PAGES = 128, 8
HIDDEN, HEADS = 2048, 2
_SHAPES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "moe_layer_freq": 1,
}
_DSA = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 2048}
_YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_PROJECTIONS = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")


@frozen(kw_only=True)
class Model:
    """A model of a few layers.

    Args:
        dsa: Its layers have an indexer.
        quant: ``none``, ``static``, ``dynamic``, or ``q_b`` for a dynamic q_b_proj, and with it the
            indexer's wq_b: SGLang hands that one the int8 q_lora of mlaprolog.
        ignores: Whether the quantization lists kv_b_proj as ignored, which SGLang takes as the
            sign for mlaprolog.
        layers: Number of layers.
        yarn: The rotary embedding is scaled by YaRN, which on NPU writes keys in halves.
    """

    dsa: bool = True
    quant: str = "none"
    ignores: bool = False
    layers: int = 1
    yarn: bool = False

    def config(self) -> dict[str, Any]:
        """Return ``config.json``."""
        name = "DeepseekV32ForCausalLM" if self.dsa else "DeepseekV3ForCausalLM"
        kind = "deepseek_v32" if self.dsa else "deepseek_v3"
        return {
            "architectures": [name],
            "model_type": kind,
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": self.layers,
            **_SHAPES,
            **(_DSA if self.dsa else {}),
            **({"rope_scaling": dict(_YARN)} if self.yarn else {}),
        }

    def description(self) -> dict[str, Any] | None:
        """Return ``quant_model_description.json``, or None for a float model."""
        if self.quant == "none" and not self.ignores:
            return None
        kinds = {"none": {}, "q_b": dict.fromkeys(("q_b_proj", "wq_b"), "W8A8_DYNAMIC")}.get(
            self.quant,
            dict.fromkeys(
                ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"),
                "W8A8" if self.quant == "static" else "W8A8_DYNAMIC",
            ),
        )
        found: dict[str, Any] = {"model_quant_type": "W8A8_DYNAMIC"}
        for layer in range(self.layers):
            at = f"model.layers.{layer}.self_attn"
            for name in _PROJECTIONS:
                found[f"{at}.{name}.weight"] = kinds.get(name, "FLOAT")
            for name in ("wq_b", "wk", "weights_proj"):
                found[f"{at}.indexer.{name}.weight"] = kinds.get(name, "FLOAT")
            for name in ("gate_proj", "up_proj", "down_proj"):
                found[f"model.layers.{layer}.mlp.{name}.weight"] = "FLOAT"
        found["model.embed_tokens.weight"] = found["lm_head.weight"] = "FLOAT"
        if self.ignores:
            found["ignore"] = [f"model.layers.{n}.self_attn.kv_b_proj" for n in range(self.layers)]
        return found

    def write(self, folder: Path) -> None:
        """Write the model's files."""
        (folder / "config.json").write_text(json.dumps(self.config()))
        description = self.description()
        if description is not None:
            (folder / "quant_model_description.json").write_text(json.dumps(description))


def prepare(plugins: str) -> None:
    """Bring SGLang up as a worker process does, with the named plugins and no other.

    Args:
        plugins: ``SGLANG_PLUGINS``.
    """
    start()
    # SGLang's runner puts torch_npu's functions in the place of torch.cuda's; torch 2.13 compiles
    # nothing for the first time after that, and modules of the model compile when imported.
    import_module("sglang.srt.models.deepseek_v2")
    os.environ["SGLANG_PLUGINS"] = plugins
    import_module("sglang.srt.plugins").load_plugins()


@contextmanager
def published(model: Model, role: str, **arguments: Any) -> Iterator[Any]:
    """Publish SGLang's context for a model and a role, with groups of one rank.

    Args:
        model: The model.
        role: ``null``, ``prefill`` or ``decode``.
        arguments: More of SGLang's server arguments.
    """
    import sglang.srt.runtime_context as context
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        more = {} if model.description() is None else {"quantization": "modelslim"}
        server = ServerArgs(
            model_path=folder,
            device="npu",
            disaggregation_mode=role,
            skip_tokenizer_init=True,
            attention_backend="ascend",
            page_size=PAGE,
            max_running_requests=16,
            chunked_prefill_size=64,
            disable_cuda_graph=True,
            **more,
            **arguments,
        )
        context.publish(server, role="scheduler", ranks=context.SpawnRanks(world_rank=0, gpu_id=0))
        _one_rank(context)
        yield server


def _one_rank(context: Any) -> None:
    import sglang.srt.distributed.parallel_state as groups

    if groups._WORLD is None:
        store = Path(tempfile.mkdtemp()) / "store"
        groups.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{store}",
        )
        groups.initialize_model_parallel(backend="gloo")
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags

    initialize_dp_attention_flags(context.get_server_args())


@frozen(kw_only=True)
class Step:
    """One forward step of one request.

    Args:
        mode: SGLang's forward mode.
        rows: Tokens of the step.
        seen: Tokens of the request before it.
    """

    mode: str
    rows: int
    seen: int


def hidden_of(step: Step) -> torch.Tensor:
    """Return a step's hidden states, in host memory."""
    return _random(f"hidden.{step}", torch.Size((step.rows, HIDDEN)), torch.bfloat16)


def _random(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return values of a parameter that depend on its name and shape alone."""
    made = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    last = name.rpartition(".")[2]
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=made, dtype=torch.int8)
    if last in ("input_offset", "weight_offset"):
        return torch.full(shape, 3.0 if last == "input_offset" else 0.0).to(dtype)
    if last == "quant_bias":
        return torch.randint(-99, 100, shape, generator=made, dtype=torch.int32)
    if last == "input_scale":
        return torch.full(shape, 0.03125).to(dtype)
    values = torch.rand(shape, generator=made)
    if last in ("weight_scale", "deq_scale"):
        scale = 1.0 if last == "weight_scale" else 0.03125
        return ((values + 0.5) * scale / (74 * 32)).to(dtype)
    if "norm" in name:
        return (values * (0.1 if last == "bias" else 1.0) + (0.0 if last == "bias" else 0.5)).to(
            dtype
        )
    return ((values - 0.5) * 2 * (3 / shape[-1]) ** 0.5).to(dtype)


def load(server: Any) -> tuple[Any, Any]:
    """Return SGLang's model config and its model, loaded as its own loader does it."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader

    config = ModelConfig.from_server_args(server)

    def fill(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                if "rotary" not in name and "cos_sin" not in name:
                    value.data.copy_(_random(name, value.shape, value.dtype))

    def architecture(_: Any) -> tuple[type, str]:
        # SGLang's registry would import every model that it has to find this one.
        name = config.hf_config.architectures[0]
        return getattr(import_module("sglang.srt.models.deepseek_v2"), name), name

    with ExitStack() as stack:
        for name, value in (
            ("initialize_dummy_weights", fill),
            ("get_model_architecture", architecture),
        ):
            stack.callback(setattr, loader, name, getattr(loader, name))
            setattr(loader, name, value)
        made = loader.DummyModelLoader(LoadConfig(load_format="dummy")).load_model(
            model_config=config, device_config=DeviceConfig("npu", 0)
        )
    return config, made


class Worker:
    """A runner with pools and attention backend, and its model's layers.

    Args:
        server: SGLang's resolved server arguments, published.
        before: Called with each attention module when it is loaded, before a plan is made.

    Attributes:
        model: SGLang's model.
        runner: A ``ModelRunner``.
        attentions: The model's attention modules.
    """

    def __init__(self, server: Any, before: Callable[[Any], None] = lambda _: None) -> None:
        attention.install()
        self.server = server
        config, self.model = load(server)
        self.attentions = [layer.self_attn for layer in self.model.model.layers]
        for indexer in (a.indexer for a in self.attentions if a.indexer is not None):
            # SGLang multiplies float32 by it; a CPU's matmul does not mix dtypes.
            indexer.weights_proj.weight.data = indexer.weights_proj.weight.data.float()
        self.runner = _runner(server, config, self.model)
        for layer in self.attentions:
            before(layer)
        # Where SGLang knows how it will store keys; the plan is made after it.
        self.runner.configure_kv_cache_dtype()

    def allocate(self) -> None:
        """Make the pools and the backend."""
        from sglang.srt.hardware_backend.npu.attention.ascend_backend import AscendAttnBackend

        self.runner.alloc_memory_pool()
        self.runner.attn_backend = self.backend = AscendAttnBackend(self.runner)

    @property
    def pool(self) -> Any:
        """SGLang's KV pool."""
        return self.runner.token_to_kv_pool

    @contextmanager
    def forward(self, batch: Any) -> Iterator[None]:
        """Set what SGLang sets around a forward."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with torch.inference_mode(), forward_context(ForwardContext(attn_backend=self.backend)):
            self.backend.init_forward_metadata(batch)
            yield

    def step(self, step: Step) -> list[torch.Tensor]:
        """Run every layer's attention on the same hidden states.

        Returns:
            Each layer's output, (rows, hidden_size).
        """
        batch, hidden = self.batch(step), hidden_of(step).to("npu")
        outputs, chosen = [], None
        with self.forward(batch):
            for layer in self.attentions:
                output, chosen = _forward(layer, hidden, batch, chosen)
                outputs.append(output)
        return outputs

    def batch(self, step: Step) -> Any:
        """Return SGLang's ``ForwardBatch`` of a step."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        mode, rows, seen = ForwardMode[step.mode], step.rows, step.seen
        decode = mode.is_decode()
        requests = rows if decode else 1
        lengths = [seen + 1] * rows if decode else [seen + rows]
        slots = self._slots(requests, seen, rows if not decode else 1)
        extend = not decode and not mode.is_idle()
        positions = [seen] * rows if decode else list(range(seen, seen + rows))
        device: dict[str, Any] = {"device": "npu"}
        return ForwardBatch(
            forward_mode=mode,
            batch_size=requests,
            input_ids=torch.zeros(rows, dtype=torch.int64, **device),
            req_pool_indices=torch.arange(1, requests + 1, dtype=torch.int64, **device),
            seq_lens=torch.tensor(lengths, dtype=torch.int64, **device),
            out_cache_loc=slots,
            seq_lens_sum=sum(lengths),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64, **device),
            extend_num_tokens=rows if extend else None,
            extend_seq_lens=torch.tensor([rows], dtype=torch.int32, **device) if extend else None,
            extend_prefix_lens=(
                torch.tensor([seen], dtype=torch.int32, **device) if extend else None
            ),
            extend_seq_lens_cpu=[rows] if extend else [1] * requests,
            extend_prefix_lens_cpu=[seen] if extend else None,
            global_num_token_non_padded_cpu=rows,
        )

    def _slots(self, requests: int, seen: int, more: int) -> torch.Tensor:
        """Map each request to pages of its own; return the slots that the step writes."""
        table = self.runner.req_to_token_pool.req_to_token
        out = []
        for n in range(requests):
            # Page 0 is SGLang's padding.
            first = PAGE * (1 + n * (PAGES // 8))
            table[n + 1, : seen + more] = torch.arange(
                first, first + seen + more, dtype=torch.int32, device="npu"
            )
            out.append(torch.arange(first + seen, first + seen + more))
        return torch.cat(out).to("npu")


def _forward(layer: Any, hidden: torch.Tensor, batch: Any, chosen: Any) -> tuple[Any, Any]:
    """Call a layer's attention as its decoder layer does."""
    from sglang.srt.layers.layer_boundary.adapters.attention import (
        AttentionInputs,
        get_attn_tp_context,
    )

    with get_attn_tp_context().maybe_input_scattered(batch):
        get_attn_tp_context().set_attn_inputs(
            AttentionInputs(hidden, batch, layer.prepare_qkv_latent)
        )
        result = layer(
            positions=batch.positions,
            hidden_states=hidden,
            forward_batch=batch,
            zero_allocator=None,
            prev_topk_indices=chosen,
        )
    return result if isinstance(result, tuple) else (result, None)


def _runner(server: Any, config: Any, model: Any) -> Any:
    """Return a ModelRunner that was not constructed, with what is asked of it here."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    class Runner(ModelRunner):
        def __init__(self) -> None:
            self.server_args, self.model_config, self.model = server, config, model
            self.device, self.gpu_id, self.page_size = "npu", 0, PAGE
            self.is_draft_worker, self.dtype = False, config.dtype
            self.draft_attention_backend = self.spec_algorithm = None
            self.startup_weight_load = None
            self.pre_model_load_memory = 0.0
            self.is_hybrid_swa, self.use_mla_backend = False, True

        def init_kv_cache_configurator(self, layout: Any = None) -> None:
            self.kv_cache_configurator = types.SimpleNamespace(configure=_pools(self))

        def _init_post_memory_pool_components(self) -> None:
            pass

    return Runner()


def _pools(runner: Any) -> Any:
    from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    def configure(pre_model_load_memory: float) -> Any:
        config = runner.model_config.hf_config
        layers = config.num_hidden_layers
        dsa = getattr(config, "index_head_dim", None)
        return types.SimpleNamespace(
            max_total_num_tokens=PAGE * PAGES,
            max_running_requests=PAGES,
            req_to_token_pool=ReqToTokenPool(PAGES, PAGE * PAGES, "npu", False),
            token_to_kv_pool=NPUMLATokenToKVPool(
                size=PAGE * PAGES,
                page_size=PAGE,
                dtype=runner.kv_cache_dtype,
                kv_lora_rank=config.kv_lora_rank,
                qk_rope_head_dim=config.qk_rope_head_dim,
                layer_num=layers,
                device="npu",
                enable_memory_saver=False,
                index_head_dim=dsa,
                start_layer=0,
                end_layer=layers - 1,
            ),
            token_to_kv_pool_allocator=None,
            memory_pool_config=None,
            unified_memory_pool=None,
        )

    return configure
