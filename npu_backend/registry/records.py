"""What is known of each plugin, and the texts in which its faults are told."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from attrs import frozen

from npu_backend.errors import PluginError
from npu_backend.offers import PluginInfo, Status

__all__ = ["HookRecord", "PluginRecord", "PluginWarning", "describe", "plugin_error"]

MESSAGE_LIMIT = 500
"""Characters of a foreign exception's text that a record keeps."""

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class PluginWarning(UserWarning):
    """A plugin failed and the others go on without it."""


@frozen(kw_only=True)
class HookRecord:
    """One hook implementation of a plugin.

    Args:
        hook: Name of the hook.
        tryfirst: Asked before those without.
        trylast: Asked after those without.
        wrapper: Runs around the others and sees their answers.
        position: Place in the hook's call order, 1 is called first; wrappers come before all
            others.
    """

    hook: str
    tryfirst: bool = False
    trylast: bool = False
    wrapper: bool = False
    position: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "hook": self.hook,
            "position": self.position,
            "tryfirst": self.tryfirst,
            "trylast": self.trylast,
            "wrapper": self.wrapper,
        }


@frozen(kw_only=True)
class PluginRecord:
    """What became of one entry point or registered plugin.

    Args:
        info: Who it is.
        status: ``active``, ``blocked``, ``failed`` or ``shadowed``.
        reason: Why it is not active; of an active one, what is worth knowing, or empty.
        hooks: Its live implementations; empty unless active.
    """

    info: PluginInfo
    status: Status
    reason: str = ""
    hooks: tuple[HookRecord, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.info.name,
            "dist": self.info.dist,
            "version": self.info.version,
            "entry_point": self.info.entry_point,
            "status": self.status.value,
            "reason": self.reason,
            "hooks": [hook.to_dict() for hook in self.hooks],
        }


def describe(err: BaseException) -> str:
    """Return type and text of a foreign exception on one line.

    Addresses are taken out, for the text stands in plans and equal inputs give equal bytes.
    """
    try:
        text = " ".join(str(err).split())
    except Exception:  # noqa: BLE001 - a __str__ that fails must not hide what it belongs to
        text = "(its text cannot be shown)"
    text = _ADDRESS.sub("0x...", text)
    if len(text) > MESSAGE_LIMIT:
        text = text[:MESSAGE_LIMIT] + "..."
    return f"{type(err).__name__}: {text}" if text else type(err).__name__


def plugin_error(
    info: PluginInfo, what: str, *, whom: str, why: str | Iterable[str], remedy: str
) -> PluginError:
    """Return an error whose first words say which plugin it is about."""
    return PluginError(f"{info} {what}", whom=whom, why=why, remedy=remedy)
