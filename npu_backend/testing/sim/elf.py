"""Reads the symbol names of ELF libraries, without a dependency.

Only what is needed to say, before torch_npu is imported, which symbols the stand-ins lack: an
import that fails half-way would leave the process unusable.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

__all__ = ["cann_symbols_missing", "symbols"]

_DYNSYM = 11
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_WEAK = 2
# Names that CANN's libraries export; everything else comes from torch or the C library.
_CANN = re.compile(r"(acl[A-Z]|acl(rt|mdl|op|sys|prof|sk|nn)|Hccl|Msprof|rt[A-Z]|_ZNK?(2ge|3atb))")


def symbols(path: Path) -> tuple[set[str], set[str]]:
    """Return the (defined, undefined) dynamic symbols of a library; weak undefined ones left out.

    Raises:
        ValueError: The file is no 64-bit little-endian ELF library with a symbol section.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
    header = _HEADER.unpack_from(data)
    offset, entry_size, count = header[6], header[11], header[12]
    sections = [_SECTION.unpack_from(data, offset + i * entry_size) for i in range(count)]
    for section in sections:
        if section[1] != _DYNSYM:
            continue
        strings = sections[section[6]][4]
        defined: set[str] = set()
        undefined: set[str] = set()
        for at in range(section[4], section[4] + section[5], _SYMBOL.size):
            name, info, _, index, _, _ = _SYMBOL.unpack_from(data, at)
            start = strings + name
            text = data[start : data.index(b"\0", start)].decode("ascii", "replace")
            if index:
                defined.add(text)
            elif info >> 4 != _WEAK:
                undefined.add(text)
        return defined, undefined
    raise ValueError(f"{path} has no dynamic symbol table")


def cann_symbols_missing(standins: Path, libraries: list[Path]) -> list[str]:
    """Return the CANN symbols that libraries need and the stand-ins do not define, sorted."""
    have, _ = symbols(standins)
    own: set[str] = set()
    need: set[str] = set()
    for library in libraries:
        defined, undefined = symbols(library)
        own |= defined
        need |= {name for name in undefined if _CANN.match(name)}
    return sorted(need - own - have)
