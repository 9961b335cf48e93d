"""Validators of the records that hosts build: what cannot be used is an error in four parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from npu_backend.errors import NpuBackendError

__all__ = ["Validator", "flag", "instance", "items", "pairs", "text", "whole", "word"]

Validator = Callable[[Any, Any, Any], None]
"""As attrs calls it: record, attribute, value."""

Error = type[NpuBackendError]


def _refuse(error: Error, record: Any, name: str, value: Any, why: str, wanted: str) -> None:
    raise error(
        f"{name} = {value!r:.80} cannot be used",
        whom=f"a {type(record).__name__} record",
        why=why,
        remedy=f"give {wanted}",
    )


def _kind(value: Any) -> str:
    return "it is None" if value is None else f"it is a {type(value).__name__}"


def whole(error: Error, low: int, *, optional: bool = False) -> Validator:
    """Take a whole number of at least ``low``; ``True`` is none."""
    wanted = f"a whole number of at least {low}" + (", or None" if optional else "")

    def check(record: Any, attribute: Any, value: Any) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(error, record, attribute.name, value, _kind(value), wanted)
        elif value < low:
            _refuse(error, record, attribute.name, value, f"it is below {low}", wanted)

    return check


def flag(error: Error) -> Validator:
    """Take True or False."""

    def check(record: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, bool):
            _refuse(error, record, attribute.name, value, _kind(value), "True or False")

    return check


def text(error: Error, *, optional: bool = False) -> Validator:
    """Take a text."""
    wanted = "a text" + (", or None" if optional else "")

    def check(record: Any, attribute: Any, value: Any) -> None:
        if not (isinstance(value, str) or (optional and value is None)):
            _refuse(error, record, attribute.name, value, _kind(value), wanted)

    return check


def word(error: Error, known: Collection[str], *, optional: bool = False) -> Validator:
    """Take one of the known words."""
    wanted = "one of " + ", ".join(known) + (", or None" if optional else "")

    def check(record: Any, attribute: Any, value: Any) -> None:
        if optional and value is None:
            return
        if not isinstance(value, str):
            _refuse(error, record, attribute.name, value, _kind(value), wanted)
        elif value not in known:
            _refuse(error, record, attribute.name, value, "it is not known", wanted)

    return check


def instance(error: Error, kind: type | tuple[type, ...], wanted: str) -> Validator:
    """Take a record of a class, or of one of some."""

    def check(record: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, kind):
            _refuse(error, record, attribute.name, value, _kind(value), wanted)

    return check


def items(error: Error, what: str, value: Any, wanted: str) -> tuple[Any, ...]:
    """Return the items of what can be iterated; a text, a mapping and a number cannot."""
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise error(
            f"{value!r:.80} cannot be used as {what}",
            whom=what,
            why=_kind(value),
            remedy=f"give {wanted}",
        )
    return tuple(value)


def pairs(error: Error, what: str, value: Any, wanted: str) -> dict[Any, Any]:
    """Return a mapping, or pairs as a record holds them, as a dict."""
    try:
        return dict(value)
    except (TypeError, ValueError) as err:
        raise error(
            f"{value!r:.80} cannot be used as {what}",
            whom=what,
            why=_kind(value),
            remedy=f"give {wanted}",
        ) from err
