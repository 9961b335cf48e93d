"""Decide one table: the path of a layer, or the kernel of one batched matmul.

Both are the same loop (rules 2 and 4): start with all legal offers, requested ones first; give each
cell to the first that covers it; compute readers; while unrequested offers that serve copy a weight
that still has a reader, drop the last of them in call order and build again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from npu_backend.catalog import KernelOrder
from npu_backend.deployment import Deployment, Phase, Request
from npu_backend.errors import SelectionError
from npu_backend.offers import Reason
from npu_backend.plan import DeclineRecord, TableEntry, UnusedRecord
from npu_backend.planner.answers import Sorted
from npu_backend.planner.measured import pieces_of
from npu_backend.planner.readers import Readers, counting
from npu_backend.planner.requests import Unmet, check, matches, preferred
from npu_backend.planner.tables import (
    Candidate,
    Cells,
    Range,
    Served,
    covers,
    entries,
    gaps,
    overlap,
    serve,
)

__all__ = ["Decided", "Uncovered", "decide"]

Slots = tuple[tuple[str, tuple[int, int, int]], ...]
"""Which ``(B, K, N)`` holds each capture slot so far."""


@frozen
class Uncovered:
    """Cells that nobody may serve, with every reason.

    Args:
        cells: The cells in words.
        reasons: Why each strategy that anybody spoke of does not serve them.
        code: ``phase`` where a phase is served by nobody, else ``tokens.limit``.
    """

    cells: tuple[str, ...]
    reasons: tuple[str, ...]
    code: str

    def error(self, whom: str, also: Sequence[str] = ()) -> SelectionError:
        """Return the error.

        Args:
            whom: The layer, or the batched matmul.
            also: Reasons that lie outside the answers, such as plugins that were not asked.
        """
        return SelectionError(
            "no legal strategy serves " + "; ".join(self.cells),
            whom=whom,
            why=(*self.reasons, *also) or ("no plugin answered",),
            remedy="relax what is asked, or install or enable a plugin that serves it",
            code=self.code,
        )


@frozen
class Decided:
    """One table and what it rests on."""

    table: tuple[TableEntry, ...]
    served: tuple[Served, ...]
    readers: Readers
    declined: tuple[DeclineRecord, ...]
    unused: tuple[UnusedRecord, ...]
    unmet: tuple[Unmet, ...]
    uncovered: Uncovered | None

    @property
    def serving(self) -> tuple[Candidate, ...]:
        """The candidates that serve something, each once."""
        return tuple(dict.fromkeys(s.by for s in self.served if s.by is not None))


def _whole(
    candidates: Sequence[Candidate], cells: Cells, per_phase: bool
) -> tuple[list[Candidate], list[tuple[Candidate, Reason]]]:
    """Keep the candidates whose choice cannot move with the number of rows.

    A path must cover whole phases (fused paths never extend); a kernel all of its site, so that
    prefill and decode multiply alike.
    """
    kept, dropped = [], []
    for candidate in candidates:
        phases = overlap(candidate.offer, cells) if per_phase else cells
        if covers(candidate.offer, cells, phases):
            kept.append(candidate)
        else:
            low, high = candidate.offer.envelope.tokens
            reason = Reason(
                "tokens.limit",
                f"serves rows {low}..{high or 'any'} of "
                f"{', '.join(sorted(str(p) for p in candidate.offer.envelope.phases))} only, and "
                "batch invariance asks one strategy for all row counts"
                + "".join(f"; {limit.message}" for limit in candidate.offer.limits),
            )
            dropped.append((candidate, reason))
    return kept, dropped


def _offender(
    served: Sequence[Served],
    readers: Readers,
    requested: frozenset[Candidate],
    deployment: Deployment,
) -> tuple[Candidate, Reason] | None:
    """Return the last unrequested serving offer that copies a weight somebody still reads."""
    serving = {s.by for s in served if s.by is not None and s.by not in requested}
    for candidate in sorted(serving, key=lambda c: -c.order):
        read = {
            name: who
            for name in sorted(candidate.offer.copied)
            if (who := counting(readers.get(name, ()), deployment))
        }
        if read:
            told = "; ".join(f"{name} is read by {', '.join(who)}" for name, who in read.items())
            return candidate, Reason(
                "policy.duplicate",
                f"unasked, it would keep a second copy beside the original: {told}",
            )
    return None


def _slot_conflict(
    served: Sequence[Served], slots: Slots, shape: tuple[int, int, int] | None
) -> tuple[Candidate, Reason] | None:
    held = dict(slots)
    for run in served:
        slot = run.by.offer.capture_slot if run.by is not None else None
        if run.by is not None and slot and shape and held.get(slot, shape) != shape:
            return run.by, Reason(
                "capture.slot",
                f"(B, K, N) = {held[slot]} holds the slot {slot}, keyed by rows, for the whole "
                f"process; {shape} would collide with it in a captured graph",
            )
    return None


def _falls_short(candidate: Candidate, missing: Sequence[tuple[Phase, Range]]) -> list[Reason]:
    """Return why a legal offer does not serve what is missing: its envelope ends before it."""
    envelope = candidate.offer.envelope
    reasons = []
    if beyond := dict.fromkeys(str(p) for p, _ in missing if p not in envelope.phases):
        serves = ", ".join(str(p) for p in Phase if p in envelope.phases)
        reasons.append(Reason("phase", f"it serves {serves}, and not {', '.join(beyond)}"))
    if any(phase in envelope.phases for phase, _ in missing):
        low, high = envelope.tokens
        limits = "".join(f"; {limit.message}" for limit in candidate.offer.limits)
        reasons.append(Reason("tokens.limit", f"it serves rows {low}..{high or 'any'}{limits}"))
    return reasons


def decide(
    *,
    hook: str,
    site: str | None,
    sorted_: Sorted,
    cells: Cells,
    requests: Sequence[Request],
    readers_of: Callable[[Sequence[Served]], Readers],
    deployment: Deployment,
    slots: Slots = (),
    shape: tuple[int, int, int] | None = None,
    order: KernelOrder | None = None,
) -> Decided:
    """Decide one table.

    Args:
        hook: The hook that was asked.
        site: ``q_absorb`` or ``v_up``; None for a path.
        sorted_: The sorted answers.
        cells: What must be served; the host's own cells are already set aside.
        requests: The requests that bind this layer.
        readers_of: Readers of every weight, given who serves.
        deployment: What is planned for.
        slots: Capture slots held so far.
        shape: ``(B, K, N)`` of the site.
        order: The measured order of its kernels, where one was taken.
    """
    declined = list(sorted_.declined)
    dropped: list[tuple[Candidate, Reason]] = []
    legal = list(sorted_.candidates)
    if deployment.batch_invariant:
        legal, dropped = _whole(legal, cells, per_phase=site is None)
    ordered, requested = preferred(legal, requests)
    while True:
        served = serve(cells, pieces_of(ordered, requested, order, deployment.batch_invariant))
        readers = readers_of(served)
        found = None
        if deployment.graph_capture:
            found = _slot_conflict(served, slots, shape)
        found = found or _offender(served, readers, requested, deployment)
        if found is None:
            break
        dropped.append(found)
        ordered.remove(found[0])

    declined += [
        DeclineRecord(hook, site, c.strategy, c.plugin.provider, (reason,)) for c, reason in dropped
    ]
    serving = {s.by for s in served}
    unused = tuple(
        UnusedRecord(hook, site, c.strategy, c.plugin.provider)
        for c in sorted(ordered, key=lambda c: c.order)
        if c not in serving
    )
    unmet = []
    for request in requests:
        extra = [f"{c.plugin.provider}: {r}" for c, r in dropped if matches(c, request)]
        if problem := check(request, sorted_, ordered, extra, cells, served):
            unmet.append(problem)
    uncovered = None
    if missing := gaps(served):
        served_at_all = {s.phase for s in served if s.by is not None}
        uncovered = Uncovered(
            tuple(f"{phase} rows {low}..{high or 'any'}" for phase, (low, high) in missing),
            (
                *(f"{d.strategy}, {d.provider}: {r}" for d in declined for r in d.reasons),
                *(
                    f"{c.strategy}, {c.plugin.provider}: {r}"
                    for c in sorted(ordered, key=lambda c: c.order)
                    for r in _falls_short(c, missing)
                ),
            ),
            "tokens.limit" if {p for p, _ in missing} <= served_at_all else "phase",
        )
    return Decided(
        table=entries(served, ordered, order.source if order else ""),
        served=tuple(served),
        readers=readers,
        declined=tuple(declined),
        unused=unused,
        unmet=tuple(unmet),
        uncovered=uncovered,
    )
