"""From a model's ``config.json`` (or a bundled description) to its attention layers.

Which layers are MLA, which are MTP, which have an indexer, and how the checkpoint names them.
Quantization is the subject of :mod:`npu_backend.model.quantization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from npu_backend.errors import ModelError
from npu_backend.model.fields import MAX_LAYERS, Fields
from npu_backend.model.hybrid import mla_ids
from npu_backend.model.indexers import read_indexers
from npu_backend.model.records import ROPE_IS_EVEN
from npu_backend.model.weights import DTYPE_BYTES

__all__ = ["AttentionSite", "ModelConfig", "layer_count", "nextn_count", "parse_config"]

NESTED = ("text_config", "language_config", "llm_config")
"""Where multimodal configs keep the language model's fields."""

NEXTN_KEYS = (
    "num_nextn_predict_layers",
    "num_nextn_predict_layer",
    "num_mtp_layers",
    "mtp_num_layers",
    "mtp_num_hidden_layers",
)
"""Spellings of the number of MTP layers."""

FLOAT_DTYPES = frozenset(name for name in DTYPE_BYTES if "float" in name and "e8m0" not in name)
"""What ``torch_dtype`` of a config may name: what weights that are not quantized are."""

TWO_ATTENTIONS = frozenset({"longcat_flash"})
"""Model types with two attentions per layer: ``layers.L.self_attn.0`` and ``.1``."""

_PLAIN_ROOTS = ("model.", "")
_NESTED_ROOTS = (
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "model.",
    "",
)
_GLM_NESTED_ROOTS = ("model.language_model.", "language_model.model.", "model.", "")
# In the checkpoints of multimodal models the language model's root differs by family; where no
# name is at hand to tell, the first of the list stands.

_REMEDY = "correct the config, or give the one that the checkpoint was published with"
_DIMS = (
    ("hidden_size", 1),
    ("num_attention_heads", 1),
    ("kv_lora_rank", 1),
    ("qk_nope_head_dim", 1),
    ("qk_rope_head_dim", 0),
    ("v_head_dim", 1),
)


@frozen
class AttentionSite:
    """One attention in the model.

    Args:
        layer_id: Its id in every plan.
        block: The checkpoint's name of the decoder layer without the root, as ``layers.3``.
        part: ``.0`` or ``.1`` where a layer has two attentions.
        is_nextn: An MTP layer.
        indexer: ``own``, ``shared`` or ``none``.
    """

    layer_id: int
    block: str
    part: str = ""
    is_nextn: bool = False
    indexer: str = "none"

    def module(self, root: str, attention: str = "self_attn") -> str:
        """Return the attention module's name in a checkpoint with that root."""
        return f"{root}{self.block}.{attention}{self.part}"


@frozen
class ModelConfig:
    """What a config says of its attention layers.

    Args:
        where: The file, or the bundled model, for messages.
        model_type: The outermost ``model_type``.
        types: Every ``model_type`` on the way to the language model.
        num_hidden_layers: Decoder layers, attention of any kind.
        dims: Arguments of :class:`~npu_backend.model.records.MlaLayer` that all layers share.
        sites: The MLA attentions in order of their ids.
        roots: Roots that the checkpoint's names may have, the likeliest first.
        quantization: ``quantization_config``, unread.
        dtype: What ``torch_dtype`` or ``dtype`` says; None where neither does, or says ``auto``.
        assumed: What was assumed because the config does not say it.
    """

    where: str
    model_type: str
    types: frozenset[str]
    num_hidden_layers: int
    dims: Mapping[str, Any]
    sites: tuple[AttentionSite, ...]
    roots: tuple[str, ...]
    quantization: Mapping[str, Any] | None = None
    dtype: str | None = None
    assumed: tuple[str, ...] = ()


