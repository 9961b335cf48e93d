"""What was in fact freed: by weight, by storage, and by the device's allocator."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from attrs import evolve, frozen

__all__ = ["AllocatorReading", "Ledger", "LedgerRow", "allocator_slack", "read_allocator"]

EXACT_STATISTIC = "requested_bytes.all.current"
"""The allocator's figure without block slack; torch-npu 2.5.1 does not have it."""
BLOCK = 512
"""Bytes to which torch_npu's allocator rounds a block up, and 32 of padding on some chips."""
UNSPLIT = 2**20
"""Bytes that a large block may have more than was asked for: such a rest is not split off."""


@frozen
class LedgerRow:
    """One released weight.

    Args:
        name: The weight.
        action: ``release`` or ``restore``.
        planned: Bytes that the plan says.
        freed: Bytes of the storage that was seen to die; 0 where it lives on.
        how: ``swapped`` (a tombstone in its place) or ``resized`` (storage resized to zero).
        held_by: Why the storage lives on, else None.
    """

    name: str
    action: str
    planned: int
    freed: int
    how: str
    held_by: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "action": self.action,
            "planned": self.planned,
            "freed": self.freed,
            "how": self.how,
            "held_by": self.held_by,
        }


@frozen
class AllocatorReading:
    """What the device's allocator holds for this process, and which figure says so."""

    statistic: str
    bytes: int


def read_allocator(device: torch.device) -> AllocatorReading | None:
    """Return the allocator's current bytes, or None on the CPU, which keeps no account.

    ``requested_bytes`` is exact; older lines have only ``allocated_bytes``, with block slack.
    """
    if device.type != "npu":
        return None
    npu: Any = torch.npu  # type: ignore[attr-defined]
    stats = npu.memory_stats(device)
    for statistic in (EXACT_STATISTIC, "allocated_bytes.all.current"):
        if statistic in stats:
            return AllocatorReading(statistic, int(stats[statistic]))
    return AllocatorReading("memory_allocated", int(npu.memory_allocated(device)))


def allocator_slack(statistic: str | None, weights: int) -> int:
    """Return by how many bytes a figure may differ from the bytes of some weights: none where it is
    exact, else up to a block and its padding for each."""
    return 0 if statistic in (None, EXACT_STATISTIC) else 2 * BLOCK * max(weights, 1)


@frozen
class Ledger:
    """The account of one layer's release.

    Args:
        layer_id: The layer.
        rows: One row a released weight.
        allocator: Name of the allocator's figure, or None on the CPU.
        allocator_freed: By how much it fell, or None on the CPU.
    """

    layer_id: int
    rows: tuple[LedgerRow, ...] = ()
    allocator: str | None = None
    allocator_freed: int | None = None

    @property
    def planned(self) -> int:
        """Bytes that the plan says are freed."""
        return sum(row.planned for row in self.rows)

    @property
    def freed(self) -> int:
        """Bytes of storages that were seen to die."""
        return sum(row.freed for row in self.rows)

    @property
    def agrees(self) -> bool:
        """Whether bytes freed are bytes planned, by storage and, on a device, by its allocator."""
        if self.planned != self.freed:
            return False
        if self.allocator_freed is None:
            return True
        slack = allocator_slack(self.allocator, len(self.rows))
        return 0 <= self.allocator_freed - self.freed <= slack

    def without(self, names: Collection[str]) -> Ledger | None:
        """Return the account without weights that were brought back, or None if none is left."""
        left = tuple(row for row in self.rows if row.name not in names)
        back = sum(row.freed for row in self.rows if row.name in names)
        fallen = None if self.allocator_freed is None else self.allocator_freed - back
        return evolve(self, rows=left, allocator_freed=fallen) if left else None

    def plus(self, later: Ledger) -> Ledger:
        """Return the account of this release and a later one of the same layer."""
        mine, other = self.allocator_freed, later.allocator_freed
        fallen = None if mine is None or other is None else mine + other
        return evolve(later, rows=(*self.rows, *later.rows), allocator_freed=fallen)

    def difference(self) -> str:
        """Return in words how bytes freed differ from bytes planned, and who holds them."""
        held = [f"{r.name} is held by {r.held_by}" for r in self.rows if r.held_by]
        by = "" if self.allocator is None else f", {self.allocator_freed} by {self.allocator}"
        told = f"{self.freed} bytes freed of {self.planned} planned{by}"
        return "; ".join([told, *held])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "layer_id": self.layer_id,
            "planned": self.planned,
            "freed": self.freed,
            "agrees": self.agrees,
            "allocator": self.allocator,
            "allocator_freed": self.allocator_freed,
            "weights": [row.to_dict() for row in self.rows],
        }
