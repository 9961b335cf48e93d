"""What a validator looks at: a tensor without its memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import field, frozen

__all__ = ["FORMAT_ND", "FORMAT_NZ", "TensorSpec", "contiguous_stride"]

FORMAT_ND = 2
FORMAT_NZ = 29


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape."""
    stride, out = 1, []
    for size in reversed(shape):
        out.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(out))


def _sizes(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen
class TensorSpec:
    """Shape, dtype, strides and format of a tensor; no memory, so no size is too big.

    Args:
        shape: The sizes.
        dtype: Name of the dtype, such as ``bfloat16``.
        stride: The strides in elements; contiguous where not given.
        format: The device's format number: 2 for ND, 29 for FRACTAL_NZ.
    """

    shape: tuple[int, ...] = field(converter=_sizes)
    dtype: str = "bfloat16"
    stride: tuple[int, ...] = field(converter=_sizes)
    format: int = FORMAT_ND

    @stride.default
    def _contiguous(self) -> tuple[int, ...]:
        return contiguous_stride(tuple(self.shape))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_nz(self) -> bool:
        return self.format == FORMAT_NZ

    @property
    def is_contiguous(self) -> bool:
        """Whether strides are those of a contiguous tensor; sizes of one do not matter."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @classmethod
    def of(cls, tensor: Any) -> TensorSpec:
        """Return the description of a torch tensor, its device format included."""
        from npu_backend.testing.sim.formats import format_of

        return cls(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.stride()),
            format_of(tensor),
        )
