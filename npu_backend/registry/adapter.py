"""What pluggy registers in a plugin's place."""

from __future__ import annotations

from npu_backend.hookspecs import hookimpl
from npu_backend.offers import PluginInfo
from npu_backend.registry.guard import Guard
from npu_backend.registry.validate import implementations

__all__ = ["Adapter"]


class Adapter:
    """Holds the guarded functions of one plugin.

    Compared by identity, as pluggy needs it, whatever the plugin's own ``==`` does.

    Args:
        plugin: The module or object.
        info: Who it is.
        strict: Whether a failure is raised instead of answered.

    Raises:
        PluginError: The plugin does not fit the hooks.
    """

    def __init__(self, plugin: object, info: PluginInfo, *, strict: bool) -> None:
        self.plugin = plugin
        self.info = info
        for index, each in enumerate(implementations(plugin, info)):
            guard = Guard(each, info, strict=strict)
            marked = hookimpl(
                guard.function(wrapper=each.wrapper),
                specname=each.hook,
                tryfirst=each.tryfirst,
                trylast=each.trylast,
                wrapper=each.wrapper,
            )
            setattr(self, f"implementation_{index}", marked)
