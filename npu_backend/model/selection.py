"""Choosing layers by id: ``0-2,78``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from npu_backend.errors import ModelError
from npu_backend.values import items

__all__ = ["id_ranges", "select_ids"]

_PART = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")


def id_ranges(ids: Iterable[int]) -> str:
    """Return ids as people write them: ``0-2, 78``."""
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and runs[-1][1] + 1 == i:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def select_ids(layers: str | Iterable[int], known: Sequence[int], where: str) -> frozenset[int]:
    """Return the ids that a selection names.

    A single id must be that of an MLA layer. A range such as ``0-11`` takes the MLA layers inside,
    so that it can be written for hybrid models too; its ends must be within the model.

    Args:
        layers: ``0-2,78``, or ids.
        known: Ids of the model's MLA layers.
        where: The model, for messages.

    Raises:
        ModelError: The selection cannot be read, names an unknown id, or is empty.
    """
    chosen: set[int] = set()
    problems: list[str] = []
    given = layers.split(",") if isinstance(layers, str) else layers
    parts = items(ModelError, "a selection of layers", given, 'ids such as [0, 1], or "0-2,78"')
    for part in parts:
        if isinstance(part, int) and not isinstance(part, bool):
            first = last = part
        else:
            match = _PART.fullmatch(part) if isinstance(part, str) else None
            if match is None:
                problems.append(f"{part!r:.80} is neither an id nor a range such as 0-2")
                continue
            first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            problems.append(f"the range {first}-{last} runs backwards")
        elif first == last and first not in known:
            problems.append(f"{first} is not the id of an MLA layer")
        elif last > known[-1]:
            problems.append(f"the range {first}-{last} ends beyond the last layer, {known[-1]}")
        else:
            chosen.update(i for i in known if first <= i <= last)
    if not chosen and not problems:
        problems.append("no layer is left")
    if problems:
        raise ModelError(
            "the selection of layers cannot be used",
            whom=where,
            why=problems,
            remedy=f"the MLA layers are {id_ranges(known)}",
        )
    return frozenset(chosen)
