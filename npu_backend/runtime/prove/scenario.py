"""Which steps a layer is run through: sequences, their slots, and row counts for every table entry.

Every step writes new tokens of some sequences and attends to all of their tokens. A token's hidden
state depends on its sequence and position alone, so one reference serves every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen

from npu_backend.deployment import Phase
from npu_backend.model.records import KvLayout
from npu_backend.plan import LayerPlan, Table, TableEntry

__all__ = ["HOST_MHA", "ROW_CAP", "Part", "Scenario", "Step", "Track", "make_scenario"]

HOST_MHA = "host:mha"
ROW_CAP = 64
"""Largest row count that is run unasked; boundaries above are named as not run."""

_TOKENS_A_SEQUENCE = {Phase.DECODE: 1, Phase.TARGET_VERIFY: 3, Phase.DRAFT_EXTEND: 2}
_LONG = 128
"""Longest history that a writer fills only so that a sequence lies on the edge of a block."""
_SHORT = 32
"""Likewise where extend steps fill it."""


@frozen
class Track:
    """One sequence.

    Args:
        history: Tokens in the cache before any step.
        length: Tokens that steps may reach.
        blocks: Its cache blocks, in order.
    """

    history: int
    length: int
    blocks: tuple[int, ...]

    def slots(self, start: int, count: int, block_size: int) -> torch.Tensor:
        """Return the slots of some positions, int64."""
        at = torch.arange(start, start + count)
        return torch.tensor(self.blocks)[at // block_size] * block_size + at % block_size


@frozen
class Part:
    """A run of tokens of one sequence."""

    track: int
    start: int
    count: int


@frozen
class Step:
    """One step: a phase, and its tokens; in phase idle only padded rows."""

    phase: Phase
    rows: int
    parts: tuple[Part, ...] = ()
    fills: bool = False


@frozen
class Scenario:
    """Everything that is run, twice: before and after the release.

    Args:
        tracks: The sequences.
        fill: Extend steps that fill the histories; empty where a writer does it.
        steps: The steps.
        num_blocks: Blocks of the cache; the first ``pad_blocks`` hold padding only.
        pad_blocks: Blocks of padded rows.
        layout: The cache's layout.
        skipped: What is not run, and why.
    """

    tracks: tuple[Track, ...]
    fill: tuple[Step, ...]
    steps: tuple[Step, ...]
    num_blocks: int
    pad_blocks: int
    layout: KvLayout
    skipped: tuple[str, ...]

    @property
    def first_asked(self) -> list[int]:
        """First position of each sequence whose output some step computes."""
        first = [track.length for track in self.tracks]
        for step in (*self.fill, *self.steps):
            for part in step.parts:
                first[part.track] = min(first[part.track], part.start)
        return first

    def slots(self, step: Step) -> torch.Tensor:
        """Return the slot of each row, int64; padded rows have slots of their own."""
        size = self.layout.block_size
        if not step.parts:
            return torch.arange(step.rows)
        return torch.cat([self.tracks[p.track].slots(p.start, p.count, size) for p in step.parts])

    def positions(self, step: Step) -> torch.Tensor:
        """Return the position of each row, int64; padded rows have 0."""
        if not step.parts:
            return torch.zeros(step.rows, dtype=torch.int64)
        return torch.cat([torch.arange(p.start, p.start + p.count) for p in step.parts])


def entry_at(table: Table, phase: Phase, rows: int) -> TableEntry | None:
    """Return who serves a phase at a row count."""
    for entry in table:
        low, high = entry.tokens
        if phase in entry.phases and low <= rows and (high is None or rows <= high):
            return entry
    return None


def _row_counts(
    plan: LayerPlan, phase: Phase, rows: Sequence[int], cap: int
) -> tuple[list[int], list[str]]:
    """Return the row counts to run in a phase: those asked for, and both sides of every boundary
    between entries; and what is left out."""
    bound = plan.reach[phase]
    wanted = {r for r in rows if bound is None or r <= bound}
    if bound is not None:
        wanted.add(bound)
    for table in (plan.path, plan.q_absorb, plan.v_up):
        for entry in table:
            if phase in entry.phases:
                low, high = entry.tokens
                wanted |= {low} | ({high} if high is not None else set())
    kept = sorted(r for r in wanted if r <= cap)
    left = sorted(wanted - set(kept))
    skipped = [f"{phase} with {r} rows: more than the cap of {cap} rows" for r in left]
    return kept, skipped


def _edge(block_size: int, filled: bool) -> int:
    """Return a history that ends with its block; a short one where that would take long: extend
    steps of a full-size layer are slow on a CPU, a writer is not."""
    return block_size if block_size <= (_SHORT if filled else _LONG) else 5


def _histories(count: int, edge: int) -> list[int]:
    """Return history lengths: the first fills its block, the second is empty, the rest short."""
    firsts = (edge, 0)
    return [
        firsts[i] if i < 2 else (edge - 1 if edge <= _SHORT else 3, 1, 0, 2)[(i - 2) % 4]
        for i in range(count)
    ]


def _spread(phase: Phase, rows: int, histories: Sequence[int]) -> tuple[Part, ...]:
    """Spread the rows of a decode-like step over sequences, a few tokens each."""
    each = _TOKENS_A_SEQUENCE[phase]
    counts = [each] * (rows // each) + ([rows % each] if rows % each else [])
    return tuple(Part(i, histories[i], n) for i, n in enumerate(counts))


def make_scenario(plan: LayerPlan, *, rows: Sequence[int], cap: int = ROW_CAP) -> Scenario:
    """Choose sequences and steps for everything that a layer's plan serves.

    Args:
        plan: The layer's plan.
        rows: Row counts to run in every phase, beside the boundaries of the tables.
        cap: Largest row count; a larger one in ``rows`` raises it.
    """
    cap = max([cap, *rows])
    size = plan.kv_layout.block_size
    skipped: list[str] = []
    counts: dict[Phase, list[int]] = {}
    for phase in plan.reach:
        if any(e.strategy == HOST_MHA and phase in e.phases for e in plan.path):
            skipped.append(f"{phase}: {HOST_MHA}, the host's own code serves it")
            continue
        counts[phase], left = _row_counts(plan, phase, rows, cap)
        skipped += left

    decoding = {p: n for p, n in counts.items() if p in _TOKENS_A_SEQUENCE}
    needed = max((-(-max(n) // _TOKENS_A_SEQUENCE[p]) for p, n in decoding.items() if n), default=0)
    edge = _edge(size, bool(counts.get(Phase.EXTEND)))
    histories = _histories(needed, edge)
    steps = [Step(p, n, _spread(p, n, histories)) for p, ns in decoding.items() for n in ns]
    for n in counts.get(Phase.EXTEND, ()):
        # A prompt's second chunk over the edge of a block, and a new prompt.
        chunk = n // 2
        parts = [Part(needed, edge - 1, chunk)] if chunk else []
        steps.append(Step(Phase.EXTEND, n, (*parts, Part(needed + 1, 0, n - chunk))))
    if counts.get(Phase.EXTEND):
        histories += [edge - 1, 0]
    steps += [Step(Phase.IDLE, n) for n in counts.get(Phase.IDLE, ())]

    tracks, num_blocks, pad_blocks = _tracks(histories, steps, size)
    scenario = Scenario(
        tracks, (), tuple(steps), num_blocks, pad_blocks, plan.kv_layout, tuple(skipped)
    )
    if counts.get(Phase.EXTEND):
        most = plan.reach[Phase.EXTEND]
        fill = _fill(tracks, min(most or 2 * _LONG, 2 * _LONG))
        scenario = evolve(scenario, fill=fill)
    return scenario


def _tracks(
    histories: Sequence[int], steps: Sequence[Step], size: int
) -> tuple[tuple[Track, ...], int, int]:
    lengths = list(histories)
    for step in steps:
        for part in step.parts:
            lengths[part.track] = max(lengths[part.track], part.start + part.count)
    padded = max((s.rows for s in steps if not s.parts), default=0)
    pad_blocks = -(-padded // size)
    free = pad_blocks + sum(-(-n // size) for n in lengths)
    num_blocks, tracks = free, []
    for history, length in zip(histories, lengths, strict=True):
        # Handed out from the end, so that no sequence's blocks are ascending.
        take = -(-length // size)
        tracks.append(Track(history, length, tuple(range(free - 1, free - 1 - take, -1))))
        free -= take
    return tuple(tracks), max(num_blocks, 1), pad_blocks


def _fill(tracks: Sequence[Track], most: int) -> tuple[Step, ...]:
    """Return extend steps that write every history, at most ``most`` rows each."""
    steps: list[Step] = []
    parts: list[Part] = []
    left = most
    for index, track in enumerate(tracks):
        start = 0
        while start < track.history:
            count = min(left, track.history - start)
            parts.append(Part(index, start, count))
            start, left = start + count, left - count
            if not left:
                steps.append(Step(Phase.EXTEND, most, tuple(parts), fills=True))
                parts, left = [], most
    if parts:
        steps.append(Step(Phase.EXTEND, most - left, tuple(parts), fills=True))
    return tuple(steps)
