"""Time the legal kernels of one matmul on the device at hand, and compare each with fp32.

Kernels take turns block by block, so that whatever else the machine does meets all alike; the
figure of a kernel is the median of its blocks. A time is of this device only: on the simulated NPU
and on the CPU it is the time of a stand-in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from npu_backend.planner.bmm import BmmPlan
from npu_backend.planner.tables import Candidate
from npu_backend.runtime.kernel import bind_kernel, matmul_operands

__all__ = ["TIE", "Timing", "fastest_first", "measure", "overall_order", "tuned_ranges"]

BLOCK_SECONDS = 2e-3
"""Aimed length of a block: long against a clock's step, short against the machine's moods."""
FEWEST_BLOCKS = 3
COMPARED_ROWS = 32
"""Rows that are compared with fp32: a long step's whole product would need its memory again."""
TIE = 0.05
"""Kernels within this part of the fastest count as equals, which stay in call order: a second
measurement of equals gives the same order."""


@frozen
class Timing:
    """One kernel at one row count.

    Args:
        strategy: Its name, as measured orders have it.
        provider: ``NAME (DIST VERSION)``.
        rows: Rows.
        seconds: Median over the blocks of the time of one call.
        blocks: Blocks that were taken.
        error: Largest difference from fp32, divided by the largest fp32 value.
    """

    strategy: str
    provider: str
    rows: int
    seconds: float
    blocks: int
    error: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "strategy": self.strategy,
            "provider": self.provider,
            "rows": self.rows,
            "microseconds": round(self.seconds * 1e6, 3),
            "blocks": self.blocks,
            "error_vs_fp32": self.error,
        }


