"""SGLang's attention modules as :class:`MlaLayer` records. Names of classes decide nothing about
what runs; they only tell what a module *is*: which quantization, whether it has an indexer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from npu_backend.errors import ModelError
from npu_backend.hosts.sglang.settings import Settings
from npu_backend.hosts.sglang.targets import ATTENTION
from npu_backend.model.records import Indexer, KvLayout, Measured, MlaLayer

__all__ = [
    "MODULES",
    "attentions",
    "kv_layout_of",
    "layer_of",
    "layers_of",
    "quantization",
    "rope_layout",
]

MODULES = {
    "fused_qkv_a_proj": "fused_qkv_a_proj_with_mqa",
    "q_proj": "q_proj",
    "kv_a_proj_with_mqa": "kv_a_proj_with_mqa",
    "q_b_proj": "q_b_proj",
    "kv_b_proj": "kv_b_proj",
}
"""SGLang's attribute of each projection."""

_KINDS = {
    "UnquantizedLinearMethod": "none",
    "NPUW8A8Int8DynamicLinearMethod": "w8a8-dynamic",
    "NPUW8A8Int8LinearMethod": "w8a8-static",
    "NPUMXFP8LinearMethod": "mxfp8",
}
"""Quantization by the class of a projection's kernel, else of its linear method."""
_MODELSLIM = ("input_scale", "input_offset", "deq_scale", "quant_bias")
_FLOATS = ("bfloat16", "float16", "float32")


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _names(thing: object) -> list[str]:
    return [each.__name__ for each in type(thing).__mro__]


def attentions(model: Any) -> Iterator[Any]:
    """Yield the attention modules that go through the routed functions, in layer order."""
    found = [m for m in model.modules() if ATTENTION in _names(m)]
    yield from sorted(found, key=lambda m: int(m.layer_id))


def quantization(linear: Any, whom: str) -> str:
    """Return the quantization of one of SGLang's linear layers.

    Raises:
        ModelError: Its method is not known.
    """
    method = getattr(linear, "quant_method", None)
    kernel = getattr(getattr(linear, "scheme", None), "kernel", None)
    for thing in (kernel, method):
        for name in () if thing is None else _names(thing):
            kind = _KINDS.get(name)
            if kind == "w8a8-static" and not all(hasattr(linear, n) for n in _MODELSLIM):
                return "w8a8-static-symmetric"
            if kind is not None:
                return kind
    if (
        "Fp8LinearMethod" in _names(method)
        and getattr(linear, "weight_scale_inv", None) is not None
    ):
        # On A5 SGLang turns 128 x 128 blocks into the MXFP8 layout, whose scales are in pairs.
        return "mxfp8" if linear.weight_scale_inv.dim() == 3 else "fp8-block"
    raise ModelError(
        "the quantization of a projection is not known",
        whom=whom,
        why=f"its method is {type(kernel if kernel is not None else method).__name__}",
        remedy="set NPU_BACKEND_SGLANG=0 for this model, or teach the adapter this method",
        code="quant.mode",
    )


def rope_layout(attention: Any, settings: Settings) -> str:
    """Return the layout in which this layer's keys stand in SGLang's cache.

    Fused paths and ``npu_interleave_rope`` write halves. SGLang's YaRN embedding is that op on NPU;
    its plain one leaves pairs side by side, but for DSA layers with ``SGLANG_NPU_USE_MLAPO=1``,
    whose extend then converts. Layers without indexer extend by SGLang's own MHA, which writes what
    their embedding gives.

    Raises:
        ModelError: The embedding pairs component i with i + rope / 2.
    """
    rotary = attention.rotary_emb
    if rotary is None:
        return "none"
    if getattr(rotary, "is_neox_style", False):
        raise ModelError(
            "the rotary embedding pairs components half a head apart",
            whom=f"layer {attention.layer_id}",
            why="paths here rotate neighbouring pairs, as MLA checkpoints have them",
            remedy="set NPU_BACKEND_SGLANG=0 for this model",
            code="rope.layout",
        )
    if getattr(attention, "use_deepseek_yarn_rope", False):
        return "half"
    return "half" if settings.use_mlapo and attention.use_dsa else "interleaved"


def kv_layout_of(attention: Any, settings: Settings, dtype: str, kv_dtype: str) -> KvLayout:
    """Return the layout of a layer's cache, from the arguments: there is no pool yet.

    Raises:
        ModelError: SGLang keeps a cache that is not known here.
    """
    if kv_dtype in ("auto", dtype, "bf16"):
        held = dtype if kv_dtype == "auto" else "bfloat16" if kv_dtype == "bf16" else kv_dtype
    elif kv_dtype in ("fp8_e4m3", "float8_e4m3fn") and attention.use_dsa:
        held = "fp8_packed"
    elif kv_dtype in _FLOATS:
        held = kv_dtype
    else:
        raise ModelError(
            f"a KV cache of {kv_dtype} is not known",
            whom=f"layer {attention.layer_id}",
            why="SGLang's NPU pool holds floats, and for DSA layers packed fp8",
            remedy="use --kv-cache-dtype auto, or set NPU_BACKEND_SGLANG=0",
            code="kv.layout",
        )
    packed = held.endswith("_packed")
    return KvLayout(
        cache_mode="PA_NZ" if settings.fia_nz and not packed else "PA_BSND",
        dtype=held,
        block_size=settings.page_size,
        rope=rope_layout(attention, settings),
    )


