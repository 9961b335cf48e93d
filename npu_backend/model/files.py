"""Reading one JSON file: whatever is wrong with it becomes one error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from npu_backend.errors import ModelError

__all__ = ["JSON_LIMIT", "parse_object", "read_object"]

JSON_LIMIT = 1 << 30
"""Bytes. A description or index names each tensor: about 100 bytes for each of half a million."""

_LFS = b"version https://git-lfs"


def read_object(path: Path, what: str, remedy: str, *, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Args:
        path: The file.
        what: What the file is, as in ``the model's config``; begins the error.
        remedy: What to do about a file that cannot be used.
        limit: Bytes above which the file cannot be what it should be, so it is not read.

    Raises:
        ModelError: The file is missing, unreadable, empty, too large, not UTF-8, not JSON, or its
            JSON is no object.
    """
    try:
        if not path.is_file():
            why = "it is not a regular file" if path.exists() else "there is no such file"
            raise _unusable(what, path, why, remedy)
        size = path.stat().st_size
        if size > limit:
            why = f"it has {size} bytes, more than the {limit} such a file can have"
            raise _unusable(what, path, why, remedy)
        data = path.read_bytes()
    except (OSError, ValueError) as err:  # ValueError: a NUL in the name
        raise _unusable(what, path, f"{type(err).__name__}: {err}", remedy) from err
    return parse_object(data, what, path, remedy)


def parse_object(data: bytes, what: str, path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object that bytes of a file hold.

    Raises:
        ModelError: The bytes are empty, not UTF-8, not JSON, or no object.
    """
    if not data.strip():
        raise _unusable(what, path, "it is empty", remedy)
    if data.startswith(_LFS):
        raise _unusable(what, path, "it is a Git LFS pointer, not the file itself", remedy)
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as err:
        why = f"it is not UTF-8 text (byte {err.start}): binary, or cut inside a character"
        raise _unusable(what, path, why, remedy) from err
    except RecursionError as err:
        raise _unusable(what, path, "its JSON is nested too deeply", remedy) from err
    except ValueError as err:  # JSONDecodeError, and integers too long to convert
        raise _unusable(what, path, f"it is not JSON, or is cut off: {err}", remedy) from err
    if not isinstance(value, dict):
        why = f"its JSON is a {type(value).__name__}, not an object"
        raise _unusable(what, path, why, remedy)
    return value


def _unusable(what: str, path: Path, why: str, remedy: str) -> ModelError:
    return ModelError(f"{what} cannot be used", whom=str(path), why=why, remedy=remedy)