def _synchronizer(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return lambda: None
    synchronize: Callable[[], None] = torch.get_device_module(device.type).synchronize
    return synchronize


def _names(candidates: Sequence[Candidate]) -> dict[Candidate, str]:
    """Return what a measured order calls each: ``DIST/NAME`` where the name alone is not enough."""
    dists: dict[str, set[str]] = {}
    for candidate in candidates:
        dists.setdefault(candidate.strategy, set()).add(candidate.plugin.dist)
    return {
        c: c.strategy if len(dists[c.strategy]) == 1 else f"{c.plugin.dist}/{c.strategy}"
        for c in candidates
    }


def _error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    rows = x.shape[0]
    chosen = torch.linspace(0, rows - 1, min(rows, COMPARED_ROWS)).long()
    expected = torch.einsum("thk,hkn->thn", x[chosen].float(), weight.float())
    worst = (found.cpu()[chosen].float() - expected).abs().max() / expected.abs().max()
    return float(worst)


def measure(
    plan: BmmPlan,
    rows: int,
    *,
    device: torch.device | str,
    seed: int = 0,
    blocks: int = 30,
    seconds: float = 10.0,
) -> tuple[Timing, ...]:
    """Time every legal kernel at one row count.

    Args:
        plan: The matmul with its legal offers.
        rows: Rows of the activation.
        device: ``cpu``, or the NPU, real or simulated.
        seed: Of activation and weight; both are standard normal, the weight over ``sqrt(K)``.
        blocks: Blocks of each kernel.
        seconds: Time after which no further round of blocks begins; at least three are taken.

    Returns:
        One timing a kernel, in call order.

    Raises:
        PrepareError: A kernel cannot be bound.
    """
    where = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    x, weight = matmul_operands(plan.spec, rows, generator=generator)
    # The copy to a device keeps the strides that the matmul has there.
    on_device = [_like(t, where) for t in (x, weight)]
    synchronize = _synchronizer(where)
    legal = [
        c
        for c in plan.candidates
        if c.offer.envelope.tokens[0] <= rows <= (c.offer.envelope.tokens[1] or rows)
    ]
    names = _names(legal)
    calls: dict[Candidate, Callable[[torch.Tensor], torch.Tensor]] = {}
    errors: dict[Candidate, float] = {}
    counts: dict[Candidate, int] = {}
    with torch.no_grad():
        for c in legal:
            calls[c] = bind_kernel(c.offer, c.plugin, plan.spec, plan.deployment, on_device[1])
            errors[c] = _error(calls[c](on_device[0]), x, weight)
            synchronize()
            start = time.perf_counter()
            calls[c](on_device[0])
            synchronize()
            once = max(time.perf_counter() - start, 1e-9)
            counts[c] = min(max(round(BLOCK_SECONDS / once), 1), 1000)
        times: dict[Candidate, list[float]] = {c: [] for c in legal}
        begun = time.perf_counter()
        for index in range(blocks):
            if index >= FEWEST_BLOCKS and time.perf_counter() - begun > seconds:
                break
            for c in legal[index % len(legal) :] + legal[: index % len(legal)]:
                times[c].append(_block(calls[c], on_device[0], counts[c], synchronize))
    return tuple(
        Timing(
            names[c],
            c.plugin.provider,
            rows,
            statistics.median(times[c]),
            len(times[c]),
            errors[c],
        )
        for c in legal
    )


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    base = tensor._base if tensor._base is not None else tensor
    moved = base.to(device)
    return moved.as_strided(tensor.shape, tensor.stride())


def _block(
    call: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    count: int,
    synchronize: Callable[[], None],
) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call(x)
    synchronize()
    return (time.perf_counter() - start) / count


# --- from times to orders ------------------------------------------------------------------------


def fastest_first(times: Mapping[str, float]) -> tuple[str, ...]:
    """Return names by time; within :data:`TIE` of each other they keep their order in ``times``."""
    left, found = dict(times), []
    while left:
        limit = min(left.values()) / (1 - TIE)
        # The earliest in call order of those that the fastest does not beat clearly.
        name = next(n for n, taken in left.items() if taken <= limit)
        found.append(name)
        del left[name]
    return tuple(found)


def overall_order(by_rows: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
    """Return one order for all rows: by the mean ratio to the fastest, over the rows of a kernel.

    Kernels that do not take every row count stand behind those that do: an order over all rows is
    for choices that must not move with them.
    """
    names = dict.fromkeys(name for times in by_rows.values() for name in times)
    ratios: dict[str, float] = {}
    for name in names:
        parts = [t[name] / min(t.values()) for t in by_rows.values() if name in t]
        ratios[name] = statistics.geometric_mean(parts)
    everywhere = {n: ratios[n] for n in names if all(n in t for t in by_rows.values())}
    partly = {n: ratios[n] for n in names if n not in everywhere}
    return (*fastest_first(everywhere), *fastest_first(partly))


def _agree(a: Sequence[str], b: Sequence[str]) -> tuple[str, ...] | None:
    """Return the longer of two orders that agree on what both name, or None.

    What only the longer one names is not legal at the other's rows, so it changes nothing there.
    """
    if [n for n in a if n in b] != [n for n in b if n in a]:
        return None
    if set(a) >= set(b):
        return tuple(a)
    return tuple(b) if set(b) >= set(a) else None


def tuned_ranges(
    by_rows: Mapping[int, Mapping[str, float]],
) -> tuple[tuple[tuple[int, int | None], tuple[str, ...]], ...]:
    """Return orders by row range: one measured at R rows holds from the row count before it to R.

    Beyond the largest row count the last order holds. Neighbours that agree are one range.
    """
    found: list[tuple[tuple[int, int | None], tuple[str, ...]]] = []
    low = 1
    for rows in sorted(by_rows):
        order = fastest_first(by_rows[rows])
        if found and (both := _agree(found[-1][1], order)):
            found[-1] = ((found[-1][0][0], rows), both)
        else:
            found.append(((low, rows), order))
        low = rows + 1
    (first, _), order = found[-1]
    found[-1] = ((first, None), order)
    return tuple(found)
