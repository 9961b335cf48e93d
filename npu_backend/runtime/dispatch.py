"""From a layer's tables to callables: decided when the layer is prepared, one comparison a step.

A phase with one unconditional entry gets the very object that the strategy's ``bind()`` returned.
Otherwise rows are compared with the last row of an entry, ``x.shape[0]`` being the tensor's own
rows, padding included. A phase that was planned up to a row bound compares with that too: beyond
it nobody was asked, and a release may have relied on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from attrs import frozen

from npu_backend.deployment import Phase
from npu_backend.errors import BoundExceededError, NpuBackendError
from npu_backend.plan import TableEntry

__all__ = ["Segment", "phase_callables", "refuse_with", "route"]


@frozen
class Segment:
    """Rows up to ``last`` (None: all) and who serves them."""

    last: int | None
    call: Callable[..., Any]


def _split_one(last: int, first: Callable[..., Any], rest: Callable[..., Any]) -> Any:
    def kernel(x: torch.Tensor) -> Any:
        if x.shape[0] <= last:
            return first(x)
        return rest(x)

    return kernel


def _split_path(last: int, first: Callable[..., Any], rest: Callable[..., Any]) -> Any:
    def path(
        hidden_states: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Any:
        if hidden_states.shape[0] <= last:
            return first(hidden_states, positions, slot_mapping)
        return rest(hidden_states, positions, slot_mapping)

    return path


def refuse_with(make: Callable[[int], NpuBackendError]) -> Callable[..., NoReturn]:
    """Return a callable that raises, before it reads anything.

    Args:
        make: Makes the error, given the number of rows.
    """

    def refuse(rows: torch.Tensor, *_: torch.Tensor, **__: Any) -> NoReturn:
        raise make(rows.shape[0])

    return refuse


def _over(where: str, phases: Sequence[Phase], last: int) -> Callable[..., NoReturn]:
    def make(rows: int) -> NpuBackendError:
        return BoundExceededError(
            f"{rows} rows in a step that was planned for at most {last}",
            whom=where,
            why=(
                f"the deployment bounds {', '.join(str(p) for p in phases)} to {last} rows, and "
                "kernels and releases rest on it",
                "rows are the tensor's own, padding included",
            ),
            remedy="plan with the true bound (--max-tokens), or split the step",
            code="tokens.limit",
        )

    return refuse_with(make)


def route(
    segments: Sequence[Segment], *, where: str, phases: Sequence[Phase], path: bool
) -> Callable[..., Any]:
    """Return the callable of one phase's segments, ascending.

    Args:
        segments: Ascending, the first starting at row 1.
        where: Layer and site, for the message about a broken bound.
        phases: The phases that share this callable, for the same.
        path: Three arguments (a path) instead of one (a kernel).
    """
    *inner, end = segments
    call = end.call
    split = _split_path if path else _split_one
    if end.last is not None:
        call = split(end.last, call, _over(where, phases, end.last))
    for segment in reversed(inner):
        assert segment.last is not None
        call = split(segment.last, segment.call, call)
    return call


def _segments(
    table: Iterable[TableEntry],
    phase: Phase,
    call_of: Callable[[TableEntry, Phase], Callable[..., Any]],
) -> tuple[Segment, ...]:
    mine = sorted((e for e in table if phase in e.phases), key=lambda e: e.tokens[0])
    found: list[Segment] = []
    for entry in mine:
        call = call_of(entry, phase)
        if found and found[-1].call is call:
            # Two entries of one strategy side by side need no comparison between them.
            found.pop()
        found.append(Segment(entry.tokens[1], call))
    return tuple(found)


def phase_callables(
    table: Sequence[TableEntry],
    call_of: Callable[[TableEntry, Phase], Callable[..., Any]],
    *,
    where: str,
    path: bool,
    without: Collection[Phase] = (),
) -> Mapping[Phase, Callable[..., Any]]:
    """Return the callable of each phase that the table serves; equal segments share one object.

    Args:
        table: The entries that an offer serves; the host's are set aside.
        call_of: The bound callable of an entry in a phase.
        where: Layer and site, for messages.
        path: Whether it is the path's table.
        without: Phases to leave out.
    """
    served = [p for p in Phase if p not in without and any(p in e.phases for e in table)]
    groups: dict[tuple[Segment, ...], list[Phase]] = {}
    for phase in served:
        groups.setdefault(_segments(table, phase, call_of), []).append(phase)
    found: dict[Phase, Callable[..., Any]] = {}
    for segments, phases in groups.items():
        call = route(segments, where=where, phases=phases, path=path)
        found |= dict.fromkeys(phases, call)
    return found
