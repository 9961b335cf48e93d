"""How the entries of ignore lists and target lists meet the names of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from attrs import frozen

from npu_backend.errors import ModelError

__all__ = ["Pattern", "Said", "covered", "string_list"]

_GLOB = frozenset("*?[")


@frozen
class Said:
    """What a file says of one projection.

    Args:
        kind: One of :data:`~npu_backend.model.records.QUANT_KINDS`.
        words: The file's own words, for messages.
    """

    kind: str
    words: str


@frozen
class Pattern:
    """One entry of compressed-tensors: a name, a dotted suffix, or ``re:`` and an expression."""

    text: str
    regex: re.Pattern[str] | None

    @classmethod
    def parse(cls, text: str, where: str) -> Pattern:
        """Return the pattern of an entry.

        Raises:
            ModelError: The expression after ``re:`` is no regular expression.
        """
        if not text.startswith("re:"):
            return cls(text, None)
        try:
            return cls(text, re.compile(text[3:]))
        # A warning is an error under `-W error`, and a huge repeat count overflows.
        except (re.error, OverflowError, RecursionError, Warning) as err:
            raise ModelError(
                f"{text[:120]!r} is not a regular expression",
                whom=where,
                why=f"{type(err).__name__}: {err}",
                remedy="correct the entry of quantization_config",
            ) from err

    def names_one(self, names: Sequence[str]) -> bool:
        """Whether the entry is one of the names, a dotted suffix of one, or a glob for one."""
        if self.regex is not None:
            return False
        if _GLOB & set(self.text):
            return any(fnmatchcase(name, self.text) for name in names)
        suffix = "." + self.text
        return any(name == self.text or name.endswith(suffix) for name in names)

    def matches_one(self, names: Sequence[str]) -> bool:
        """Whether the expression matches a name from its beginning (``re.match``)."""
        return self.regex is not None and any(self.regex.match(name) for name in names)

    def meets(self, names: Sequence[str]) -> bool:
        """Whether the entry meets one of the names in either way."""
        return self.names_one(names) or self.matches_one(names)


def covered(entry: str, names: Sequence[str]) -> bool:
    """Whether an entry of ``modules_to_not_convert`` covers one of the names.

    Hosts look for the entry anywhere in the name. Here it must stand between dots, so that
    ``layers.7`` does not cover layer 78; a glob must cover the whole name.
    """
    if _GLOB & set(entry):
        return any(fnmatchcase(name, entry) for name in names)
    part = f".{entry.strip('.')}."
    return len(part) > 2 and any(part in f".{name}." for name in names)


def string_list(value: Any, what: str, where: str) -> list[str]:
    """Return a list of strings; an empty one for null.

    Raises:
        ModelError: The value is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ModelError(
            f"{what} is not a list of names",
            whom=where,
            why=f"it is {str(value)[:80]}",
            remedy="correct the entry of quantization_config",
        )
    return [entry for entry in value if entry]
