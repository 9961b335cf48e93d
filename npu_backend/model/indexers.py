"""Which layers have a sparse-attention indexer of their own, and which share another one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from npu_backend.model.fields import MAX_LAYERS, Fields

__all__ = ["Indexers", "read_indexers"]

DSA_KEYS = ("index_topk", "index_head_dim", "index_n_heads")
DSA_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa", "glm5_next"})
DSA_LAYER_TYPE = "deepseek_sparse_attention"

_LIST_KEYS = ("indexer_types", "index_topk_pattern", "index_topk_freq")


@frozen
class Indexers:
    """The indexers of a model.

    Args:
        shared: Whether an attention shares another one's index, by layer or, where a layer has two
            attentions and the list is that long, by attention; those beyond its end do not.
        by_attention: Whether ``shared`` counts attentions.
        sparse: The layers that are sparse at all; None for all, and for MTP layers.
    """

    shared: tuple[bool, ...] = ()
    by_attention: bool = False
    sparse: frozenset[int] | None = None

    def kind(self, layer: int, attention: int, *, is_nextn: bool = False) -> str:
        """Return ``own``, ``shared`` or ``none`` for an attention."""
        if self.sparse is not None and layer not in self.sparse and not is_nextn:
            return "none"
        at = attention if self.by_attention else layer
        return "shared" if at < len(self.shared) and self.shared[at] else "own"


def _shared_flags(fields: Fields, layers: int, per: int, nextn: int) -> list[bool]:
    """Return which layers share another one's index; none where nothing says so."""
    raw = fields.raw
    types, pattern = raw.get("indexer_types"), raw.get("index_topk_pattern")
    if types is not None:
        if not isinstance(types, list) or any(t not in ("full", "shared") for t in types):
            fields.problems.append("indexer_types is not a list of 'full' and 'shared'")
            return []
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
            return []
        return [p == "S" for p in pattern]
    period = fields.optional("index_topk_freq", 1, MAX_LAYERS) or 1
    offset = fields.optional("index_skip_topk_offset", 0, MAX_LAYERS)
    if period == 1:
        return []
    # One index serves `period` layers; the first `offset` layers all have their own.
    first = 2 if offset is None else offset
    return [max(i - first + 1, 0) % period != 0 for i in range(layers)]


def _sparse(raw: Mapping[str, Any]) -> frozenset[int] | None:
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list) or DSA_LAYER_TYPE not in kinds:
        return None
    return frozenset(i for i, kind in enumerate(kinds) if kind == DSA_LAYER_TYPE)


def read_indexers(
    fields: Fields, types: frozenset[str], layers: int, per: int, nextn: int, assumed: list[str]
) -> Indexers | None:
    """Return the indexers of a model, or None where it has none.

    Args:
        fields: The config.
        types: Its model types; some mean sparse attention by themselves.
        layers: Decoder layers.
        per: Attentions of a layer.
        nextn: MTP layers; they have an indexer of their own unless the list says otherwise.
        assumed: Notes of what was assumed, extended here.
    """
    sizes = [fields.optional(key, 0) for key in DSA_KEYS]
    if not any(sizes) and not types & DSA_TYPES:
        return None
    if all(fields.raw.get(key) is None for key in _LIST_KEYS):
        assumed.append("no indexer_types: every layer has an indexer of its own")
    shared = tuple(_shared_flags(fields, layers, per, nextn))
    return Indexers(shared, len(shared) >= per * layers, _sparse(fields.raw))
