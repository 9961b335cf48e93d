"""Plugins: found, checked, ordered, guarded, and asked through typed calls.

One entry point that is broken takes no other down; each has a :class:`PluginRecord` that says what
became of it. Nobody but :class:`Registry` calls a hook.
"""

from npu_backend.registry.discovery import (
    BUILTIN_ORDER,
    CORE_DISTRIBUTION,
    ENTRY_POINT_GROUP,
    PLUGIN_API,
)
from npu_backend.registry.records import HookRecord, PluginRecord, PluginWarning
from npu_backend.registry.registry import Registry

__all__ = [
    "BUILTIN_ORDER",
    "CORE_DISTRIBUTION",
    "ENTRY_POINT_GROUP",
    "PLUGIN_API",
    "HookRecord",
    "PluginRecord",
    "PluginWarning",
    "Registry",
]
