"""What was in fact freed: by weight, by storage, and by the device's allocator."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

__all__ = ["AllocatorReading", "Ledger", "LedgerRow", "read_allocator"]


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
    for statistic in ("requested_bytes.all.current", "allocated_bytes.all.current"):
        if statistic in stats:
            return AllocatorReading(statistic, int(stats[statistic]))
    return AllocatorReading("memory_allocated", int(npu.memory_allocated(device)))


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
        by_allocator = self.freed if self.allocator_freed is None else self.allocator_freed
        return self.planned == self.freed == by_allocator

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
