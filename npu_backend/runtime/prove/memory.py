"""See for oneself what was freed: storages that die, and on a device its allocator's figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing import reductions

from npu_backend.runtime.ledger import EXACT_STATISTIC
from npu_backend.runtime.tombstone import is_tombstone

__all__ = ["MemoryWatch"]


def _weak(tensor: torch.Tensor) -> Any:
    return reductions.StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class MemoryWatch:
    """Sees which storages die, and on a device by how much its allocator falls.

    Keeps no storage alive. Independent of the runtime's own ledger.
    """

    def __init__(self, given: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._given = given
        self._device = device
        self._before = {n: t.untyped_storage().nbytes() for n, t in given.items()}
        self._references = {n: _weak(t) for n, t in given.items()}
        self._statistic, self._allocated = _allocated(device)

    def freed(self) -> dict[str, int]:
        """Return the bytes of each weight's storage that are gone; only weights that lost any."""
        found = {name: self._lost(name) for name in self._given}
        return {name: size for name, size in found.items() if size}

    def _lost(self, name: str) -> int:
        if self._references[name].expired():
            return self._before[name]
        tensor = self._given[name]
        # A tombstone has no storage to ask; its old one still lives, so nothing was freed.
        left = self._before[name] if is_tombstone(tensor) else tensor.untyped_storage().nbytes()
        return self._before[name] - left

    def allocator(self) -> tuple[str | None, int | None]:
        """Return the allocator's figure and by how much it fell; None on the CPU."""
        if self._allocated is None:
            return None, None
        return self._statistic, self._allocated - int(_allocated(self._device)[1] or 0)


def _allocated(device: torch.device) -> tuple[str | None, int | None]:
    if device.type == "cpu":
        return None, None
    module: Any = getattr(torch, device.type)
    module.synchronize(device)
    statistics = module.memory_stats(device)
    for name in (EXACT_STATISTIC, "allocated_bytes.all.current"):
        if name in statistics:
            return name, int(statistics[name])
    return "memory_allocated", int(module.memory_allocated(device))