def _projections(attention: Any) -> tuple[str, ...]:
    if attention.q_lora_rank is None:
        return ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    if not hasattr(attention, MODULES["fused_qkv_a_proj"]):
        raise ModelError(
            "the layer projects queries and latents apart",
            whom=f"layer {attention.layer_id}",
            why="paths here read one fused_qkv_a_proj",
            remedy="set NPU_BACKEND_SGLANG=0 for this model",
        )
    return ("fused_qkv_a_proj", "q_b_proj", "kv_b_proj")


def _check_numerics(attention: Any, modules: Iterable[Any]) -> None:
    """Refuse biases: no path here adds one."""
    norms = [attention.kv_a_layernorm, getattr(attention, "q_a_layernorm", None)]
    found = []
    for module in (*norms, *modules):
        bias = getattr(module, "bias", None)
        if bias is not None and bool(bias.count_nonzero()):
            found.append(f"{type(module).__name__} has a bias that is not zero")
    if found:
        raise ModelError(
            "a norm or projection of the layer has a bias",
            whom=f"layer {attention.layer_id}",
            why=found,
            remedy="set NPU_BACKEND_SGLANG=0 for this model",
            code="model.numerics",
        )


def _indexer(attention: Any) -> Indexer:
    if not attention.use_dsa:
        return Indexer()
    indexer = attention.indexer
    if indexer is None or (attention.skip_topk and not attention.is_nextn):
        return Indexer("shared")
    return Indexer("own", quantization(indexer.wq_b, f"layer {attention.layer_id}, indexer.wq_b"))


def _layout(tensor: Any) -> str:
    return "contiguous" if tensor.is_contiguous() else "strided"


def layer_of(
    attention: Any,
    settings: Settings,
    *,
    model_type: str = "",
    first_nextn: int = 0,
    kv_dtype: str | None = None,
) -> MlaLayer:
    """Return the record of one attention module, once its weights are loaded.

    Args:
        attention: SGLang's module.
        settings: What SGLang published.
        model_type: ``model_type`` of the config.
        first_nextn: Id of the first MTP layer: SGLang numbers a draft model's layers from 0.
        kv_dtype: What this runner's pool will hold; default: the server argument.

    Raises:
        ModelError: Something of it is not translated; with the reason.
    """
    whom = f"layer {attention.layer_id}"
    if attention.w_kc is None or attention.w_vc is None:
        raise ModelError(
            "w_kc or w_vc is not there",
            whom=whom,
            why="SGLang makes them of kv_b_proj while loading",
            remedy="load the model's weights before it is planned",
        )
    names = _projections(attention)
    modules = {name: getattr(attention, MODULES[name]) for name in names}
    _check_numerics(attention, modules.values())
    quant = {name: quantization(module, f"{whom}, {name}") for name, module in modules.items()}
    dtype = _dtype(attention.kv_a_layernorm.weight)
    shards = {"q_b_proj", "kv_b_proj", "q_proj"}
    measured = {
        name: Measured(
            _dtype(module.weight),
            module.weight.numel()
            * module.weight.element_size()
            * (settings.attn_tp_size if name in shards else 1),
        )
        for name, module in modules.items()
        # Where it is as the layer's dtype says, bytes follow from the sizes.
        if quant[name] == "none" and _dtype(module.weight) != dtype
    }
    held = _dtype(attention.w_kc)
    return MlaLayer(
        layer_id=int(attention.layer_id) + (first_nextn if attention.is_nextn else 0),
        is_nextn=bool(attention.is_nextn),
        model_type=model_type,
        hidden_size=attention.hidden_size,
        num_heads=attention.num_heads,
        q_lora_rank=attention.q_lora_rank,
        kv_lora_rank=attention.kv_lora_rank,
        qk_nope_head_dim=attention.qk_nope_head_dim,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        v_head_dim=attention.v_head_dim,
        use_rope=attention.rotary_emb is not None,
        dtype=dtype,
        quant=quant,
        w_dtype=None if held == dtype else held,
        w_kc_layout=_layout(attention.w_kc),
        w_vc_layout=_layout(attention.w_vc),
        kv_layout=kv_layout_of(attention, settings, dtype, kv_dtype or settings.kv_cache_dtype),
        indexer=_indexer(attention),
        rms_norm_eps=attention.kv_a_layernorm.variance_epsilon,
        measured=measured,
    )


def layers_of(
    model: Any, settings: Settings, *, config: Any = None, kv_dtype: str | None = None
) -> list[tuple[Any, MlaLayer]]:
    """Return the attention modules of a loaded model with their records, in layer order.

    Raises:
        ModelError: Some layer is not translated.
    """
    text = getattr(config, "text_config", None) or config
    # A model with two attentions a layer numbers them 2 * layer + i.
    per = 2 if "longcat" in str(getattr(config, "model_type", "")) else 1
    first = per * int(getattr(text, "num_hidden_layers", 0) or 0)
    return [
        (
            attention,
            layer_of(
                attention,
                settings,
                model_type=str(getattr(config, "model_type", "") or ""),
                first_nextn=first,
                kv_dtype=kv_dtype,
            ),
        )
        for attention in attentions(model)
    ]
