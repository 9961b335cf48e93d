"""Cells, candidates, and who serves which cell. Knows nothing of weights or requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from npu_backend.deployment import Phase, Reach
from npu_backend.offers import Offer, PluginInfo
from npu_backend.plan import TableEntry

__all__ = [
    "Candidate",
    "Cells",
    "Pieces",
    "Range",
    "Served",
    "cells_of_reach",
    "entries",
    "gaps",
    "overlap",
    "serve",
]

Range = tuple[int, "int | None"]
Cells = Mapping[Phase, tuple[Range, ...]]
"""Row ranges to serve, by phase; disjoint and ascending."""


@frozen(cache_hash=True)
class Candidate:
    """A legal offer, its plugin, and its place in the call order."""

    offer: Offer
    plugin: PluginInfo
    order: int

    @property
    def strategy(self) -> str:
        return self.offer.strategy


@frozen
class Served:
    """One run of rows of one phase, and who serves it (None: nobody)."""

    phase: Phase
    tokens: Range
    by: Candidate | None


def cells_of_reach(reach: Reach, without: Iterable[Phase] = ()) -> Cells:
    """Return every reachable cell, rows starting at 1, except phases served elsewhere."""
    left_out = set(without)
    return {p: ((1, bound),) for p, bound in reach.items() if p not in left_out}


def _intersect(a: Range, b: Range) -> Range | None:
    low = max(a[0], b[0])
    highs = [h for h in (a[1], b[1]) if h is not None]
    high = min(highs) if highs else None
    return None if high is not None and high < low else (low, high)


def _subtract(ranges: Sequence[Range], taken: Range) -> list[Range]:
    left: list[Range] = []
    for low, high in ranges:
        common = _intersect((low, high), taken)
        if common is None:
            left.append((low, high))
            continue
        if low < common[0]:
            left.append((low, common[0] - 1))
        if common[1] is not None and (high is None or common[1] < high):
            left.append((common[1] + 1, high))
    return left


def overlap(offer: Offer, cells: Cells) -> dict[Phase, list[Range]]:
    """Return the part of the cells that an offer's envelope covers."""
    found: dict[Phase, list[Range]] = {}
    for phase, ranges in cells.items():
        if phase in offer.envelope.phases:
            parts = [p for r in ranges if (p := _intersect(r, offer.envelope.tokens))]
            if parts:
                found[phase] = parts
    return found


def covers(offer: Offer, cells: Cells, phases: Iterable[Phase]) -> bool:
    """Whether an offer covers every row of the given phases' cells."""
    part = overlap(offer, cells)
    return all(tuple(part.get(p, ())) == tuple(cells[p]) for p in phases)


Pieces = Sequence[tuple[Range, Sequence[Candidate]]]
"""Row ranges, ascending, with the order that counts in each."""


def serve(cells: Cells, pieces: Pieces) -> list[Served]:
    """Give each cell to the first candidate that covers it; what nobody covers has ``by`` None.

    Args:
        cells: What must be served.
        pieces: The order of candidates by row range; one piece where rows do not matter.
    """
    if len(pieces) == 1:
        return _serve(cells, pieces[0][1])
    parts: list[Served] = []
    for tokens, ordered in pieces:
        inside = {
            phase: tuple(part for r in ranges if (part := _intersect(r, tokens)))
            for phase, ranges in cells.items()
        }
        parts += _serve({p: r for p, r in inside.items() if r}, ordered)
    return _joined(parts, cells)


def _joined(parts: Iterable[Served], cells: Cells) -> list[Served]:
    """Put together adjacent runs of one phase that one candidate serves."""
    joined: list[Served] = []
    place = list(cells)
    for run in sorted(parts, key=lambda s: (place.index(s.phase), s.tokens[0])):
        before = joined[-1] if joined else None
        if (
            before is not None
            and (before.phase, before.by) == (run.phase, run.by)
            and before.tokens[1] is not None
            and before.tokens[1] + 1 == run.tokens[0]
        ):
            joined[-1] = Served(run.phase, (before.tokens[0], run.tokens[1]), run.by)
        else:
            joined.append(run)
    return joined


def _serve(cells: Cells, ordered: Sequence[Candidate]) -> list[Served]:
    served: list[Served] = []
    for phase, ranges in cells.items():
        left = list(ranges)
        for candidate in ordered:
            if not left:
                break
            if phase not in candidate.offer.envelope.phases:
                continue
            tokens = candidate.offer.envelope.tokens
            taken = [part for r in left if (part := _intersect(r, tokens))]
            if taken:
                served.extend(Served(phase, part, candidate) for part in taken)
                left = _subtract(left, tokens)
        served.extend(Served(phase, part, None) for part in left)
    return served


def gaps(served: Iterable[Served]) -> list[tuple[Phase, Range]]:
    """Return what nobody serves."""
    return [(s.phase, s.tokens) for s in served if s.by is None]


def entries(
    served: Iterable[Served], ordered: Sequence[Candidate], order: str = ""
) -> tuple[TableEntry, ...]:
    """Return the table: one entry per strategy and equal range, in order of preference; by rows
    where a measured order moves the preference with them.

    Args:
        served: Who serves what.
        ordered: The candidates in order of preference.
        order: Source of a measured order, where one counts.
    """
    place = {candidate: index for index, candidate in enumerate(ordered)}
    groups: dict[tuple[int, Range], list[Phase]] = {}
    for run in served:
        if run.by is not None:
            groups.setdefault((place[run.by], run.tokens), []).append(run.phase)
    rows = []
    keys = sorted(groups, key=lambda key: (key[1][0] if order else 0, key[0], key[1][0]))
    for index, tokens in keys:
        candidate, phases = ordered[index], set(groups[index, tokens])
        rows.append(
            TableEntry(
                strategy=candidate.strategy,
                provider=candidate.plugin.provider,
                phases=tuple(p for p in Phase if p in phases),
                tokens=tokens,
                offer=candidate.offer,
                plugin=candidate.plugin,
                order=order,
            )
        )
    return tuple(rows)
