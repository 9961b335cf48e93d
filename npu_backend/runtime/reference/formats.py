"""References of ``npu_format_cast`` and ``get_npu_format``.

Only the bookkeeping of formats is modelled: the bytes of a cast tensor stay in row order. So the
references show lifetime (a cast is a new storage, or the input itself) and not the device's layout.
"""

from __future__ import annotations

from typing import Any

import torch

from npu_backend.catalog import load_catalog
from npu_backend.model.weights import nz_castable

__all__ = ["FORMAT_ND", "FORMAT_NZ", "get_npu_format", "npu_format_cast"]

FORMAT_ND = 2
"""aclFormat ACL_FORMAT_ND."""
FORMAT_NZ = 29
"""aclFormat ACL_FORMAT_FRACTAL_NZ."""

_MARK = "npu_backend_format"


def get_npu_format(input: torch.Tensor) -> int:
    """Return the format number of a tensor; views share that of their storage.

    Args:
        input: Any CPU tensor; ND unless :func:`npu_format_cast` made its storage.
    """
    return int(getattr(input.untyped_storage(), _MARK, FORMAT_ND))


def _castable(tensor: torch.Tensor) -> bool:
    if tensor.dim() < 2:
        return False
    name = str(tensor.dtype).removeprefix("torch.")
    return nz_castable(load_catalog(), name, *tensor.shape[-2:]) is None


def npu_format_cast(
    input: torch.Tensor,
    acl_format: int | torch.Tensor,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """Return a tensor of the same values in another format. Nothing is rounded.

    Args:
        input: ``(..., K, N)``, read as the device reads it: the last two dimensions.
        acl_format: Format number, or a tensor whose format is taken.
        customize_dtype: Not modelled.
        input_dtype: Not modelled.

    Returns:
        A clone, or **the input itself** where it has the format already or has no FRACTAL_NZ form
        (16-bit: K and N multiples of 16; 8-bit: K of 16, N of 32; sgl-project/sglang#21209).

    Raises:
        NotImplementedError: A dtype argument, or a format beside ND and FRACTAL_NZ.
    """
    arguments: dict[str, Any] = {"customize_dtype": customize_dtype, "input_dtype": input_dtype}
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"npu_format_cast: the reference knows no {name}")
    wanted = get_npu_format(acl_format) if isinstance(acl_format, torch.Tensor) else int(acl_format)
    if wanted not in (FORMAT_ND, FORMAT_NZ):
        raise NotImplementedError(f"npu_format_cast: the reference knows no format {wanted}")
    if get_npu_format(input) == wanted or (wanted == FORMAT_NZ and not _castable(input)):
        return input
    out = input.detach().clone(memory_format=torch.contiguous_format)
    setattr(out.untyped_storage(), _MARK, wanted)
    return out
