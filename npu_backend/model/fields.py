"""Checked access to the fields of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

__all__ = ["MAX_DIM", "MAX_LAYERS", "Fields"]

MAX_LAYERS = 4096
MAX_DIM = 1 << 24
"""Bounds beyond which a size is a mistake in the file; no model is within a factor of ten."""


@frozen
class Fields:
    """The fields of a config; problems are collected, so that one error names them all.

    Args:
        raw: The config.
        problems: What is wrong with it, filled as fields are asked for.
    """

    raw: Mapping[str, Any]
    problems: list[str] = field(factory=list)

    def integer(self, key: str, low: int, high: int = MAX_DIM) -> int:
        """Return an integer field; ``low`` where it is missing or wrong, which is a problem."""
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            said = "is missing" if value is None else f"is {value!r:.80}, not an integer"
            self.problems.append(f"{key} {said}")
        elif not low <= value <= high:
            self.problems.append(f"{key} is {_brief(value)}, not between {low} and {high}")
        else:
            return value
        return low

    def optional(self, key: str, low: int, high: int = MAX_DIM) -> int | None:
        """Return an integer field, or None where it is missing or null."""
        return None if self.raw.get(key) is None else self.integer(key, low, high)

    def flag(self, key: str) -> bool:
        """Return a boolean field; False where it is missing or null."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key} is {value!r:.80}, neither true nor false")
        return value is True


def _brief(value: int) -> str:
    # Python refuses to print integers of thousands of digits, and nobody would read them.
    return str(value) if abs(value) < 1 << 64 else "an integer beyond 64 bits"
