"""From a model's ``config.json`` (or a bundled description) to its attention layers.

Which layers are MLA, which are MTP, which have an indexer, and how the checkpoint names them.
Quantization is the subject of :mod:`npu_backend.model.quantization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from attrs import field, frozen

from npu_backend.errors import ModelError
from npu_backend.model.hybrid import mla_ids

__all__ = ["AttentionSite", "ModelConfig", "parse_config"]

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

DSA_KEYS = ("index_topk", "index_head_dim", "index_n_heads")
DSA_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa", "glm5_next"})
DSA_LAYER_TYPE = "deepseek_sparse_attention"

TWO_ATTENTIONS = frozenset({"longcat_flash"})
"""Model types with two attentions per layer: ``layers.L.self_attn.0`` and ``.1``."""

MAX_LAYERS = 4096
MAX_DIM = 1 << 24
"""Bounds beyond which a size is a mistake in the file; no model is within a factor of ten."""

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
    assumed: tuple[str, ...] = ()


@frozen
class _Fields:
    """Checked access to a config's fields: problems are collected, so that one error has all."""

    raw: Mapping[str, Any]
    problems: list[str] = field(factory=list)

    def integer(self, key: str, low: int, high: int = MAX_DIM) -> int:
        """Return an integer field; ``low`` where it is missing or wrong, which is a problem."""
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            said = "is missing" if value is None else f"is {value!r:.80}, not an integer"
            self.problems.append(f"{key} {said}")
        elif not low <= value <= high:
            self.problems.append(f"{key} is {_brief(value)}, not between {low} and {high}")
        else:
            return value
        return low

    def optional(self, key: str, low: int, high: int = MAX_DIM) -> int | None:
        """Return an integer field, or None where it is missing or null."""
        return None if self.raw.get(key) is None else self.integer(key, low, high)

    def flag(self, key: str) -> bool:
        """Return a boolean field; False where it is missing or null."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key} is {value!r:.80}, neither true nor false")
        return value is True


def _brief(value: int) -> str:
    # Python refuses to print integers of thousands of digits, and nobody would read them.
    return str(value) if abs(value) < 1 << 64 else "an integer beyond 64 bits"


def _language_model(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the part of the config that has the MLA fields."""
    nested = [raw[key] for key in NESTED if isinstance(raw.get(key), dict)]
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


def _layer_count(fields: _Fields, types: frozenset[str]) -> int:
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


def _nextn_count(fields: _Fields, types: frozenset[str], assumed: list[str]) -> int:
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


def _shared_flags(fields: _Fields, layers: int, per: int, nextn: int) -> list[bool] | None:
    """Return which layers share another one's index, or None where all have their own."""
    raw = fields.raw
    types, pattern = raw.get("indexer_types"), raw.get("index_topk_pattern")
    if types is not None:
        if not isinstance(types, list) or any(t not in ("full", "shared") for t in types):
            fields.problems.append("indexer_types is not a list of 'full' and 'shared'")
            return None
        if len(types) not in range(layers, layers + nextn + 1) and len(types) not in range(
            layers * per, layers * per + nextn + 1
        ):
            fields.problems.append(
                f"indexer_types has {len(types)} entries for {layers} layers and {nextn} MTP layers"
            )
        return [t == "shared" for t in types]
    if pattern is not None:
        if not isinstance(pattern, (str, list)) or any(p not in ("F", "S") for p in pattern):
            fields.problems.append("index_topk_pattern is not made of F and S")
            return None
        return [p == "S" for p in pattern]
    period = fields.optional("index_topk_freq", 1, MAX_LAYERS) or 1
    offset = fields.optional("index_skip_topk_offset", 0, MAX_LAYERS)
    if period == 1:
        return None
    # One index serves `period` layers; the first `offset` layers all have their own.
    first = 2 if offset is None else offset
    return [max(i - first + 1, 0) % period != 0 for i in range(layers)]


