"""Headers of safetensors files: names, dtypes, shapes and bytes, without a byte of the data.

A file is eight bytes with the header's length, the header as JSON, then the tensors.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from attrs import frozen

from npu_backend.errors import ModelError
from npu_backend.model.files import parse_object

__all__ = ["TORCH_DTYPES", "Header", "Tensor", "read_header"]

TORCH_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Names that torch has for the dtypes that attention weights and their scales can have."""

_BYTES = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}

_HEADER_LIMIT = 100_000_000
"""Bytes; the format's reference implementation refuses longer headers."""

_REMEDY = "download the file again"
_LFS = b"version "


@frozen
class Tensor:
    """One tensor of a checkpoint.

    Args:
        name: Its name.
        dtype: The header's name of its dtype, as ``F8_E4M3``.
        shape: Its shape.
        bytes: Its bytes in the file.
        path: The file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    path: Path

    @property
    def torch_dtype(self) -> str:
        """The dtype as torch names it; ``uint8`` for one that weights here cannot have."""
        return TORCH_DTYPES.get(self.dtype, "uint8")

    def __str__(self) -> str:
        return f"{self.name} is {self.dtype} {list(self.shape)}"


@frozen
class Header:
    """The header of one file."""

    path: Path
    entries: dict[str, Any]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor's entry, checked.

        Raises:
            ModelError: The entry is malformed, or its bytes do not fit its shape.
        """
        entry = self.entries[name]
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            good = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in shape)
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise _broken(self.path, f"the entry of {name} is malformed: {str(entry)[:120]}")
        expected = prod(shape) * _BYTES[dtype] if dtype in _BYTES else end - begin
        if end - begin != expected:
            raise _broken(self.path, f"{name} is {dtype} {list(shape)} and has {end - begin} bytes")
        return Tensor(name, dtype, shape, end - begin, self.path)


def _broken(path: Path, why: str, remedy: str = _REMEDY) -> ModelError:
    return ModelError(
        "a safetensors file of the checkpoint cannot be used",
        whom=str(path),
        why=why,
        remedy=remedy,
    )


def read_header(path: Path) -> Header:
    """Return a file's header; the lengths it states must fit the file's.

    Raises:
        ModelError: The file is missing, truncated, or no safetensors file.
    """
    try:
        if not path.is_file():
            raise _broken(path, "there is no such file")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == _LFS:
                raise _broken(path, "it is a Git LFS pointer, not the file itself")
            if len(start) < 8:
                raise _broken(path, f"it is truncated: {size} bytes, less than the first field")
            if length > _HEADER_LIMIT:
                raise _broken(path, f"it is no safetensors file: a header of {length} bytes")
            if 8 + length > size:
                raise _broken(
                    path, f"it is truncated: its header has {length} bytes, the file {size}"
                )
            data = file.read(length)
    except OSError as err:
        raise _broken(path, f"{type(err).__name__}: {err}") from err
    entries = parse_object(data, "the header of a safetensors file", path, _REMEDY)
    entries.pop("__metadata__", None)
    end = 0
    for name, entry in entries.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or type(offsets[0]) is not int
            or type(offsets[1]) is not int
            or not 0 <= offsets[0] <= offsets[1]
        ):
            raise _broken(path, f"the entry of {name} is malformed: {str(entry)[:120]}")
        end = max(end, offsets[1])
    held = size - 8 - length
    if end != held:
        state = "truncated" if end > held else "too long"
        raise _broken(path, f"it is {state}: its tensors take {end} bytes, the file holds {held}")
    return Header(path, entries)
