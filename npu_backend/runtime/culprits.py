"""Who still holds a storage: the tensors on it, and what refers to them.

Walks every object that the garbage collector knows, so only where something is wrong.
"""

from __future__ import annotations

import gc
import types
from typing import Any

import torch

from npu_backend.runtime.storages import span
from npu_backend.runtime.tombstone import is_tombstone

__all__ = ["culprits", "tensors_on"]

_MOST = 4
"""Referrers that are named."""


def _key_of(mapping: dict[Any, Any], value: object) -> str | None:
    return next((str(k) for k, v in mapping.items() if v is value), None)


def _owner(mapping: dict[Any, Any]) -> str | None:
    """Return whose attributes a dictionary is."""
    for holder in gc.get_referrers(mapping):
        if getattr(holder, "__dict__", None) is mapping:
            return (
                type(holder).__name__
                if not isinstance(holder, types.ModuleType)
                else (f"module {holder.__name__}")
            )
    return None


def _name(referrer: object, tensor: torch.Tensor) -> str | None:
    """Return a referrer in words, or None for what is this module's own."""
    if isinstance(referrer, types.FrameType):
        code = referrer.f_code
        if code.co_filename == __file__:
            return None
        return f"a local of {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}()"
    if isinstance(referrer, dict):
        key, owner = _key_of(referrer, tensor), _owner(referrer)
        if owner is not None:
            return f"attribute {key} of {owner}"
        return f"entry {key!r} of a dictionary"
    if isinstance(referrer, list | tuple):
        return f"a {type(referrer).__name__} of {len(referrer)}"
    if isinstance(referrer, types.CellType):
        return "a closure"
    # An object's attributes may lie in the object itself.
    key = _key_of(getattr(referrer, "__dict__", {}), tensor)
    kind = type(referrer).__name__
    return f"a {kind}" if key is None else f"attribute {key} of {kind}"


def tensors_on(
    start: int, nbytes: int, device: str, besides: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the tensors on some bytes that Python knows; arguments as of :func:`culprits`."""
    found = []
    for candidate in gc.get_objects():
        # type(), for a proxy's __class__ may run code.
        if not issubclass(type(candidate), torch.Tensor) or is_tombstone(candidate):
            continue
        try:
            here = None if candidate is besides else span(candidate)
        except Exception:  # noqa: BLE001, S112 - a tensor without memory of its own holds none of it
            continue
        if here is None or here.device != device:
            continue
        if here.start < start + nbytes and start < here.start + here.nbytes:
            found.append(candidate)
    return found


def culprits(
    start: int, nbytes: int, device: str, besides: torch.Tensor | None = None
) -> tuple[str, ...]:
    """Return who holds tensors on some bytes, in words.

    Args:
        start: Address of the first byte.
        nbytes: How many.
        device: The device.
        besides: A tensor that may be there.
    """
    found: dict[str, None] = {}
    tensors = tensors_on(start, nbytes, device, besides)
    for tensor in tensors:
        told = f"{tuple(tensor.shape)} {tensor.dtype}"
        for referrer in gc.get_referrers(tensor):
            if referrer is tensors:
                continue
            name = _name(referrer, tensor)
            if name is not None:
                found[f"{name} ({told})"] = None
    return tuple(found)[:_MOST]
