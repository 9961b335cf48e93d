"""Which layers of a hybrid model are MLA: four ways in which configs say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["mla_ids"]

LINEAR_WORDS = ("linear", "kda", "mamba", "delta", "recurrent", "lightning", "conv")
"""Parts of the names that ``layer_types`` gives to layers without softmax attention."""


def _ids(value: Any, key: str, problems: list[str]) -> frozenset[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 1 << 31 for i in value
    ):
        problems.append(f"{key} is not a list of layer ids")
        return None
    return frozenset(value)


def _within(ids: frozenset[int], key: str, low: int, layers: int, problems: list[str]) -> None:
    outside = sorted(i for i in ids if not low <= i < layers + low)
    if outside:
        problems.append(f"{key} names layer {outside[-1]}, but the model has {layers} layers")


def _by_layer_types(
    raw: Mapping[str, Any], layers: int, problems: list[str]
) -> frozenset[int] | None:
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        problems.append("layer_types is not a list of names")
        return None
    if len(kinds) < layers:
        problems.append(f"layer_types has {len(kinds)} entries for {layers} layers")
        return None
    return frozenset(
        i for i in range(layers) if not any(word in kinds[i].lower() for word in LINEAR_WORDS)
    )


def _by_linear_attn_config(
    raw: Mapping[str, Any], layers: int, problems: list[str]
) -> list[frozenset[int]] | None:
    """Return the readings of kda_layers and full_attn_layers that are possible, likeliest first.

    Kimi's configs count from 1 (hosts test ``id + 1``), GLM's from 0. An id 0, or one equal to the
    number of layers, tells them apart.
    """
    section = raw.get("linear_attn_config")
    if section is None:
        return None
    if not isinstance(section, dict):
        problems.append("linear_attn_config is not an object")
        return None
    linear = _ids(section.get("kda_layers"), "kda_layers", problems)
    full = _ids(section.get("full_attn_layers"), "full_attn_layers", problems)
    if linear is None and full is None:
        return None
    both = (linear or frozenset()) & (full or frozenset())
    if both:
        problems.append(f"layer {min(both)} is in kda_layers and in full_attn_layers")
        return None
    named = (linear or frozenset()) | (full or frozenset())
    if 0 in named and layers in named:
        problems.append(
            f"kda_layers and full_attn_layers name both 0 and {layers}, but the model has "
            f"{layers} layers"
        )
        return None
    bases = (0,) if 0 in named else (1,) if layers in named else (1, 0)
    for key, ids in (("kda_layers", linear), ("full_attn_layers", full)):
        if ids is not None:
            _within(ids, key, bases[0], layers, problems)
    everything = frozenset(range(layers))
    if linear is None:
        return [frozenset(i - base for i in full or ()) & everything for base in bases]
    return [everything - frozenset(i - base for i in linear) for base in bases]


def mla_ids(raw: Mapping[str, Any], layers: int, problems: list[str]) -> list[int]:
    """Return the ids of the MLA layers in order; what is wrong is added to ``problems``.

    ``layer_types``, ``mla_layer_ids`` (bundled models), ``linear_attn_config`` and
    ``layer_group_size`` (Bailing: the last of each group, and what is left over) are understood.
    Where a config has several of the first three, they must agree.
    """
    listed = _ids(raw.get("mla_layer_ids"), "mla_layer_ids", problems)
    if listed is not None:
        _within(listed, "mla_layer_ids", 0, layers, problems)
    typed = _by_layer_types(raw, layers, problems)
    readings = _by_linear_attn_config(raw, layers, problems)
    if problems:
        return []
    said = {"layer_types": typed, "mla_layer_ids": listed}
    given = {key: ids for key, ids in said.items() if ids is not None}
    if readings is not None:
        agreeing = [ids for ids in readings if all(ids == other for other in given.values())]
        given["linear_attn_config"] = agreeing[0] if agreeing else readings[0]
    if len(set(given.values())) > 1:
        problems.append(
            "; ".join(f"{key}: the MLA layers are {sorted(ids)}" for key, ids in given.items())
        )
    found = next(iter(given.values())) if given else _by_group(raw, layers, problems)
    if not found and not problems:
        problems.append("none of its layers is an MLA layer")
    return sorted(found)


def _by_group(raw: Mapping[str, Any], layers: int, problems: list[str]) -> frozenset[int]:
    size = raw.get("layer_group_size")
    if size is None:
        return frozenset(range(layers))
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 1 << 31:
        problems.append(f"layer_group_size is {size!r:.80}, not a positive integer")
        return frozenset()
    grouped = layers // size * size
    return frozenset(i for i in range(layers) if (i + 1) % size == 0 or i >= grouped)
