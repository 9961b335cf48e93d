"""Why one plugin is asked before another, and where nothing but their names decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from npu_backend.offers import PluginInfo
from npu_backend.registry.discovery import CORE_DISTRIBUTION
from npu_backend.registry.records import HookRecord, PluginRecord

__all__ = ["Tie", "ties", "why_first"]

BY_NAME = "of equal standing; of these the last by distribution and entry-point name is asked first"


@frozen
class Tie:
    """Third parties of equal standing in one hook.

    Args:
        hook: The hook.
        plugins: In call order: which is that of names, backwards.
    """

    hook: str
    plugins: tuple[PluginInfo, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"hook": self.hook, "plugins": [p.provider for p in self.plugins], "by": BY_NAME}


def _standing(record: PluginRecord, hook: HookRecord) -> tuple[bool, bool, bool, bool]:
    builtin = record.info.dist == CORE_DISTRIBUTION
    return hook.wrapper, hook.tryfirst, not hook.trylast, not builtin


def _placed(records: Iterable[PluginRecord], hook: str) -> list[tuple[PluginRecord, HookRecord]]:
    found = [(r, h) for r in records for h in r.hooks if h.hook == hook]
    return sorted(found, key=lambda pair: pair[1].position)


def ties(records: Sequence[PluginRecord], hooks: Iterable[str]) -> tuple[Tie, ...]:
    """Return, by hook, the third parties between which only their names decide."""
    found = []
    for hook in hooks:
        groups: dict[tuple[bool, ...], list[PluginInfo]] = {}
        for record, placed in _placed(records, hook):
            if record.info.dist != CORE_DISTRIBUTION and not placed.wrapper:
                groups.setdefault(_standing(record, placed), []).append(record.info)
        found += [Tie(hook, tuple(dict.fromkeys(g))) for g in groups.values() if len(set(g)) > 1]
    return tuple(found)


def why_first(records: Sequence[PluginRecord], hook: str, first: str, second: str) -> str:
    """Return why one provider's offers come before another's.

    Args:
        records: The registry's records.
        hook: The hook.
        first: Provider that is asked first, ``NAME (DIST VERSION)``.
        second: Provider that is asked later.
    """
    if first == second:
        return "the plugin itself names it first"
    by_provider = {r.info.provider: (r, h) for r, h in reversed(_placed(records, hook))}
    if first not in by_provider or second not in by_provider:
        return "a wrapper put it there"
    (a, at_a), (b, at_b) = by_provider[first], by_provider[second]
    if at_a.position > at_b.position:
        # An offer of who was asked earlier was dropped, or covers other rows.
        return "what is asked before it does not cover these rows"
    if at_a.tryfirst != at_b.tryfirst:
        return "it is marked tryfirst"
    if at_a.trylast != at_b.trylast:
        return "the other is marked trylast"
    if CORE_DISTRIBUTION not in (a.info.dist, b.info.dist):
        return BY_NAME
    if a.info.dist == b.info.dist:
        return "built-ins are asked in their fixed order"
    return "third parties are asked before built-ins"
