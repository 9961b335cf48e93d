"""What the suites look at: bits, storages, allocations, and what they poison."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_backend.runtime.storages import shares

__all__ = ["Poisoned", "allocated", "changed", "clones", "same_bits", "sharing", "tensors_of"]


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a step's result: one tensor, or a tuple of tensors and None."""
    if isinstance(result, torch.Tensor):
        return (result,)
    return tuple(t for t in result if isinstance(t, torch.Tensor))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits, wherever they are."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = (t.detach().cpu().contiguous().view(torch.uint8) for t in (one, other))
    return bool(torch.equal(a, b))


def clones(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU."""
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}


def changed(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names whose bits are not as they were."""
    return [name for name, tensor in before.items() if not same_bits(tensor, now[name])]


def sharing(result: torch.Tensor, others: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors on whose storage a result lies."""
    return [name for name, other in others.items() if shares(result, other)]


class Poisoned:
    """Overwrites a tensor while it is entered, so that whoever reads it gives something else.

    Written behind torch's back: the version of the tensor stays, or a guard against copies that
    went stale would refuse the step, which says nothing of who reads.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor.data
        self._kept = tensor.detach().clone()

    def __enter__(self) -> None:
        if self._bytes.is_floating_point():
            # Every value, so that one that counts little counts as well.
            self._bytes.fill_(float("nan"))
        else:
            self._bytes.copy_(torch.full_like(self._kept, 85).bitwise_xor(self._kept))

    def __exit__(self, *_: object) -> None:
        self._bytes.copy_(self._kept)


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that ops make, whether or not they live on."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        # Held, or an address could be given out twice.
        self._held = {t.untyped_storage().data_ptr(): t for t in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            # What comes in without having been made here was there before: a prepared copy, say.
            if isinstance(tensor, torch.Tensor):
                self._held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        result = func(*args, **(kwargs or {}))
        flat = result if isinstance(result, (tuple, list)) else (result,)
        for tensor in flat:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in self._held:
                    self._held[storage.data_ptr()] = tensor
                    self.bytes += storage.nbytes()
        return result


def allocated(call: Callable[[], Any], known: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return the bytes that a call took at most, and those that are still taken once its result
    is gone.

    On a device by its allocator: the peak. On the CPU, which keeps no account: the sum of all
    storages that its ops made, and 0.
    """
    given = list(known)
    device = given[0].device
    call()  # what is made once, at the first call, is not a step's
    gc.collect()
    if device.type == "cpu":
        with _Storages(given) as mode:
            call()
        return mode.bytes, 0
    npu: Any = torch.npu  # type: ignore[attr-defined]
    npu.synchronize(device)
    npu.reset_peak_memory_stats(device)
    before = _statistic(npu.memory_stats(device), "current")
    result = call()
    npu.synchronize(device)
    peak = _statistic(npu.memory_stats(device), "peak")
    del result
    gc.collect()
    after = _statistic(npu.memory_stats(device), "current")
    return peak - before, after - before


def _statistic(stats: Mapping[str, int], which: str) -> int:
    """Return the exact figure; torch-npu 2.5.1 has only the one with block slack."""
    exact = f"requested_bytes.all.{which}"
    return int(stats[exact] if exact in stats else stats[f"allocated_bytes.all.{which}"])
