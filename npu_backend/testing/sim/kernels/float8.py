"""Which chips know 8-bit floats: bytes move anywhere, casts need a chip that computes them."""

from __future__ import annotations

from collections.abc import Collection

import torch

from npu_backend.testing.sim.kernels.base import place

__all__ = ["FLOAT8", "check_cast"]

FLOAT8 = frozenset(
    getattr(torch, name)
    for name in dir(torch)
    if name.startswith("float8_") and isinstance(getattr(torch, name), torch.dtype)
)
"""The 8-bit floats of the installed torch."""


def check_cast(op: str, dtypes: Collection[torch.dtype]) -> None:
    """Refuse a cast to or from an 8-bit float on a chip whose ops know none.

    Args:
        op: The op, in the message.
        dtypes: Of its tensors; a cast where they differ.

    Raises:
        OpRejectedError: The chip has no such numbers.
    """
    here, seen = place(), set(dtypes)
    if len(seen) < 2 or not seen & FLOAT8:
        return
    known = here.figure("npu_dynamic_quant", "dst_types")
    if known is not None and any(str(name).startswith("float8_") for name in known.value):
        return
    told = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in seen))
    raise here.reject(op, f"a cast between {told}: {here.family} has no 8-bit floats")