def _indexers(fields: _Fields, types: frozenset[str], layers: int, per: int, nextn: int,
              assumed: list[str]) -> tuple[bool, list[bool] | None]:
    """Return whether the model has indexers, and which layers share one."""
    sizes = [fields.optional(key, 0) for key in DSA_KEYS]
    if not any(sizes) and not types & DSA_TYPES:
        return False, None
    shared = _shared_flags(fields, layers, per, nextn)
    said = ("indexer_types", "index_topk_pattern", "index_topk_freq")
    if all(fields.raw.get(key) is None for key in said):
        assumed.append("no indexer_types: every layer has an indexer of its own")
    return True, shared


def _sites(fields: _Fields, types: frozenset[str], layers: int, assumed: list[str],
           ) -> list[AttentionSite]:
    raw = fields.raw
    per = fields.optional("mla_per_layer", 1, 2) or (2 if types & TWO_ATTENTIONS else 1)
    nextn = _nextn_count(fields, types, assumed)
    dsa, shared = _indexers(fields, types, layers, per, nextn, assumed)
    layer_types = raw.get("layer_types")
    sparse_only = isinstance(layer_types, list) and DSA_LAYER_TYPE in layer_types
    by_attention = shared is not None and len(shared) >= per * layers

    def indexer(layer: int, attention: int) -> str:
        if not dsa or (sparse_only and layer < layers and layer_types[layer] != DSA_LAYER_TYPE):
            return "none"
        at = attention if by_attention else layer
        return "shared" if shared is not None and at < len(shared) and shared[at] else "own"

    sites = [
        AttentionSite(per * layer + part, f"layers.{layer}", f".{part}" if per > 1 else "", False,
                      indexer(layer, per * layer + part))
        for layer in mla_ids(raw, layers, fields.problems)
        for part in range(per)
    ]
    first = next((site for site in sites if site.indexer != "none"), None)
    if first is not None and first.indexer == "shared":
        fields.problems.append(
            f"layer {first.layer_id} shares an index, but no layer before it has one"
        )
    for i in range(nextn):
        # LongCat keeps its MTP layer apart; the others number it on after the last layer.
        block = f"mtp.layers.{i}" if per > 1 else f"layers.{layers + i}"
        kind = indexer(layers + i, per * layers + i)
        sites.append(AttentionSite(per * layers + i, block, "", True, kind))
    return sites


def _quantization(raw: Mapping[str, Any], text: Mapping[str, Any],
                  problems: list[str]) -> Mapping[str, Any] | None:
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


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Return what a config says of its attention layers.

    Args:
        raw: The config as read.
        where: The file, or the bundled model, for messages.

    Raises:
        ModelError: The model is not MLA, or the config is incomplete or contradictory.
    """
    text = _language_model(raw, where)
    fields = _Fields(text)
    names = [section.get("model_type") for section in (raw, text)]
    types = frozenset(name for name in names if isinstance(name, str) and name)
    if any(name is not None and not isinstance(name, str) for name in names):
        fields.problems.append("model_type is not a text")
    assumed: list[str] = []
    dims: dict[str, Any] = {key: fields.integer(key, low) for key, low in _DIMS}
    dims["num_heads"] = dims.pop("num_attention_heads")
    dims["q_lora_rank"] = fields.optional("q_lora_rank", 1)
    dims["use_rope"] = not any([fields.flag("mla_use_nope"), fields.flag("skip_rope")])
    eps = text.get("rms_norm_eps")
    if eps is not None:
        good = isinstance(eps, (int, float)) and not isinstance(eps, bool)
        if not good or not isfinite(eps) or not 0 < eps < 1:
            fields.problems.append(f"rms_norm_eps is {eps!r:.80}, not a number between 0 and 1")
        dims["rms_norm_eps"] = eps
    if "q_lora_rank" not in text:
        assumed.append("q_lora_rank is not given: the layers have q_proj, as hosts take it")
    layers = _layer_count(fields, types)
    quantization = _quantization(raw, text, fields.problems)
    sites = [] if fields.problems else _sites(fields, types, layers, assumed)
    if fields.problems:
        raise ModelError(
            "the model's config is incomplete or contradictory",
            whom=where,
            why=fields.problems,
            remedy=_REMEDY,
        )
    nested = text is not raw
    roots = _PLAIN_ROOTS
    if nested:
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
        assumed=tuple(assumed),
    )