def _language_model(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the part of the config that has the MLA fields."""
    nested: list[Mapping[str, Any]] = [raw[key] for key in NESTED if isinstance(raw.get(key), dict)]
    for section in (raw, *nested):
        if section.get("kv_lora_rank") is not None and section.get("use_mla") is not False:
            return section
    kind = raw.get("model_type")
    name = kind if isinstance(kind, str) and kind else "the model"
    why = ["it has no kv_lora_rank, neither at the top nor in " + ", ".join(NESTED)]
    if any(section.get("use_mla") is False for section in (raw, *nested)):
        why = ["it says use_mla = false"]
    raise ModelError(
        f"{name} is not an MLA model",
        whom=where,
        why=why,
        remedy="give a model with multi-head latent attention: its config has kv_lora_rank, "
        "qk_nope_head_dim, qk_rope_head_dim and v_head_dim",
    )


def layer_count(fields: Fields, types: frozenset[str]) -> int:
    """Return the number of decoder layers.

    LongCat's configs call it num_layers, and some writers add num_hidden_layers for the number of
    caches, which is twice that.
    """
    if not types & TWO_ATTENTIONS or fields.raw.get("num_layers") is None:
        return fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    layers = fields.integer("num_layers", 1, MAX_LAYERS)
    other = fields.optional("num_hidden_layers", 1, 2 * MAX_LAYERS)
    if other not in (None, layers, 2 * layers):
        fields.problems.append(f"num_layers is {layers} and num_hidden_layers is {other}")
    return layers


def nextn_count(fields: Fields, types: frozenset[str], assumed: list[str]) -> int:
    """Return the number of MTP layers."""
    said = {key: fields.optional(key, 0, MAX_LAYERS) for key in NEXTN_KEYS}
    given = {key: count for key, count in said.items() if count is not None}
    if len(set(given.values())) > 1:
        pairs = " and ".join(f"{key} is {count}" for key, count in given.items())
        fields.problems.append(f"the numbers of MTP layers disagree: {pairs}")
    if given:
        return next(iter(given.values()))
    if types & TWO_ATTENTIONS:
        # Hosts take one where LongCat's config does not say.
        assumed.append("num_nextn_predict_layers is not given: one MTP layer, as hosts take it")
        return 1
    return 0


def _sites(
    fields: Fields, types: frozenset[str], layers: int, assumed: list[str]
) -> list[AttentionSite]:
    per = fields.optional("mla_per_layer", 1, 2) or (2 if types & TWO_ATTENTIONS else 1)
    nextn = nextn_count(fields, types, assumed)
    indexers = read_indexers(fields, types, layers, per, nextn, assumed)
    sites: list[AttentionSite] = []
    for layer in mla_ids(fields.raw, layers, fields.problems):
        for i in range(per):
            at = per * layer + i
            kind = "none" if indexers is None else indexers.kind(layer, at)
            part = f".{i}" if per > 1 else ""
            sites.append(AttentionSite(at, f"layers.{layer}", part, False, kind))
    first = next((site for site in sites if site.indexer != "none"), None)
    if first is not None and first.indexer == "shared":
        fields.problems.append(
            f"layer {first.layer_id} shares an index, but no layer before it has one"
        )
    for i in range(nextn):
        # LongCat keeps its MTP layer apart; the others number it on after the last layer.
        block = f"mtp.layers.{i}" if per > 1 else f"layers.{layers + i}"
        at = per * layers + i
        kind = "none" if indexers is None else indexers.kind(layers + i, at, is_nextn=True)
        sites.append(AttentionSite(at, block, "", True, kind))
    return sites


def _quantization(
    raw: Mapping[str, Any], text: Mapping[str, Any], problems: list[str]
) -> Mapping[str, Any] | None:
    found: list[Mapping[str, Any]] = []
    for section in (raw, text):
        for key in ("quantization_config", "compression_config"):
            value = section.get(key)
            if isinstance(value, dict):
                found += [value] if value else []
            elif value is not None:
                problems.append(f"{key} is a {type(value).__name__}, not an object")
    if any(other != found[0] for other in found):
        problems.append("the config holds two quantization_config that differ")
    return found[0] if found else None


def _dtype(raw: Mapping[str, Any], text: Mapping[str, Any], problems: list[str]) -> str | None:
    """Return the dtype that the config says: the language model's own, else that of the whole."""
    for section in (text, raw):
        for key in ("torch_dtype", "dtype"):
            value = section.get(key)
            if value is None:
                continue
            name = value.removeprefix("torch.") if isinstance(value, str) else None
            if name in FLOAT_DTYPES:
                return name
            if name != "auto":
                known = ", ".join(sorted(FLOAT_DTYPES))
                problems.append(f"{key} is {value!r:.80}, not the dtype of a model ({known})")
            return None
    return None


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Return what a config says of its attention layers.

    Args:
        raw: The config as read.
        where: The file, or the bundled model, for messages.

    Raises:
        ModelError: The model is not MLA, or the config is incomplete or contradictory.
    """
    text = _language_model(raw, where)
    fields = Fields(text)
    names = [section.get("model_type") for section in (raw, text)]
    types = frozenset(name for name in names if isinstance(name, str) and name)
    if any(name is not None and not isinstance(name, str) for name in names):
        fields.problems.append("model_type is not a text")
    assumed: list[str] = []
    dims: dict[str, Any] = {key: fields.integer(key, low) for key, low in _DIMS}
    dims["num_heads"] = dims.pop("num_attention_heads")
    dims["q_lora_rank"] = fields.optional("q_lora_rank", 1)
    dims["use_rope"] = not any([fields.flag("mla_use_nope"), fields.flag("skip_rope")])
    if dims["use_rope"] and dims["qk_rope_head_dim"] % 2:
        fields.problems.append(f"qk_rope_head_dim is {dims['qk_rope_head_dim']}: {ROPE_IS_EVEN}")
    eps = text.get("rms_norm_eps")
    if eps is not None:
        good = isinstance(eps, (int, float)) and not isinstance(eps, bool)
        if not good or not 0 < eps < 1:
            fields.problems.append(f"rms_norm_eps is {eps!r:.80}, not a number between 0 and 1")
        dims["rms_norm_eps"] = eps
    if "q_lora_rank" not in text:
        assumed.append("q_lora_rank is not given: the layers have q_proj, as hosts take it")
    dtype = _dtype(raw, text, fields.problems)
    layers = layer_count(fields, types)
    quantization = _quantization(raw, text, fields.problems)
    sites = [] if fields.problems else _sites(fields, types, layers, assumed)
    if fields.problems:
        raise ModelError(
            "the model's config is incomplete or contradictory",
            whom=where,
            why=fields.problems,
            remedy=_REMEDY,
        )
    roots: tuple[str, ...] = _PLAIN_ROOTS
    if text is not raw:
        roots = _GLM_NESTED_ROOTS if any("glm" in name for name in types) else _NESTED_ROOTS
    return ModelConfig(
        where=where,
        model_type=next((name for name in names if isinstance(name, str) and name), ""),
        types=types,
        num_hidden_layers=layers,
        dims=dims,
        sites=tuple(sites),
        roots=roots,
        quantization=quantization,
        dtype=dtype,
        assumed=tuple(assumed),
    )
