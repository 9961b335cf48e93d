"""Who shares a storage with whom. Storages count, never tensors: a view, a transpose, ``.data`` or
a ``.contiguous()`` that did nothing all keep the bytes alive."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch.multiprocessing import reductions

from npu_backend.runtime.tombstone import is_tombstone

__all__ = ["Span", "StorageWatch", "holders", "shares", "span", "unnamed_holders"]


@frozen
class Span:
    """The bytes that a tensor's storage occupies.

    Args:
        device: The device.
        start: Address of the first byte.
        nbytes: Bytes of the whole storage, whatever part of it the tensor shows.
        identity: Identity of the storage object.
    """

    device: str
    start: int
    nbytes: int
    identity: int

    def overlaps(self, other: Span) -> bool:
        """Whether two storages are one, or lie over each other (one wrapped from an address)."""
        if self.identity == other.identity:
            return True
        if not (self.nbytes and other.nbytes) or self.device != other.device:
            return False
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


def span(tensor: torch.Tensor) -> Span | None:
    """Return the storage's span, or None where the tensor has no bytes (any more)."""
    if is_tombstone(tensor) or tensor.device.type == "meta":
        return None
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return None
    return Span(str(tensor.device), storage.data_ptr(), storage.nbytes(), storage._cdata)


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors live on common bytes."""
    a, b = span(one), span(other)
    return a is not None and b is not None and a.overlaps(b)


def holders(tensor: torch.Tensor, others: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the tensors that live on the same bytes."""
    own = span(tensor)
    if own is None:
        return ()
    found = ((name, span(other)) for name, other in others.items())
    return tuple(name for name, other in found if other is not None and own.overlaps(other))


def _tensors_of(tensor: torch.Tensor) -> int | None:
    """Return how many tensors hold a storage; None where this torch cannot say."""
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    storage = tensor.untyped_storage()
    # The Python object just made counts as well.
    return int(count(storage._cdata)) - 1


def _base_references(view: torch.Tensor) -> int:
    """Return Python's count of references to a view's base; only good for comparisons."""
    # The first access may make the Python object, which changes who owns it.
    _ = view._base
    base = view._base
    return sys.getrefcount(base)


def _keeps_own_base(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view whose base nobody holds but the view itself.

    A loader that writes ``w.transpose(1, 2).contiguous().transpose(1, 2)`` leaves such a view: the
    base dies with it. The count of a view made here for comparison says what "nobody" counts as.
    """
    if tensor._base is None:
        return False
    alone = torch.empty(1, 1).transpose(0, 1)
    return _base_references(tensor) <= _base_references(alone)


def unnamed_holders(tensor: torch.Tensor) -> int:
    """Return how many tensors share the storage beside the given one.

    Counts what nobody told us of: a view kept by the host, a module's ``.data``. Garbage that only
    waits for the cycle collector does not count.
    """
    own = span(tensor)
    if own is None:
        return 0
    expected = 1 + _keeps_own_base(tensor)
    count = _tensors_of(tensor)
    if count is not None and count > expected:
        gc.collect()
        count = _tensors_of(tensor)
    return 0 if count is None else max(0, count - expected)


class StorageWatch:
    """Tells whether a storage has died since, without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.nbytes: int = storage.nbytes()
        self.start: int = storage.data_ptr()
        self.device = str(tensor.device)
        self.identity: int = storage._cdata
        self._reference: Any = reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._resized = False

    def resized(self) -> None:
        """Note that the storage was resized to zero and its bytes are gone, the object not."""
        self._resized = True

    @property
    def dead(self) -> bool:
        """Whether the bytes are gone."""
        return self._resized or bool(self._reference.expired())
