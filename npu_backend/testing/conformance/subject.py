"""The plugin under test: who it is, what it offers where, and plans in which it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from attrs import evolve, frozen
from packaging.utils import canonicalize_name

from npu_backend.api import Backend, load
from npu_backend.deployment import Deployment
from npu_backend.errors import PluginError
from npu_backend.model.records import MlaLayer
from npu_backend.offers import Answer, BmmSpec, Offer, PluginInfo, Record, Status
from npu_backend.plan import LayerPlan
from npu_backend.planner import plan_model
from npu_backend.registry import Registry
from npu_backend.registry.discovery import discover

__all__ = ["Subject", "plan_alone", "plan_one"]


def _identify(plugin: object, name: str | None, dist: str | None) -> PluginInfo:
    """Return who a plugin is: by its installed entry point, else by its module's name."""
    module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
    installed = [
        c.info
        for c in discover()
        if c.entry_point is not None and not c.hidden and c.entry_point.module == module
    ]
    fitting = [
        i
        for i in installed
        if name in (None, i.name) and dist in (None, i.dist, canonicalize_name(dist or ""))
    ]
    if fitting:
        return fitting[0]
    top, _, last = module.rpartition(".")
    return PluginInfo(name or last, str(canonicalize_name(dist or top.partition(".")[0] or last)))


@frozen(eq=False)
class Subject:
    """A plugin in a registry of its own: the built-ins and nobody else beside it.

    Args:
        info: Who it is.
        backend: The registry, strict: what the plugin does wrong is raised.
    """

    info: PluginInfo
    backend: Backend

    @classmethod
    def of(
        cls,
        plugin: object,
        *,
        name: str | None = None,
        dist: str | None = None,
        without: Iterable[str] = (),
    ) -> Subject:
        """Register a plugin beside the built-ins.

        Args:
            plugin: The module or object with the hooks.
            name: Entry point's name; default: the installed one's, else the module's.
            dist: Distribution's name; likewise.
            without: Built-ins to leave out.

        Raises:
            PluginError: There is no plugin, or it does not fit the hooks.
        """
        if plugin is None:
            raise PluginError(
                "the suite has no plugin",
                whom="a conformance suite",
                why="its attribute `plugin` is None",
                remedy="set `plugin` to the module that holds the hooks",
            )
        info = _identify(plugin, name, dist)
        backend = load(
            third_party=False, strict=True, disable=[w for w in without if w != info.name]
        )
        active = [r.info for r in backend.registry.plugins if r.status is Status.ACTIVE]
        if info not in active:
            # Also where it is installed: what a test holds in its hands is what is tested.
            info = backend.registry.register(
                plugin, name=info.name, dist=info.dist, version=info.version
            )
        return cls(info, backend)

    @property
    def registry(self) -> Registry:
        """The registry that holds it."""
        return self.backend.registry

    def _own(self, answers: Iterable[Answer]) -> tuple[Record, ...]:
        return tuple(r for a in answers if a.plugin == self.info for r in a.records)

    def kernels(self, bmm: BmmSpec, deployment: Deployment) -> tuple[Record, ...]:
        """Return what it says of a batched matmul."""
        return self._own(self.registry.ask_bmm(bmm, deployment))

    def paths(self, layer: MlaLayer, deployment: Deployment) -> tuple[Record, ...]:
        """Return what it says of a layer's path."""
        return self._own(self.registry.ask_paths(layer, deployment))

    def votes(
        self, layer: MlaLayer, deployment: Deployment, readers: Mapping[str, tuple[str, ...]]
    ) -> tuple[Record, ...]:
        """Return its votes on a layer's weights."""
        return self._own(self.registry.ask_release(layer, deployment, readers))


@frozen(eq=False)
class _Alone:
    """Answers in which a site, or the path, has the offers of one strategy of one plugin only."""

    registry: Any
    info: PluginInfo
    strategy: str
    kind: str

    def _only(self, answers: tuple[Answer, ...]) -> tuple[Answer, ...]:
        kept = []
        for answer in answers:
            mine = answer.plugin == self.info
            records = tuple(
                r
                for r in answer.records
                if not isinstance(r, Offer) or (mine and r.strategy == self.strategy)
            )
            if records:
                kept.append(evolve(answer, records=records))
        return tuple(kept)

    def ask_paths(self, layer: MlaLayer, deployment: Deployment) -> tuple[Answer, ...]:
        answers: tuple[Answer, ...] = self.registry.ask_paths(layer, deployment)
        return self._only(answers) if self.kind == "path" else answers

    def ask_bmm(self, bmm: BmmSpec, deployment: Deployment) -> tuple[Answer, ...]:
        answers: tuple[Answer, ...] = self.registry.ask_bmm(bmm, deployment)
        return self._only(answers) if self.kind == bmm.site else answers

    def ask_release(
        self, layer: MlaLayer, deployment: Deployment, readers: Mapping[str, tuple[str, ...]]
    ) -> tuple[Answer, ...]:
        answers: tuple[Answer, ...] = self.registry.ask_release(layer, deployment, readers)
        return answers


def plan_one(
    subject: Subject, layer: MlaLayer, deployment: Deployment, kind: str, strategy: str
) -> LayerPlan:
    """Plan one layer in which a strategy of the plugin serves wherever it is legal.

    Args:
        subject: The plugin.
        layer: The layer.
        deployment: What is planned for.
        kind: ``path``, ``q_absorb`` or ``v_up``.
        strategy: The strategy.

    Raises:
        RequestUnmetError: It cannot serve.
    """
    request = f"{kind}={subject.info.dist}/{strategy}"
    wished = deployment.evolve(requests=(*deployment.requests, request))
    return plan_model([layer], wished, subject.registry).layers[0]


def plan_alone(
    subject: Subject, layer: MlaLayer, deployment: Deployment, kind: str, strategy: str
) -> LayerPlan:
    """Plan one layer in which nobody else serves: what it does not cover is an error.

    Raises:
        SelectionError: It does not cover everything reachable.
    """
    answers = _Alone(subject.registry, subject.info, strategy, kind)
    return plan_model([layer], deployment, answers).layers[0]
