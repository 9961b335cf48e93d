"""Measured orders: where one was taken, it stands for the call order of the kernels it names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from packaging.utils import canonicalize_name

from npu_backend.catalog import KernelOrder
from npu_backend.planner.tables import Candidate, Pieces, Range

__all__ = ["arranged", "pieces_of"]


def _rank(candidate: Candidate, names: Sequence[str]) -> int | None:
    dist = canonicalize_name(candidate.plugin.dist)
    for index, name in enumerate(names):
        left, slash, right = name.partition("/")
        if name == candidate.strategy:
            return index
        if slash and right == candidate.strategy and canonicalize_name(left) == dist:
            return index
    return None


def arranged(
    ordered: Sequence[Candidate], fixed: Collection[Candidate], names: Sequence[str]
) -> list[Candidate]:
    """Return the candidates with those that an order names in that order, and the rest behind.

    They stand before everything that their own plugins offer. What another plugin offers before
    that keeps its place: a plugin that was installed after the measurement is asked first, as
    without it. Requested candidates stay in front.
    """
    ranks = {c: rank for c in ordered if c not in fixed and (rank := _rank(c, names)) is not None}
    if not ranks:
        return list(ordered)
    plugins = {c.plugin for c in ranks}
    first = next(i for i, c in enumerate(ordered) if c not in fixed and c.plugin in plugins)
    named = sorted(ranks, key=lambda c: (ranks[c], c.order))
    return [*ordered[:first], *named, *(c for c in ordered[first:] if c not in ranks)]


def pieces_of(
    ordered: Sequence[Candidate],
    fixed: Collection[Candidate],
    order: KernelOrder | None,
    batch_invariant: bool,
) -> Pieces:
    """Return the order that counts, by row range.

    Under batch invariance that is the one over all rows: a choice that moves with the rows would
    move results with the batch.
    """
    if order is None:
        return [((1, None), ordered)]
    whole = arranged(ordered, fixed, order.order)
    if batch_invariant or not order.rows:
        return [((1, None), whole)]
    pieces: list[tuple[Range, Sequence[Candidate]]] = []
    row = 1
    for (low, high), names in order.rows:
        if row < low:
            pieces.append(((row, low - 1), whole))
        pieces.append(((low, high), arranged(ordered, fixed, names)))
        if high is None:
            return pieces
        row = high + 1
    return [*pieces, ((row, None), whole)]
