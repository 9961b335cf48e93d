"""The registry: loads plugins one by one and is the only one that calls hooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution
from types import MappingProxyType
from typing import cast

from attrs import field, frozen
from packaging.utils import canonicalize_name
from pluggy import HookImpl, PluginManager

from npu_backend import hookspecs
from npu_backend.deployment import Deployment
from npu_backend.errors import PluginError
from npu_backend.model.records import MlaLayer
from npu_backend.offers import Answer, BmmSpec, PluginInfo, Status
from npu_backend.registry.adapter import Adapter
from npu_backend.registry.controls import STRICT_VARIABLE, Controls
from npu_backend.registry.discovery import Candidate, discover
from npu_backend.registry.records import HookRecord, PluginRecord, PluginWarning, describe
from npu_backend.registry.records import plugin_error as _error
from npu_backend.registry.validate import HOOK_ARGUMENTS

__all__ = ["Registry"]


@frozen
class _Entry:
    """One plugin as the registry keeps it; only an active one has an adapter."""

    info: PluginInfo
    status: Status
    reason: str = ""
    adapter: Adapter | None = field(default=None, repr=False)


class Registry:
    """Plugins in a fixed order, each guarded, asked through typed calls.

    An empty one has no plugin; :meth:`load` fills one from installed distributions,
    :meth:`register` adds one that a host or a test holds in its hands.

    Args:
        strict: Whether a plugin's failure is raised as :class:`~npu_backend.errors.PluginError`
            instead of recorded.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._pm = PluginManager(hookspecs.hookspec.project_name)
        self._pm.add_hookspecs(hookspecs)
        self._entries: list[_Entry] = []
        self._warned: set[tuple[PluginInfo, str]] = set()
        self._ask_paths = self._pm.hook.select_preprocess_path
        self._ask_bmm = self._pm.hook.select_bmm_kernel
        self._ask_release = self._pm.hook.release_weights

    # --- loading --------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        *,
        enable: Iterable[str] | str | None = None,
        disable: Iterable[str] | str = (),
        strict: bool | None = None,
        third_party: bool = True,
        extra: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        distributions: Iterable[Distribution] | None = None,
    ) -> Registry:
        """Return a registry with the plugins of the installed distributions.

        Built-ins are registered first, in the order of
        :data:`~npu_backend.registry.BUILTIN_ORDER`, then third parties by canonical distribution
        name and entry-point name, then ``extra``. pluggy asks the last registered first. A plugin
        that is not allowed is not imported.

        Args:
            enable: Allow list; replaces ``NPU_BACKEND_PLUGINS``. Names are those of entry points,
                ``DIST/NAME``, or those of distributions (``npu-backend``: all built-ins).
            disable: Block list; adds to ``NPU_BACKEND_DISABLE``.
            strict: Whether a failure is an error; default: ``NPU_BACKEND_STRICT``.
            third_party: False leaves out the plugins of other distributions; ``extra`` stays.
            extra: Plugins in hand, by name. One that cannot be registered is always an error.
            environ: Environment to read; default: the process's.
            distributions: Where to look; default: what is on ``sys.path``.

        Raises:
            PluginError: ``npu-backend`` is not installed; a list names what does not exist; a
                plugin of ``extra`` does not fit; or, under strict, any plugin cannot be loaded.
        """
        controls = Controls.read(
            os.environ if environ is None else environ,
            enable=enable,
            disable=disable,
            strict=strict,
            third_party=third_party,
        )
        candidates = discover(distributions)
        in_hand = {PluginInfo(name): plugin for name, plugin in (extra or {}).items()}
        controls.check([*(c.info for c in candidates), *in_hand])
        registry = cls(strict=controls.strict)
        for candidate in candidates:
            if candidate.hidden:
                registry._note(candidate.info, Status.SHADOWED, candidate.hidden)
            elif why := controls.blocks(candidate.info):
                registry._note(candidate.info, Status.BLOCKED, why)
            else:
                registry._load(candidate)
        for info, plugin in in_hand.items():
            if why := controls.blocks(info, installed=False):
                registry._note(info, Status.BLOCKED, why)
            else:
                registry._add(plugin, info)
        return registry

    def register(
        self,
        plugin: object,
        *,
        name: str,
        dist: str = "unknown",
        version: str = "unknown",
    ) -> PluginInfo:
        """Add a plugin that the caller holds in its hands: all of it, or nothing.

        Args:
            plugin: A module or an object with functions marked by ``hookimpl``.
            name: Its name.
            dist: Distribution that it is said to come from.
            version: Version of that distribution.

        Returns:
            Who it is now, as in its answers.

        Raises:
            PluginError: It does not fit the hooks, or is registered already.
        """
        info = PluginInfo(name, str(canonicalize_name(dist)), version)
        self._add(plugin, info)
        return info

    def _load(self, candidate: Candidate) -> None:
        """Import and add one candidate; whatever is wrong with it stays its own affair."""
        info = candidate.info
        try:
            plugin = candidate.load()
            if twin := self._twin(plugin):
                self._note(info, Status.SHADOWED, f"it is the same object as {twin}")
            else:
                self._add(plugin, info)
        except PluginError as error:
            if self.strict:
                raise
            what = error.what.removeprefix(f"{info} ")
            self._note(info, Status.FAILED, f"{what}: {'; '.join(error.why)}")
            warnings.warn(str(error), PluginWarning, stacklevel=3)

    def _add(self, plugin: object, info: PluginInfo) -> None:
        """Check everything, then register everything."""
        name = f"{info.dist}/{info.name}"
        twin = self._twin(plugin)
        if twin or self._pm.has_plugin(name):
            raise _error(
                info,
                "is registered already",
                whom="the registration of its hooks",
                why=f"it is the same object as {twin}" if twin else f"{name} is taken",
                remedy="register it once, or give it another name",
            )
        try:
            adapter = Adapter(plugin, info, strict=self.strict)
            try:
                self._pm.register(adapter, name)
            except BaseException:
                # Half a plugin is worse than none: its votes without its offers, say.
                if self._pm.has_plugin(name):
                    self._pm.unregister(name=name)
                raise
        except PluginError:
            raise
        except Exception as err:
            raise _error(
                info,
                "cannot be registered",
                whom="the registration of its hooks",
                why=describe(err),
                remedy="correct the plugin; none of its hooks is called",
            ) from err
        self._entries.append(_Entry(info, Status.ACTIVE, adapter=adapter))

    def _twin(self, plugin: object) -> PluginInfo | None:
        """Return under whose name the very same object is registered already."""
        for entry in self._entries:
            if entry.adapter is not None and entry.adapter.plugin is plugin:
                return entry.info
        return None

    def _note(self, info: PluginInfo, status: Status, reason: str) -> None:
        self._entries.append(_Entry(info, status, reason))

    # --- asking ---------------------------------------------------------------------------------

    def ask_paths(self, layer: MlaLayer, deployment: Deployment) -> tuple[Answer, ...]:
        """Ask every plugin for the paths of one layer; answers in call order.

        Raises:
            PluginError: A plugin failed, under strict.
        """
        return self._told(self._ask_paths(layer=layer, deployment=deployment))

    def ask_bmm(self, bmm: BmmSpec, deployment: Deployment) -> tuple[Answer, ...]:
        """Ask every plugin for the kernels of one batched matmul; answers in call order.

        Raises:
            PluginError: A plugin failed, under strict.
        """
        return self._told(self._ask_bmm(bmm=bmm, deployment=deployment))

    def ask_release(
        self, layer: MlaLayer, deployment: Deployment, readers: Mapping[str, tuple[str, ...]]
    ) -> tuple[Answer, ...]:
        """Ask every plugin for its votes on one layer's weights; answers in call order.

        Raises:
            PluginError: A plugin failed, under strict.
        """
        # Read-only, or one plugin could change what the next one, and the planner, believe.
        shown = MappingProxyType(readers if isinstance(readers, dict) else dict(readers))
        return self._told(self._ask_release(layer=layer, deployment=deployment, readers=shown))

    def _told(self, answers: list[Answer]) -> tuple[Answer, ...]:
        for answer in answers:
            if answer.failure is not None:
                self._warn_of(answer)
        return tuple(answers)

    def _warn_of(self, answer: Answer) -> None:
        """Warn of a failing hook, once: the plan holds the rest."""
        failure = answer.failure
        if failure is None or (answer.plugin, failure.hook) in self._warned:
            return
        self._warned.add((answer.plugin, failure.hook))
        error = _error(
            answer.plugin,
            f"failed in {failure.hook}",
            whom=f"the hook {failure.hook}",
            why=failure.message,
            remedy=f"correct or block it; with {STRICT_VARIABLE}=1 it is an error with a traceback",
        )
        warnings.warn(str(error), PluginWarning, stacklevel=4)

    # --- showing --------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[PluginRecord, ...]:
        """Every plugin, whatever became of it, in order of registration."""
        hooks: dict[int, list[HookRecord]] = {}
        for hook in HOOK_ARGUMENTS:
            for position, each in enumerate(self._calls(hook), start=1):
                record = HookRecord(
                    hook=hook,
                    tryfirst=each.tryfirst,
                    trylast=each.trylast,
                    wrapper=each.wrapper,
                    position=position,
                )
                hooks.setdefault(id(each.plugin), []).append(record)
        return tuple(
            PluginRecord(
                info=entry.info,
                status=entry.status,
                reason=entry.reason or self._namesakes(entry),
                hooks=tuple(hooks.get(id(entry.adapter), ())),
            )
            for entry in self._entries
        )

    def call_order(self, hook: str) -> tuple[PluginInfo, ...]:
        """Return whose implementations of a hook are called, the first called first.

        Wrappers come before all others. A plugin that implements a hook twice stands there twice.
        """
        return tuple(cast("Adapter", each.plugin).info for each in self._calls(hook))

    def _calls(self, hook: str) -> tuple[HookImpl, ...]:
        return tuple(reversed(getattr(self._pm.hook, hook).get_hookimpls()))

    def _namesakes(self, entry: _Entry) -> str:
        """Say of an active plugin which others have its name."""
        info = entry.info
        others = sorted(
            f"{e.info.dist}/{e.info.name}"
            for e in self._entries
            if e.info.name == info.name and e.info.dist != info.dist and e.status is Status.ACTIVE
        )
        return f"{', '.join(others)} has the same name; both are asked" if others else ""
